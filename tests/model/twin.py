"""A store said with lists and sets and no thought for speed: what the engine must do with the same calls.

Owns what is kept, what has fired in which order, and which partitions exist. Says nothing of storage. Where the
engine has a choice (the order of late entries among themselves, the moment of a trim whose acknowledgements are not
flushed yet) the twin is told what was chosen, refuses what is not allowed, and goes on from there.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from duelog import MessageId, StoreConfig
from duelog.metrics import ENTRIES_TRIMMED, FIRED, LEDGERS_TRIMMED, PARTITIONS_DELETED
from duelog.store.log.managed_ledger import LedgerInfo
from duelog.store.names import TopicName

from .twin_policies import TwinPolicies
from .twin_subscription import TwinSubscription
from .twin_topic import TwinLog, TwinMessage, TwinPartition, TwinTopic


@dataclass(frozen=True)
class TwinSlice:
    """The counts of a slice of a tick."""

    fired: int
    closed: int
    trimmed: int
    deleted: int


@dataclass(frozen=True)
class Seen:
    """Observations of the engine during a slice of a tick.

    appended: what was written into main logs, in order. closed: starts of the partitions that are closed or gone;
    there: of those that are there. kept: a topic's ledgers. complete: nothing due was left, says the engine.
    rolled: topics whose open ledger was closed for its age. failed: it was broken off by an error, so that cleaning up
    may have been left out. written_to: another thread wrote to this topic, so that trimming may have met that or not;
    after: what it wrote into the main log when the firing was over; after_roll: and after its ledger was rolled.
    expired: what was found too old, by subscription, where that was looked for. fired_ms: the times of the markers.
    """

    appended: Mapping[TwinTopic, Sequence[TwinMessage]]
    closed: Collection[int]
    there: Collection[int]
    kept: Callable[[TwinTopic], Sequence[LedgerInfo]]
    rolled: Collection[TwinTopic]
    complete: bool = False
    failed: bool = False
    written_to: TwinTopic | None = None
    after: Sequence[TwinMessage] = ()
    after_roll: bool = False
    expired: Mapping[TwinSubscription, Collection[int]] = field(default_factory=dict)
    fired_ms: Mapping[MessageId, int] = field(default_factory=dict)


class Twin:
    """The store."""

    def __init__(self, config: StoreConfig, wall_ms: int, lead_ms: int = 0) -> None:
        self.config = config
        self.lead_ms = lead_ms
        self.wall_ms = wall_ms
        self.mark_ms = self.saved_mark_ms = 0
        self.topics: dict[str, TwinTopic] = {}
        self.partitions: dict[int, TwinPartition] = {}
        self.by_id: dict[MessageId, TwinMessage] = {}
        self.policies = TwinPolicies(config)
        self.counts: Counter[tuple[str, str]] = Counter()
        """By counter and topic, what metrics have to say."""

    @property
    def now_ms(self) -> int:
        return max(self.wall_ms, self.mark_ms)

    def topic(self, name: str) -> TwinTopic:
        if name not in self.topics:
            setting = functools.partial(self.policies.value, name)
            self.topics[name] = TwinTopic(name, self.now_ms, setting, lambda: self.config.ledger_max_entries)
        return self.topics[name]

    def logs(self, topic: TwinTopic) -> list[TwinLog]:
        return [part.logs[topic] for _, part in sorted(self.partitions.items()) if topic in part.logs]

    def pending(self, topic: TwinTopic) -> list[TwinMessage]:
        """In the order in which they will fire."""
        return [m for log in self.logs(topic) for m in sorted(log.pending, key=lambda m: m.order)]

    def is_stored(self, topic: TwinTopic, message: TwinMessage) -> bool:
        """True if it can be looked up: its ledger, or its partition, is there."""
        if message.start_ms is not None:
            part = self.partitions.get(message.start_ms)
            return part is not None and topic in part.logs and message in part.logs[topic].messages
        return topic.main.index(message) >= topic.first

    def flush(self) -> None:
        for topic in self.topics.values():
            for sub in topic.subscriptions.values():
                sub.flush()

    def is_direct(self, due_ms: int, sent_ms: int) -> bool:
        """True if a message that was sent at `sent_ms` goes into the main log if it is written now."""
        part = self.partitions.get(due_ms - due_ms % self.config.partition_ms)
        return due_ms <= sent_ms + self.config.inline_delay_ms or (part is not None and part.closed)

    def group(self, due_ms: int, sent_ms: int) -> int:
        """Messages of a batch with the same group are written together: -1 for the main log, else by their partition.

        In this order the groups are written when they are written one after the other.
        """
        return -1 if due_ms <= sent_ms + self.config.inline_delay_ms else due_ms // self.config.partition_ms

    def add_direct(self, topic: TwinTopic, message: TwinMessage) -> None:
        self.by_id[message.message_id] = message
        message.waits = message.due_ms > message.publish_ms
        topic.append(message, message.publish_ms)

    def add_delayed(self, topic: TwinTopic, message: TwinMessage) -> None:
        """Into its partition, which comes into being with the first message."""
        part = self.add_partition(message.due_ms)
        message.start_ms = part.start_ms
        assert not part.closed, "a closed partition took a message"
        assert message.message_id not in self.by_id, "an id was given out twice"
        self.by_id[message.message_id] = message
        part.log(topic).add(message)

    def add_partition(self, due_ms: int) -> TwinPartition:
        start_ms = due_ms - due_ms % self.config.partition_ms
        return self.partitions.setdefault(start_ms, TwinPartition(start_ms, start_ms + self.config.partition_ms))

    def advance(self, now_ms: int, seen: Seen) -> TwinSlice:
        """Do what a slice of a tick at `now_ms` does."""
        closed = [part for part in self.partitions.values() if not part.closed and part.start_ms in seen.closed]
        fired = sum(self._fire(topic, now_ms, seen) for topic in self.topics.values())
        for part in self.partitions.values():
            if seen.complete:
                assert part.closed or part in closed or part.end_ms > now_ms, "a partition was not closed"
        for part in closed:
            assert part.end_ms <= now_ms, "a partition was closed before its end"
            assert not any(log.pending for log in part.logs.values() if not log.topic.deleted), "closed too early"
            part.closed = True
            for log in part.logs.values():
                log.left_over = 0
                log.holds = not log.topic.deleted and log.last_marker in log.topic.ledgers
        if fired or closed:
            self.mark_ms = max(self.mark_ms, now_ms)
            self.saved_mark_ms = max(self.saved_mark_ms, self.mark_ms, *seen.fired_ms.values())
        trimmed = 0
        for topic in self.topics.values():
            self._expire(topic, now_ms, seen)
            trimmed += self._trim(topic, now_ms, seen)
        deleted = self.release(seen.there if seen.failed else ())
        self.count(PARTITIONS_DELETED, deleted)
        return TwinSlice(fired, len(closed), trimmed, deleted)

    def count(self, counter: str, count: int, topic: str | None = None) -> None:
        if count:
            self.counts[counter, "" if topic is None else str(TopicName.parse(topic))] += count

    def _fire(self, topic: TwinTopic, now_ms: int, seen: Seen) -> int:
        order = seen.appended.get(topic, ())
        due = [m for m in self.pending(topic) if m.due_ms <= now_ms + self.lead_ms]
        fired = [m for m in order if m.start_ms is not None]
        assert len(set(fired)) == len(fired), "a marker is doubled"
        assert set(fired) <= set(due), "fired early, again, or though it was taken back"
        left = set(due) - set(fired)
        assert all(m.due_ms > now_ms for m in left) or not seen.complete, "something due was not fired"
        check_order(fired)
        for message in order:
            if message.start_ms is None:
                self.add_direct(topic, message)
            else:
                fired_ms = seen.fired_ms[message.message_id]
                assert now_ms <= fired_ms <= now_ms + self.lead_ms
                message.readable_ms = message.due_ms
                ledger = topic.append(message, fired_ms)
                log = self.partitions[message.start_ms].logs[topic]
                log.pending.remove(message)
                log.fired += 1
                log.frontier = max(log.frontier, message.order)
                log.last_marker = ledger
            message.late = False
        self.count(FIRED, len(fired), topic.name)
        return len(fired)

    def _expire(self, topic: TwinTopic, now_ms: int, seen: Seen) -> None:
        for sub in topic.subscriptions.values():
            ttl_ms = sub.setting("ttl_ms")
            if not ttl_ms or sub is topic.keeper or sub not in seen.expired:
                continue
            found = seen.expired[sub]
            assert all(topic.main[place].due_ms <= now_ms - ttl_ms for place in found), "expired before its time"
            if topic is not seen.written_to:
                for place in range(sub.mark, len(topic.main)):
                    if topic.main[place].due_ms > now_ms - ttl_ms:
                        break
                    assert place in found or sub.is_acked(place), "too old, and not expired"
            if sub.ack(sorted(found)):
                topic.unflushed_until_ms = max(topic.unflushed_until_ms, now_ms + self.config.ack_flush_ms)
                if sub.unflushed_since_ms is None:
                    sub.unflushed_since_ms = now_ms

    def _trim(self, topic: TwinTopic, now_ms: int, seen: Seen) -> int:
        kept, beside = seen.kept(topic), topic is seen.written_to
        loose = seen.failed or beside
        old = topic.ledgers[-1].count > 0 and topic.ledgers[-1].created_ms + self.config.ledger_max_age_ms <= now_ms
        assert loose or old == (topic in seen.rolled), "a ledger is rolled over as soon as it is old enough"
        if topic in seen.rolled and seen.after_roll:
            topic.roll(now_ms)
        for message in seen.after if beside else ():
            self.add_direct(topic, message)
        if topic in seen.rolled and not seen.after_roll:
            topic.roll(now_ms)
        passed = young = 0
        for ledger in topic.ledgers[:-1]:
            if not all(sub.passed(ledger.first + ledger.count) for sub in topic.subscriptions.values()):
                break
            passed += 1
        for ledger in topic.ledgers[:passed]:
            assert ledger.closed_ms is not None
            if ledger.closed_ms + topic.setting("retention_ms") > now_ms:
                break
            young += 1
        gone = len(topic.ledgers) - len(kept)
        loose |= now_ms < topic.unflushed_until_ms
        assert 0 <= gone <= young, "a ledger was trimmed that a subscription or retention still wants"
        sizes = [info.stored_bytes for info in kept[: passed - gone]]
        kept_bytes = topic.setting("retention_bytes")
        if not kept_bytes:
            assert loose or gone == young, "a ledger that is not wanted was kept"
        else:
            assert loose or gone == young or sum(sizes[1:]) < kept_bytes, "more bytes are kept"
            assert not gone or sum(sizes) >= kept_bytes, "fewer bytes are kept than retention asks for"
        self.count(LEDGERS_TRIMMED, gone)
        self.count(ENTRIES_TRIMMED, sum(ledger.count for ledger in topic.ledgers[:gone]))
        del topic.ledgers[:gone]
        for sub in topic.subscriptions.values():
            sub.trimmed(topic.first)
        return gone

    def release(self, there: Collection[int] = ()) -> int:
        """Delete the partitions without references, but for those that are still `there`; how many."""
        deleted = 0
        for part in [part for part in self.partitions.values() if part.closed]:
            for log in part.logs.values():
                log.holds &= not log.topic.deleted and log.last_marker in log.topic.ledgers
            if not part.references and part.start_ms not in there:
                del self.partitions[part.start_ms]
                deleted += 1
        return deleted


def check_order(fired: Sequence[TwinMessage]) -> None:
    """The law of firing, for what one tick fired of one topic.

    Partition by partition, but that one with late entries need not wait for an earlier one; late entries first, then by
    due time and append order. Of two entries of one log the one appended first fires first unless it is due later: this
    alone also binds what comes in during the tick.
    """
    for before, after in combinations(fired, 2):
        if before.start_ms == after.start_ms and after.message_id.entry_id < before.message_id.entry_id:
            assert before.due_ms < after.due_ms, f"{before} fired before {after}"
    settled = [message for message in fired if not message.wild]
    with_late = {message.start_ms for message in settled if message.late}
    for before, after in pairwise(settled):
        in_turn = (before.start_ms or 0) <= (after.start_ms or 0)
        assert in_turn or before.start_ms in with_late, "an earlier partition fires first"
        if before.start_ms == after.start_ms:
            assert before.late >= after.late, "late entries fire first"
            assert before.late or before.order < after.order, "by due time, then append order"
