"""Adoption of what compaction has finished, by the process that has the store open; see cleanup/adoption.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyroaring import BitMap

from duelog.cleanup.adoption import Adopted, adopt_ready
from duelog.cleanup.compaction import READY
from duelog.partitions.partition_set import PartitionSet
from duelog.store import catalog
from duelog.store.clock import StoreClock
from duelog.store.config import StoreConfig
from duelog.store.environment import Environment
from duelog.store.format import LedgerState
from duelog.store.origin import Relied

from .topics import Topics


class Adopting:
    """Looks for finished generations, and has the partitions of an open store go over to them."""

    def __init__(
        self,
        path: Path,
        main: Environment,
        partitions: PartitionSet,
        topics: Topics,
        store_id: bytes,
        config: StoreConfig,
        clock: StoreClock,
    ) -> None:
        self._path = path
        self._ready = path / "staging" / READY
        self._main = main
        self._partitions = partitions
        self._topics = topics
        self._store_id = store_id
        self._config = config
        self._clock = clock
        self.more = False
        """Whether the last run left something to do."""
        self.refused: list[str] = []
        """Why finished generations were thrown away since the store was opened, the newest last."""

    def run(self, at_most: int | None = None) -> int:
        """Adopt what is there, or throw it away; how many were adopted. One stat(2) where there is nothing.

        at_most: of how many the fate is decided; each costs a commit, some syncs and the removal of a file.

        REQUIRES: Maintenance.lock, and nobody holds deletions back. Raises StoreFull, StoreFailed.
        """
        if not self._ready.exists():
            self.more = False
            return 0
        done = adopt_ready(
            self._path, self._main, self._store_id, self._partitions, self._reason_against, at_most=at_most
        )
        self.more = bool(done) and self._ready.exists()
        self.refused += [f"{each.name}: {each.reason}" for each in done if not isinstance(each, Adopted)]
        return sum(isinstance(each, Adopted) for each in done)

    def _reason_against(self, relied_on: Sequence[Relied]) -> str | None:
        """Why what a generation relies on does not hold here: a subscription that has gone back, or retention."""
        return self._gone_back(relied_on) or self._retained(relied_on)

    def _gone_back(self, relied_on: Sequence[Relied]) -> str | None:
        """A seek takes effect in memory before it is on disk."""
        loaded = {topic.topic_id: topic for topic in self._topics.loaded()}
        for topic_id, ledger_id, serialised in relied_on:
            topic = loaded.get(topic_id)
            if topic is None or topic.log.entries_of(ledger_id) is None:
                continue  # not loaded: the disk has it all; trimmed: nobody can go back to it
            positions = BitMap.deserialize(serialised)
            for subscription in list(topic.subscriptions.values()):
                with subscription.lock:
                    left = subscription.acks.unacked(ledger_id, 0, max(positions, default=-1) + 1)
                if left & positions:
                    return f"subscription {subscription.name!r} of {topic.name} has gone back to what was dropped"
        return None

    def _retained(self, relied_on: Sequence[Relied]) -> str | None:
        """What compaction is not told, since a store does not keep its configuration, unless by `--retention`."""
        retention_ms, retention_bytes = self._config.retention_ms, self._config.retention_bytes
        if not retention_ms and not retention_bytes:
            return None
        now_ms = self._clock.now_ms()
        with self._main.read() as raw:
            for topic_id in {relied.topic_id for relied in relied_on}:
                ledgers = dict(catalog.ledgers(raw, topic_id))
                for relied in relied_on:
                    record = ledgers.get(relied.ledger_id) if relied.topic_id == topic_id else None
                    if record is None or record.state is LedgerState.TRIMMING:
                        continue
                    young = record.state is LedgerState.OPEN or record.closed_ms + retention_ms > now_ms
                    if retention_bytes or (retention_ms and young):
                        asked = f"{retention_ms=}" if retention_ms else f"{retention_bytes=}"
                        return f"{asked} keeps acknowledged messages that it drops; compact with --retention"
        return None
