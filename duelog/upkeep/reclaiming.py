"""Reclaiming space: trimming of main logs, adoption of compacted generations, and the sweep of stale id records.

`Maintenance` runs each as a step of a tick, a bounded piece at a time.
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyroaring import BitMap

from duelog.cleanup.adoption import Adopted, adopt_ready
from duelog.cleanup.compaction import READY
from duelog.cleanup.log_claims import reason_to_keep
from duelog.cleanup.trim import first_kept, remove_part, roll_ledgers, trim_ledgers
from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.partitions.partition_set import Storage
from duelog.store.clock import StoreClock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, Relied, Table
from duelog.store.codec.sent_ids import IN_MAIN, KeyRecord, unpack_numbered
from duelog.store.env.transaction import Transaction
from duelog.store.errors import CorruptRecord, StoreFull
from duelog.store.listener import StoreListener, tell
from duelog.store.log import catalog

from ..sending.delay_policies import DelayPolicies
from ..topics.ack_flusher import AckFlusher
from ..topics.topic_list import Topics, TrimAgenda
from ..topics.topic_state import TopicState

_TOPICS_AT_ONCE = 500
"""Topics of one commit: some 20 ms."""

_SLICE_S = 0.01
"""How long a slice goes on removing what was trimmed, a part at least: about 50,000 entries."""


@dataclass(eq=False, repr=False)
class Trimming:
    """Trims the main logs of one store, many topics in one commit. For the tick alone.

    The agenda names the topics to look at. Ledgers that reached their age are rolled in one commit; ledgers that every
    subscription has passed are trimmed in another; their runs are removed in bounded parts.
    """

    _storage: Storage
    _topics: Topics
    _agenda: TrimAgenda
    _flusher: AckFlusher
    _policies: DelayPolicies
    _to_remove: Sequence[tuple[int, int]] = field(default=(), init=False)
    """(topic id, ledger id) whose runs are to be removed."""
    freed: list[int] = field(default_factory=list, init=False)
    """Starts of partitions that no topic holds any more, to be deleted."""

    def look_at_all(self) -> None:
        """Have every main log looked at: after opening it is not known which may be trimmed."""
        for page in catalog.pages(self._storage.main, fmt.prefix(fmt.Table.LEDGER)):
            for key, _ in page:
                self._agenda.plan(fmt.leading_u32(key), 0)

    def next_due_ms(self) -> int | None:
        return self._agenda.next_due_ms()

    def is_due(self, now_ms: int) -> bool:
        due_ms = self.next_due_ms()
        return bool(self._to_remove) or (due_ms is not None and due_ms <= now_ms)

    def run(self, now_ms: int, suspensions: Suspensions) -> int:
        """Roll and trim a slice of what is due, and remove some runs; returns how many ledgers were trimmed.

        A topic that cannot be trimmed, as its records cannot be read, is suspended.
        """
        topic_ids = self._agenda.take(now_ms, _TOPICS_AT_ONCE)
        try:
            trimmed = self._trim_all(topic_ids, now_ms, suspensions) if topic_ids else 0
        except BaseException:
            for topic_id in topic_ids:
                self._agenda.plan(topic_id, now_ms)
            raise
        until = time.perf_counter() + _SLICE_S
        while self._to_remove:
            self._to_remove = remove_part(self._storage.main, self._to_remove)
            if time.perf_counter() >= until:  # what is due is fired first, then the rest is removed
                break
        return trimmed

    def _trim_all(self, topic_ids: Sequence[int], now_ms: int, suspensions: Suspensions) -> int:
        """Trim topics together; one by one where that fails, so that the one that cannot be holds up no other."""
        alone = [each for each in topic_ids if suspensions.retry_ms(Part("trim", each)) is not None]
        trimmed = 0
        try:
            trimmed = self._trim(self._existing([each for each in topic_ids if each not in alone]), now_ms)
        except Exception as error:
            if suspensions.is_fatal(error) or isinstance(error, StoreFull):
                raise
            alone = list(topic_ids)
        for topic_id in alone:
            part = Part("trim", topic_id)
            trim = functools.partial(self._trim_one, topic_id, now_ms)
            trimmed += suspensions.run(part, now_ms, trim, 0)
            retry_ms = suspensions.retry_ms(part)
            if retry_ms is not None:
                self._agenda.plan(topic_id, retry_ms)
        return trimmed

    def _trim_one(self, topic_id: int, now_ms: int) -> int:
        return self._trim(self._existing([topic_id]), now_ms)

    def _existing(self, topic_ids: Sequence[int]) -> list[TopicState]:
        return [topic for topic in map(self._topics.by_id, topic_ids) if topic is not None]

    def _trim(self, topics: Sequence[TopicState], now_ms: int) -> int:
        if not topics:
            return 0
        old = []
        for topic in topics:
            idle_ms = topic.free_tracker(now_ms, self._storage.config.tracker_idle_ms)
            if idle_ms is not None:
                self._agenda.plan(topic.topic_id, idle_ms)
            due_ms = topic.log.age_due_ms()
            if due_ms is not None and due_ms <= now_ms:
                old.append(topic.log)
        roll_ledgers(self._storage.main, old, now_ms)
        firsts: list[tuple[TopicState, int]] = []
        for topic in topics:
            due_ms = topic.log.age_due_ms()
            if due_ms is not None:
                self._agenda.plan(topic.topic_id, due_ms)
            first = self._first_kept(topic, now_ms)
            if first is not None:
                firsts.append((topic, first))
        if not firsts:
            return 0
        gone = [
            (topic.topic_id, ledger.ledger_id, ledger.entries)
            for topic, first in firsts
            for ledger in topic.log.ledgers()
            if ledger.ledger_id < first
        ]
        for topic, first in firsts:
            if topic.tracker is not None:
                topic.tracker.forget_before(first)

        def trimmed(freed: list[int]) -> None:
            self.freed += freed
            self._to_remove = [*self._to_remove, *((topic_id, ledger_id) for topic_id, ledger_id, _ in gone)]
            for topic, first in firsts:
                self._tell_subscriptions(topic, first, now_ms)

        trim_ledgers(self._storage.main, [(topic.log, first) for topic, first in firsts], trimmed)
        for _, _, entries in gone:
            tell(self._storage.listeners, StoreListener.ledger_trimmed, entries)
        return len(gone)

    def _first_kept(self, topic: TopicState, now_ms: int) -> int | None:
        """The first ledger of a main log that is kept, None where nothing is to be trimmed."""
        mark_deletes = []
        for subscription in list(topic.subscriptions.values()):
            with subscription.lock:
                mark_deletes.append(subscription.acks.mark_delete)
        ledgers, kept = topic.log.ledgers(), self._policies.effective(topic.name)
        first, again_ms = first_kept(ledgers, mark_deletes, kept.retention_ms, kept.retention_bytes, now_ms)
        if again_ms is not None:
            self._agenda.plan(topic.topic_id, again_ms)
        return None if first == ledgers[0].ledger_id else first

    def _tell_subscriptions(self, topic: TopicState, first: int, now_ms: int) -> None:
        for subscription in topic.followers:
            with subscription.lock:
                subscription.trimmed(first, topic.log)
            self._flusher.mark(subscription, now_ms)


_log = logging.getLogger("duelog.maintenance")


@dataclass(eq=False, repr=False)
class Adopting:
    """Has the partitions of an open store go over to the generations that compaction has finished.

    cleanup/adoption.py has the rules.
    """

    _storage: Storage
    _topics: Topics
    _clock: StoreClock
    more: bool = field(default=False, init=False)
    """True when the last run left work for another one."""
    refused: list[str] = field(default_factory=list, init=False)
    """Why finished generations were thrown away since the store was opened, the newest last."""

    def run(self, at_most: int | None = None) -> int:
        """Adopt finished generations or throw them away; return how many were adopted. One stat(2) if there is none.

        at_most: number of generations to decide on; each costs a commit, some syncs and the removal of a file.

        REQUIRES: Maintenance.lock, and deletions are not held back. Raises StoreFull, StoreFailed.
        """
        storage, ready = self._storage, self._storage.path / "staging" / READY
        if not ready.exists():
            self.more = False
            return 0
        done = adopt_ready(
            storage.path, storage.main, storage.store_id, storage.partitions, self._reason_against, at_most=at_most
        )
        self.more = bool(done) and ready.exists()
        refused = [f"{each.name}: {each.reason}" for each in done if not isinstance(each, Adopted)]
        for refusal in refused:
            _log.warning("%s: a compacted generation is thrown away: %s", storage.path, refusal)
        self.refused += refused
        return len(done) - len(refused)

    def _reason_against(self, relied_on: Sequence[Relied]) -> str | None:
        """Return why a generation cannot be adopted: a subscription went back, or retention. None: it can."""
        with self._storage.main.read() as raw:
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
                    unacknowledged = subscription.acks.unacked(ledger_id, 0, max(positions, default=-1) + 1)
                if unacknowledged & positions:
                    return f"subscription {subscription.name!r} of {topic.name} has gone back to what was dropped"
        return None


_PAGE = 2_000
"""Records looked at in one transaction: some ms."""

_PAUSE_MS = 60_000
_PAUSE_TIMES = 100


@dataclass(eq=False, repr=False)
class IdSweep:
    """Removes records of keys and of numbered messages whose messages are gone, a page at a time.

    A send, a cancellation and firing leave such a record where it is: the record itself tells whether it is stale (its
    partition is closed, its ledger is gone). A pass over all of them starts after a partition was closed or deleted or
    a ledger was trimmed, then not again for a hundred times as long as it took, so it takes at most a hundredth of one
    processor. Without such records a pass is one look into the main environment. For the tick alone.
    """

    _storage: Storage
    _topics: Topics

    def __post_init__(self) -> None:
        self.is_wanted = False
        """True when a partition or a ledger was removed after the last pass began."""
        self._next: bytes | None = None
        """Where the pass under way goes on; None: none is."""
        self._took_s = 0.0
        self._not_before_ms = 0

    def run(self, now_ms: int) -> bool:
        """Look at a page, if it is time, and return whether there is more. Raises StoreFull, StoreFailed."""
        if self._next is None:
            if not self.is_wanted or now_ms < self._not_before_ms:
                return False
            self.is_wanted, self._took_s = False, 0.0
        started = time.perf_counter()
        stale, following = self._page(self._next or fmt.prefix(Table.KEY), now_ms)
        if stale:
            self._storage.main.write(lambda transaction: _remove(transaction, stale), makes_space=True)
        self._next = following
        self._took_s += time.perf_counter() - started
        if following is None:
            self._not_before_ms = now_ms + max(_PAUSE_MS, int(self._took_s * 1000 * _PAUSE_TIMES))
        return following is not None

    def _page(self, start: bytes, now_ms: int) -> tuple[dict[bytes, bytes], bytes | None]:
        """The stale records of a page, and where the next begins. What is unapplied is fresh."""
        stale: dict[bytes, bytes] = {}
        with self._storage.main.read() as raw:
            cursor = raw.cursor()
            more = cursor.set_range(start)
            for _ in range(_PAGE):
                if not more or (key := bytes(cursor.key()))[0] not in (Table.KEY, Table.NUMBERED):
                    return stale, None
                try:
                    fields = fmt.unseal(key, cursor.value())
                    if self._is_stale(key, fields, now_ms):
                        stale[key] = fields
                except CorruptRecord:
                    pass  # a finding of `check`
                more = cursor.next()
            return stale, bytes(cursor.key()) if more else None

    def _is_stale(self, key: bytes, fields: bytes, now_ms: int) -> bool:
        """Return whether no lookup needs a record any more. Raises CorruptRecord."""
        if self._topics.by_id(fmt.leading_u32(key)) is None:
            return True
        if key[0] == Table.KEY:
            record = KeyRecord.unpack(fields)
            partition = self._storage.partitions.get(record.start_ms)
            return record.until_ms <= now_ms and (partition is None or partition.state is not PartitionState.OPEN)
        rows = unpack_numbered(fmt.trailing_u64(key), fields)
        return all(self._is_gone(fmt.leading_u32(key), row.start_ms, row.ledger_id) for _, row in rows)

    def _is_gone(self, topic_id: int, start_ms: int, ledger_id: int) -> bool:
        if start_ms != IN_MAIN:
            return self._storage.partitions.get(start_ms) is None
        topic = self._topics.by_id(topic_id)
        return topic is None or ledger_id < topic.log.first_ledger


def _remove(transaction: Transaction, stale: dict[bytes, bytes]) -> None:
    """Remove unchanged records; one that was written meanwhile is of another message."""
    for key, fields in stale.items():
        if transaction.get(key) == fields:
            transaction.delete(key)
