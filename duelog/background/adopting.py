"""Adoption of what compaction has finished, by the process that has the store open; see cleanup/adoption.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyroaring import BitMap

from duelog.cleanup.adoption import Adopted, adopt_ready
from duelog.cleanup.compaction import READY
from duelog.cleanup.origin import Relied
from duelog.cleanup.retention import reason_to_keep
from duelog.partitions.partition_set import PartitionSet
from duelog.store.clock import StoreClock
from duelog.store.env.environment import Environment

from ..topics.topic_list import Topics

_log = logging.getLogger("duelog.maintenance")


@dataclass(eq=False, repr=False)
class Adopting:
    """Looks for finished generations, and has the partitions of an open store go over to them."""

    _path: Path
    _main: Environment
    _partitions: PartitionSet
    _topics: Topics
    _store_id: bytes
    _clock: StoreClock
    more: bool = field(default=False, init=False)
    """Whether the last run left something to do."""
    refused: list[str] = field(default_factory=list, init=False)
    """Why finished generations were thrown away since the store was opened, the newest last."""

    def run(self, at_most: int | None = None) -> int:
        """Adopt what is there, or throw it away; how many were adopted. One stat(2) where there is nothing.

        at_most: of how many the fate is decided; each costs a commit, some syncs and the removal of a file.

        REQUIRES: Maintenance.lock, and deletions are not held back. Raises StoreFull, StoreFailed.
        """
        ready = self._path / "staging" / READY
        if not ready.exists():
            self.more = False
            return 0
        done = adopt_ready(
            self._path, self._main, self._store_id, self._partitions, self._reason_against, at_most=at_most
        )
        self.more = bool(done) and ready.exists()
        refused = [f"{each.name}: {each.reason}" for each in done if not isinstance(each, Adopted)]
        for each in refused:
            _log.warning("%s: what was compacted is thrown away: %s", self._path, each)
        self.refused += refused
        return sum(isinstance(each, Adopted) for each in done)

    def _reason_against(self, relied_on: Sequence[Relied]) -> str | None:
        """Why what a generation relies on does not hold here: a subscription that has gone back, or retention."""
        with self._main.read() as raw:
            retained = reason_to_keep(raw, relied_on, self._clock.now_ms())
        return retained or self._gone_back(relied_on)

    def _gone_back(self, relied_on: Sequence[Relied]) -> str | None:
        """A seek takes effect in memory before it is on disk."""
        loaded = {topic.topic_id: topic for topic in self._topics.loaded()}
        for topic_id, ledger_id, serialised in relied_on:
            topic = loaded.get(topic_id)
            if topic is None or topic.log.entries_of(ledger_id) is None:
                continue  # not loaded: the disk has it all; trimmed: no seek can go back to it
            positions = BitMap.deserialize(serialised)
            for subscription in list(topic.subscriptions.values()):
                with subscription.lock:
                    left = subscription.acks.unacked(ledger_id, 0, max(positions, default=-1) + 1)
                if left & positions:
                    return f"subscription {subscription.name!r} of {topic.name} has gone back to what was dropped"
        return None
