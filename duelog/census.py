"""Counts of an open store for somebody who looks at it all the time: pending by due time, a row for each topic.

Counting takes time by the number of partition logs and topics, so it is done in rounds of small steps, as far as an
allowance of processor time goes: `Allowance.SHARE` of a core, whoever asks and however often. A small store is counted
whole each time it is asked about; of a large one some figures are a round old. What was sent since a partition was
counted is added, so the store's total is right in between; a partition in which nothing has changed is not read again.

The due column is read only of partitions that begin within `NEAR_MS` and are not in memory; of those in memory the
delay index knows how many are due in each minute.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from duelog.markers.firing.firing import Firing
from duelog.markers.lookup import unfired
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import Storage
from duelog.store.clock import StoreClock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, Table
from duelog.store.codec.run import Int64s
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore, InvalidArgument, UnknownTopic
from duelog.store.files.directory import disk_parts
from duelog.store.listener import StoreListener
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tails
from duelog.store.message import MAX_DUE_MS
from duelog.store.names import SCHEME, TopicName, validate_namespace_name

from .stats import Figures, Overview, PartitionStats, TopicPage, TopicRow, TopicTimelines, stats_of
from .topics.inline import InlineMessages
from .topics.seeking import first_due
from .topics.topic_list import Topics
from .topics.topic_state import DeliveryCounts, SubscriptionState, TopicState

MINUTE_MS = 60_000
NEAR_MS = 36 * 60 * MINUTE_MS
MOST_BARS = 1_000
_MOST_READ, _MOST_READ_OF_ONE = 4, 64
"""Partitions whose due columns one question may have read, of all topics or of one."""
_ASKED_OF = 3
"""So many times as many topics are counted as are shown: those that have most in the partitions that steps touch."""
_MOST_APART = 16
"""Topics that a timeline shows apart."""
_RATE_S = 10.0
_LATE = 4_096
"""Messages fired last, whose lateness is told."""

_SORTED_BY = ("name", "pending", "backlog", "oldest_due_ms", "sent", "received", "stored_bytes", "subscriptions",
              "consumers", "dead_lettered")  # fmt: skip


_COUNTS = attrgetter(*DeliveryCounts.__slots__)


class Allowance:
    """Processor time that may be spent: a share of a core, saved up for a while; a step that takes longer is a debt."""

    SHARE = 0.005
    FIRST_SHARE = 0.25
    """Until the first round is done, for figures that are there soon."""
    SAVED_S = 1.0

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.thread_time
    ) -> None:
        self._monotonic, self._spent = monotonic, spent
        self._asked_s = monotonic()
        self._left_s = self.SAVED_S

    def steps(self, work: Iterator[None], share: float) -> bool:
        """Take steps of `work` while the allowance lasts; True once there are none."""
        now_s = self._monotonic()
        self._left_s = min(self._left_s + share * (now_s - self._asked_s), self.SAVED_S)
        self._asked_s = now_s
        while self._left_s > 0:
            began_s = self._spent()
            more = next(work, work) is not work
            self._left_s -= self._spent() - began_s
            if not more:
                return True
        return False


class _Lateness(StoreListener):
    """How late the messages fired last were, in ms."""

    def __init__(self) -> None:
        self._batches: deque[Int64s] = deque()
        self._count = 0

    def fired(self, topic_id: int, dues: npt.NDArray[np.int64], now_ms: int) -> None:
        self._batches.append(np.maximum(now_ms - dues[-_LATE:], 0))
        self._count += len(self._batches[-1])
        while self._count - len(self._batches[0]) >= _LATE:
            self._count -= len(self._batches.popleft())

    def percentiles(self) -> tuple[int | None, int | None]:
        """The median and the 99th percentile; None: nothing has been fired."""
        batches = list(self._batches)
        if not batches:
            return None, None
        median, high = np.percentile(np.concatenate(batches), (50, 99), method="higher").tolist()
        return median, high


@dataclass(slots=True)
class _Tally:
    """The logs of one partition, by topic id ascending, as they were counted."""

    stats: PartitionStats
    topics: npt.NDArray[np.uint32]
    ledgers: npt.NDArray[np.uint64]
    unfired: Int64s
    """Entries that have not fired; cancelled ones among them, unless the delay index was asked."""
    pending: Int64s
    """The same without cancelled ones and deleted topics."""
    received: int
    requests: int
    counts_cancelled: bool
    minutes: Int64s | None = None


class Census:
    """Counts one store. Thread-safe."""

    def __init__(
        self,
        storage: Storage,
        topics: Topics,
        firing: Firing,
        inline: InlineMessages,
        clock: StoreClock,
        figures: Figures,
    ) -> None:
        self._path, self._main, self._partitions = storage.path, storage.main, storage.partitions
        self._listeners, self._span_ms = storage.listeners, storage.config.partition_ms
        self._topics, self._firing, self._inline, self._clock, self._figures = topics, firing, inline, clock, figures
        self._lock = threading.Lock()
        self.allowance = Allowance()
        self._lateness: _Lateness | None = None
        self._round: Iterator[None] | None = None
        self._rounds = 0
        self._tallies: dict[int, _Tally] = {}
        self._rows: dict[str, TopicRow] = {}
        self._with_inline: set[str] = set()
        """Topics whose rows say that messages wait in their main logs."""
        self._names: dict[int, str] = {}
        self._ids: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._cancelled_ledgers: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._cancelled_counts = np.empty(0, np.int64)
        self._disk: dict[str, int] = {}
        self._index_bytes = 0
        self._moved: tuple[int, ...] = ()
        """Counts of what was sent and handed out when they were last asked for."""
        self._stamp: tuple[int, ...] | None = None
        """All that had changed when the last round began: where it is the same, nothing is counted again."""
        self._rows_summed: dict[str, int] = {}
        self._summed: Iterator[None] | None = None
        self._oldest_ms: int | None = None
        self._samples: deque[tuple[float, int, int]] = deque()

    # -- what is asked -------------------------------------------------------------------------------

    def overview(self) -> Overview:
        """O(topics + partitions) of sums, and steps of a round."""
        with self._lock:
            _, sent, *delivered = self._moved = self._movements()
            self._refresh()
            rows = self._sums()
            late = (None, None) if self._lateness is None else self._lateness.percentiles()
            sent_rate, received_rate = self._rates(sent, delivered[0])
            return Overview(
                complete=self._rounds > 0,
                topics=len(self._names),
                partitions=len(self._partitions),
                partitions_counted=len(self._tallies),
                pending=sum(map(self._total, self._tallies.values())) + rows["inline"],
                backlog=rows["backlog"],
                unacknowledged=rows["unacknowledged"],
                oldest_due_ms=self._oldest_ms,
                subscriptions=rows["subscriptions"],
                consumers=rows["consumers"],
                sent=sent,
                sent_per_s=sent_rate,
                received_per_s=received_rate,
                **dict(zip(DeliveryCounts.__slots__, delivered, strict=True)),
                fired=self._firing.fired,
                late_median_ms=late[0],
                late_99_ms=late[1],
                index_bytes=self._index_bytes,
                open_partitions=self._partitions.open_count(),
                max_open_partitions=self._partitions.max_open,
                loaded_partitions=len(self._firing.loaded.loaded_starts()),
                disk_bytes=sum(self._disk.values()),
                disk_parts=dict(self._disk),
                suspended=tuple(map(str, self._firing.suspensions.all())),
            )

    def timeline(self, start_ms: int, step_ms: int, bars: int, topic: str | None = None) -> list[int]:
        """See `DelayedStore.timeline`."""
        for name, value, most in (("start_ms", start_ms, MAX_DUE_MS), ("step_ms", step_ms, MAX_DUE_MS),
                                  ("bars", bars, MOST_BARS)):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidArgument(name, value, f"expected 1 to {most}")
        state = None if topic is None else self._topics.get(TopicName.parse(topic))
        topic_id = None if state is None else state.topic_id
        end_ms = start_ms + step_ms * bars
        times: list[Int64s] = []
        counts: list[Int64s] = []
        whole: list[tuple[int, int]] = []
        with self._lock:
            self._refresh()
            fine = [
                tally.stats for tally in self._tallies.values()
                if step_ms < self._span_ms and tally.stats.end_ms > start_ms and tally.stats.start_ms < end_ms
            ]  # fmt: skip
            unread = [each for each in fine if topic_id is not None or self._tallies[each.start_ms].minutes is None]
            if len(unread) > (_MOST_READ if topic_id is None else _MOST_READ_OF_ONE):
                raise InvalidArgument("step_ms", step_ms, f"expected {self._span_ms}, of a partition, so far ahead")
            starts = {each.start_ms for each in fine}
            for start, tally in self._tallies.items():
                if start not in starts:
                    pending = self._total(tally) if topic_id is None else self._of_topic(tally, topic_id)
                    whole.append((start if start < start_ms else start + self._span_ms // 2, pending))
                    continue
                minutes = tally.minutes if topic_id is None else None
                if minutes is None:
                    minutes = self._minutes(start, tally.topics.tolist() if topic_id is None else [topic_id])
                at = np.flatnonzero(minutes)
                times.append(start + at * min(MINUTE_MS, self._span_ms))
                counts.append(minutes[at])
        holding = map(self._topics.find, map(TopicName.parse, self._with_inline)) if state is None else [state]
        for each in holding:
            if each is not None and len(inline := self._inline.dues(each)):
                times.append(inline)
                counts.append(np.ones_like(inline))
        times.append(np.array([time_ms for time_ms, _ in whole], np.int64))
        counts.append(np.array([count for _, count in whole], np.int64))
        due, number = np.concatenate(times), np.concatenate(counts)
        at = np.maximum((due - start_ms) // step_ms, 0)
        found = np.bincount(at[at < bars], number[at < bars], minlength=bars)
        return [round(each) for each in found.tolist()]

    def timeline_by_topic(self, start_ms: int, step_ms: int, bars: int, most: int) -> TopicTimelines:
        """See `DelayedStore.timeline_by_topic`."""
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _MOST_APART:
            raise InvalidArgument("most", most, f"expected 1 to {_MOST_APART}")
        rest = np.array(self.timeline(start_ms, step_ms, bars))
        with self._lock:
            pending = self._by_topic(start_ms + step_ms * bars)
            largest = np.argsort(-pending, kind="stable")[: _ASKED_OF * most].tolist()
            names = {self._names[each] for each in largest if pending[each] and each in self._names}
            inline = sorted(self._with_inline, key=lambda name: -self._rows[name].inline)
        counts: dict[str, list[int]] = {}
        for name in {*names, *inline[:most]}:
            with suppress(UnknownTopic):
                counts[name] = self.timeline(start_ms, step_ms, bars, name)
        order = sorted((name for name in counts if any(counts[name])), key=lambda name: (-sum(counts[name]), name))
        for name in (order := order[:most]):
            rest = rest - counts[name]
        return TopicTimelines(tuple(order), tuple(counts[name] for name in order), np.maximum(rest, 0).tolist())

    def topic_rows(
        self, search: str, namespace: str | None, sort: str, descending: bool, offset: int, limit: int
    ) -> TopicPage:
        """See `DelayedStore.topic_rows`."""
        if namespace is not None:
            validate_namespace_name(namespace)
        if sort not in _SORTED_BY:
            raise InvalidArgument("sort", sort, f"expected one of {', '.join(_SORTED_BY)}")
        if not isinstance(search, str):
            raise InvalidArgument("search", search, "expected a str")
        for name, value, least, most in (("offset", offset, 0, 1 << 31), ("limit", limit, 1, MOST_BARS)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise InvalidArgument(name, value, f"expected {least} to {most}")
        with self._lock:
            self._refresh()
            wanted, within = search.casefold(), "" if namespace is None else f"{SCHEME}{namespace}/"
            rows = [row for name, row in self._rows.items() if name.startswith(within) and wanted in name.casefold()]
            known = sum(name.startswith(within) for name in self._names.values())
            complete = self._rounds > 0
        rows.sort(key=lambda row: row.name)
        if sort != "name":
            rows.sort(key=lambda row: getattr(row, sort) or 0, reverse=descending)
        elif descending:
            rows.reverse()
        return TopicPage(len(rows), known, complete, tuple(rows[offset : offset + limit]))

    def partitions(self) -> list[PartitionStats]:
        """Each as it was counted last, by start."""
        with self._lock:
            self._refresh()
            return [tally.stats for _, tally in sorted(self._tallies.items())]

    def _sums(self) -> dict[str, int]:
        """Figures of all topics together, added up once for each round."""
        if self._summed is not self._round or not self._rows_summed:
            rows = list(self._rows.values())
            names = ("inline", "backlog", "unacknowledged", "subscriptions", "consumers")
            self._rows_summed = {name: sum(getattr(row, name) for row in rows) for name in names}
            oldest = [row.oldest_due_ms for row in rows if row.oldest_due_ms is not None]
            self._oldest_ms = min(oldest, default=None)
            self._summed = self._round
        return self._rows_summed

    def _movements(self) -> tuple[int, ...]:
        """Consumers, messages sent, and sums of what was delivered: what changes though nothing is written."""
        consumers, sent, delivered = 0, 0, [0] * len(DeliveryCounts.__slots__)
        for topic in self._topics.loaded():
            sent += topic.sent
            for state in list(topic.subscriptions.values()):
                consumers += state.consumers
                delivered = list(map(int.__add__, delivered, _COUNTS(state.counts)))
        return consumers, sent, *delivered

    # -- rounds --------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if self._lateness is None:
            self._lateness = _Lateness()
            self._listeners.append(self._lateness)
        if self._round is None:
            before, minute = self._stamp, self._clock.now_ms() // MINUTE_MS
            if before is not None and before[1] != minute:
                self._moved = self._movements()
            self._stamp = stamp = (self._requests, minute, *self._moved)
            if before == stamp and not self._main.read_only:
                return
            passed = before is not None and (before[0], before[2:]) == (stamp[0], stamp[2:])
            self._round = self._steps(passed and self._rounds > 0 and not self._main.read_only)
        try:
            is_done = self.allowance.steps(self._round, Allowance.SHARE if self._rounds else Allowance.FIRST_SHARE)
        except BaseException:  # the steps are over: the next question begins anew
            self._round = self._stamp = None
            raise
        if is_done:
            self._round = self._summed = None
            self._rows_summed = {}
            self._rounds += 1

    def _steps(self, passed: bool) -> Iterator[None]:
        """Count what may have changed; passed: nothing has but the time."""
        self._disk = disk_parts(self._path)
        self._index_bytes = self._firing.loaded.memory_bytes()
        yield
        if not passed:
            self._look_at_main()
            yield
        if not self._rounds:
            yield from self._count_rows()  # so that topics are there, whatever the partitions take
        known = {partition.start_ms: partition for partition in self._partitions}
        for start_ms in self._tallies.keys() - known.keys():
            del self._tallies[start_ms]
        for partition in known.values():
            tally = self._tallies.get(partition.start_ms)
            if tally is None or self._has_changed(tally, partition):
                self._count(partition)
                yield
            elif tally.requests != self._requests:
                before = tally.stats.pending
                self._settle(tally)
                if tally.minutes is not None and tally.stats.pending != before:
                    self._count(partition)
                    yield
        yield from self._count_rows(self._with_inline if passed else None)

    def _count_rows(self, wanted: set[str] | None = None) -> Iterator[None]:
        """Make the row of each topic, or of some, with what is pending as far as partitions are counted."""
        if wanted is not None and not wanted:
            return
        pending = self._by_topic()
        yield
        for topic_id, name in list(self._names.items()):
            if wanted is not None and name not in wanted:
                continue
            topic = self._topics.find(TopicName.parse(name))
            if topic is not None and topic.topic_id == topic_id:
                self._rows[name] = self._row(topic, int(pending[topic_id]) if topic_id < len(pending) else 0)
                yield
        for name in self._rows.keys() - set(self._names.values()):
            del self._rows[name]
        self._with_inline = {name for name, row in self._rows.items() if row.inline}

    @property
    def _requests(self) -> int:
        counts = self._main.counts if self._main.log is None else self._main.log.counts
        return counts.requests + self._main.counts.requests

    def _look_at_main(self) -> None:
        """Read which topics there are, and how many entries of each log are cancelled."""
        self._names = {record.topic_id: name for name, record in catalog.topic_names(self._main)}
        self._ids = np.array(sorted(self._names), np.uint32)
        cancelled: dict[int, int] = {}
        for page in catalog.pages(self._main, fmt.prefix(Table.CANCELLED)):
            for key, fields in page:
                ledger_id = fmt.leading_u64(key)
                cancelled[ledger_id] = cancelled.get(ledger_id, 0) + len(BitMap.deserialize(fields))
        self._cancelled_ledgers = np.array(sorted(cancelled), np.uint64)
        self._cancelled_counts = np.array([cancelled[each] for each in sorted(cancelled)], np.int64)

    def _has_changed(self, tally: _Tally, partition: Partition) -> bool:
        """True where its logs have to be read again: cancelling alone is known without."""
        stats = tally.stats
        if self._main.read_only:  # another process writes
            return True
        if partition.received != tally.received or partition.generation != stats.generation:
            return True
        if (0 if partition.away is None else partition.away.size) != stats.away_bytes:
            return True
        is_open = partition.state is PartitionState.OPEN
        if is_open != (stats.state != "closed"):
            return True
        now_ms = self._clock.now_ms()
        if not is_open or partition.start_ms > now_ms + NEAR_MS:
            return False
        fires = not tally.counts_cancelled or partition.start_ms <= now_ms
        return tally.minutes is None or (fires and tally.requests != self._requests)

    def _count(self, partition: Partition) -> None:
        """Count the logs of a partition; one that is damaged, or was deleted meanwhile, is left out."""
        try:
            with self._partitions.lease(partition, partial=True):
                tally = self._counted(partition)
        except (DamagedStore, CorruptEntry, CorruptRecord):
            tally = None
        if tally is None:
            self._tallies.pop(partition.start_ms, None)
            return
        self._settle(tally)
        self._tallies[partition.start_ms] = tally

    def _counted(self, partition: Partition) -> _Tally | None:
        """Count the logs of a partition; None: it is being deleted. REQUIRES: a lease."""
        received, requests, start_ms = partition.received, self._requests, partition.start_ms
        now_ms = self._clock.now_ms()
        is_open, begun = partition.state is PartitionState.OPEN, start_ms <= now_ms
        logs = self._firing.loaded.logs.get(start_ms, {}) if is_open else {}
        in_memory = bool(logs) and all(log.loaded for log in list(logs.values()))
        with partition.environment.read() as raw, self._main.read() as main:
            topic_ids, ledgers = catalog.log_columns(raw)
            topics = topic_ids.tolist()
            entries = find_tails(raw, partition.name, ledgers)
            left = entries.copy() if is_open else np.zeros_like(entries)
            for at, topic_id in enumerate(topics if is_open and begun else ()):
                if in_memory and topic_id in logs:
                    left[at] = len(logs[topic_id])
                elif (frontier := catalog.frontier(main, topic_id, start_ms)) is not None:
                    left[at] -= frontier.fired
            stats = stats_of(partition, main, raw, len(topics), int(entries.sum()), now_ms)
        if stats is None:
            return None
        minutes = None
        if is_open and start_ms <= now_ms + NEAR_MS:
            minutes = self._minutes(start_ms, [each for each in topics if each in self._names])
        counts_cancelled = is_open and not in_memory
        return _Tally(stats, topic_ids, ledgers, left, left, received, requests, counts_cancelled, minutes)

    def _settle(self, tally: _Tally) -> None:
        """Leave cancelled entries and deleted topics out of what is pending."""
        tally.pending = tally.unfired.copy()
        if tally.counts_cancelled and len(self._cancelled_ledgers):
            at = np.searchsorted(self._cancelled_ledgers, tally.ledgers).clip(max=len(self._cancelled_ledgers) - 1)
            hit = self._cancelled_ledgers[at] == tally.ledgers
            tally.pending[hit] -= self._cancelled_counts[at[hit]]
        tally.pending[~np.isin(tally.topics, self._ids)] = 0
        tally.stats = replace(tally.stats, pending=int(tally.pending.sum()))
        tally.requests = self._requests

    def _minutes(self, start_ms: int, topic_ids: Sequence[int]) -> Int64s:
        """How many messages of topics are due in each minute of a partition, the late ones in the first."""
        partition = self._partitions.get(start_ms)
        bin_ms = min(MINUTE_MS, self._span_ms)
        found = np.zeros(-(-self._span_ms // bin_ms), np.int64)
        if partition is None or partition.state is not PartitionState.OPEN or partition.away is not None:
            return found
        logs = self._firing.loaded.logs.get(start_ms, {})
        with self._partitions.lease(partition):
            for topic_id in topic_ids:
                log = logs.get(topic_id)
                counted = None if log is None else log.counts()
                if counted is None:
                    on_disk = partition.log(topic_id)
                    if on_disk is None:
                        continue
                    _, dues = unfired(self._main, on_disk)
                    counted = dues, np.ones_like(dues)
                dues, counts = counted
                at = ((dues - start_ms) // bin_ms).clip(0, len(found) - 1)
                np.add.at(found, at, counts)
        return found

    def _by_topic(self, end_ms: int = MAX_DUE_MS) -> Int64s:
        """Pending messages by topic id, of partitions that begin before `end_ms`."""
        tallies = [tally for start_ms, tally in self._tallies.items() if start_ms < end_ms]
        topics = np.concatenate([np.empty(0, np.uint32), *(tally.topics for tally in tallies)])
        pending = np.concatenate([np.empty(0, np.int64), *(tally.pending for tally in tallies)])
        found: Int64s = np.bincount(topics, pending).astype(np.int64)
        return found

    def _row(self, topic: TopicState, pending: int) -> TopicRow:
        """pending: in partitions."""
        now_ms = self._clock.now_ms()
        not_due = self._inline.waiting(topic, now_ms)
        inline = sum(map(len, not_due.values()))
        states = [state for _, state in sorted(topic.subscriptions.items())]
        followers = [self._figures.of_subscription(topic, state, not_due) for state in states]
        oldest = [
            due_ms for state, each in zip(states, followers, strict=True)
            if each.backlog and (due_ms := self._oldest(topic, state, now_ms)) is not None
        ]  # fmt: skip
        return TopicRow(
            name=str(topic.name),
            pending=pending + inline,
            inline=inline,
            backlog=sum(each.backlog for each in followers),
            unacknowledged=sum(each.unacknowledged for each in followers),
            oldest_due_ms=min(oldest, default=None),
            subscriptions=len(followers),
            consumers=sum(each.consumers for each in followers),
            sent=topic.sent,
            received=sum(each.received for each in followers),
            dead_lettered=sum(each.dead_lettered for each in followers),
            stored_bytes=sum(ledger.stored_bytes for ledger in topic.log.ledgers()),
        )

    def _oldest(self, topic: TopicState, state: SubscriptionState, now_ms: int) -> int | None:
        with state.lock:
            return first_due(self._main, topic.log, state.acks, now_ms)

    # -- sums ----------------------------------------------------------------------------------------

    def _total(self, tally: _Tally) -> int:
        partition = self._partitions.get(tally.stats.start_ms)
        added = 0 if partition is None else partition.received - tally.received
        return max(tally.stats.pending + added, 0)

    @staticmethod
    def _of_topic(tally: _Tally, topic_id: int) -> int:
        at = int(np.searchsorted(tally.topics, topic_id))
        return int(tally.pending[at]) if at < len(tally.topics) and tally.topics[at] == topic_id else 0

    def _rates(self, sent: int, received: int) -> tuple[float, float]:
        now_s = time.monotonic()
        while len(self._samples) > 1 and self._samples[1][0] < now_s - _RATE_S:
            self._samples.popleft()
        self._samples.append((now_s, sent, received))
        began_s, sent_before, received_before = self._samples[0]
        passed_s = max(now_s - began_s, 1.0)
        return round((sent - sent_before) / passed_s, 1), round((received - received_before) / passed_s, 1)
