"""The topics of an open store: loaded when first named, created when first written to; when each is to be trimmed."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from pyroaring import BitMap

from duelog.delivery.acks import AckChanges, AckSet
from duelog.delivery.attempt_counts import AttemptCounts
from duelog.delivery.delivery_log import DeliveryLog
from duelog.store.codec import format as fmt
from duelog.store.codec.format import CursorRecord
from duelog.store.codec.run import RunLimits
from duelog.store.config import StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.env.transaction import Transaction
from duelog.store.errors import UnknownTopic
from duelog.store.log import catalog
from duelog.store.log.managed_ledger import LedgerLimits, ManagedLedger
from duelog.store.names import TopicName
from duelog.store.position import BEFORE_FIRST, Position
from duelog.store.timer_queue import TimerQueue

from .topic_events import TopicEvent, TopicEvents
from .topic_state import FOR_EVER_MS, KEEPER, PAUSED, SubscriptionState, TopicState


class TrimAgenda:
    """One time for each topic, the earliest that was asked for. Thread-safe; takes leaf locks only."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        """Has the upkeep look again."""
        self._due: TimerQueue[int] = TimerQueue()  # topic ids
        self._lock = threading.Lock()

    def look_at(self, topic_id: int, due_ms: int) -> None:
        """Have a main log looked at at `due_ms` (epoch ms) or earlier, and wake the scheduler where that is new.

        A look at a topic plans the next one from the topic's state, for every reason there is: what was asked for a
        later time is not lost.
        """
        if self.plan(topic_id, due_ms):
            self.wake()

    def plan(self, topic_id: int, due_ms: int) -> bool:
        """Plan a look without waking the tick; False if the log is looked at in time anyway. See `look_at`."""
        with self._lock:
            return self._due.push(topic_id, due_ms)

    def next_due_ms(self) -> int | None:
        with self._lock:
            following = self._due.next()
            return None if following is None else following[0]

    def take(self, now_ms: int, at_most: int) -> list[int]:
        """The topics whose time has come, the earliest first; they are on the agenda no more."""
        due: list[int] = []
        with self._lock:
            while len(due) < at_most and (topic_id := self._due.pop_due(now_ms)) is not None:
                due.append(topic_id)
        return due


class Topics:
    """Topic states by name and by id. Thread-safe."""

    def __init__(
        self,
        main: Environment,
        config: StoreConfig,
        agenda: TrimAgenda,
        events: TopicEvents,
        log: DeliveryLog | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        """`agenda` is told when main logs are to be looked at, `events` which topics are created.

        log: where subscriptions note what they hand out; None: nowhere.
        """
        self._log = log
        self._main = main
        self._read_only = read_only
        self.run_limits = RunLimits(config.run_entries, config.run_bytes)
        self._ledger_limits = LedgerLimits(config.ledger_max_entries, config.ledger_max_bytes, config.ledger_max_age_ms)
        self._lock = threading.Lock()
        self._by_name: dict[TopicName, TopicState] = {}
        self._by_id: dict[int, TopicState | None] = {}
        self._agenda = agenda
        self._events = events

    def find(self, name: TopicName) -> TopicState | None:
        """The topic, loaded if need be; None when there is none. O(1) once loaded."""
        state = self._by_name.get(name)
        return self._find_all([name])[0] if state is None or state.deleted else state

    def _known(self, name: TopicName) -> TopicState | None:
        """The topic, if it is in memory, and there; of a read-only store nothing is kept."""
        state = self._by_name.get(name)
        return None if state is None or state.deleted else state

    def _find_all(self, names: Sequence[TopicName]) -> list[TopicState | None]:
        """The topics of several names, as `find`."""
        found = [self._known(name) for name in names]
        if None in found:
            with self._lock, self._main.read() as raw:
                found = [self._known(name) or self._read(raw, name) for name in names]
        return found

    def _read(self, raw: Reads, name: TopicName) -> TopicState | None:
        record = catalog.find_topic(raw, str(name))
        return None if record is None else self._load(raw, record.topic_id, name)

    def get(self, name: TopicName) -> TopicState:
        state = self.find(name)
        if state is None:
            raise UnknownTopic(str(name))
        return state

    def get_or_create(self, name: TopicName, now_ms: int) -> TopicState:
        state = self.find(name)
        if state is None:
            self.create([name], now_ms)
            state = self.get(name)
        return state

    def create(self, names: Sequence[TopicName], now_ms: int) -> list[bool]:
        """Create topics durably, in one commit; False: it is there."""
        if None not in self._find_all(names):
            return [False] * len(names)
        return self._main.write(lambda transaction: [self._add(transaction, name, now_ms) for name in names])

    def _add(self, transaction: Transaction, name: TopicName, now_ms: int) -> bool:
        if transaction.get(fmt.topic_key(str(name))) is not None:
            return False
        topic_id = catalog.add_topic(transaction, str(name), now_ms).topic_id
        transaction.after_commit(lambda: self._events.note(TopicEvent("created", str(name), topic_id)))
        return True

    def get_or_create_all(self, names: Sequence[TopicName], now_ms: int) -> list[TopicState]:
        """The topics of several names; those that there are not are created in one commit."""
        found = self._find_all(names)
        if None in found:
            self.create([name for name, state in zip(names, found, strict=True) if state is None], now_ms)
            found = self._find_all(names)
        return [state or self.get(name) for name, state in zip(names, found, strict=True)]

    def by_id(self, topic_id: int) -> TopicState | None:
        if topic_id in self._by_id:
            return self._by_id[topic_id]
        with self._lock:
            if topic_id in self._by_id:
                return self._by_id[topic_id]
            with self._main.read() as raw:
                name = catalog.topic_name(raw, topic_id)
                if name is None:
                    self._by_id[topic_id] = None
                    return None
                return self._load(raw, topic_id, TopicName.parse(name))

    def name_of(self, topic_id: int) -> str:
        state = self._by_id.get(topic_id)
        return f"number {topic_id}" if state is None else str(state.name)

    def main_log(self, topic_id: int) -> ManagedLedger | None:
        state = self.by_id(topic_id)
        return None if state is None else state.log

    def _load(self, raw: Reads, topic_id: int, name: TopicName) -> TopicState:
        log = ManagedLedger.load(
            raw, self._main.name, topic_id, self.run_limits, self._ledger_limits, self._log_changed
        )
        state = TopicState(topic_id, name, log)
        for _, subscription, record in catalog.cursors(raw, topic_id):
            rows = dict(catalog.acked(raw, record.subscription_id))
            acks = AckSet.load(record.mark_delete, rows)
            acks.trim_to(log.first_ledger, log)
            attempts = AttemptCounts(self._log, record.subscription_id)
            attempts.load(catalog.attempts(raw, record.subscription_id), acks.is_acked)
            found = SubscriptionState(topic_id, str(name), subscription, record, acks, attempts=attempts)
            if record.flags & PAUSED:
                found.paused_until_ms = catalog.pause_ends_ms(raw, record.subscription_id) or FOR_EVER_MS
            state.subscriptions[subscription] = found
        if not self._read_only:
            self._by_name[name] = state
            self._by_id[topic_id] = state
        return state

    def _log_changed(self, topic_id: int, look: bool) -> None:
        """A commit has touched a main log: wake its receivers, and with `look` have the log looked at for trimming."""
        state = self._by_id.get(topic_id)
        if state is None:
            return
        if look:
            age_due_ms = state.log.age_due_ms()
            self._agenda.look_at(topic_id, 0 if age_due_ms is None or state.log.ledgers()[0].closed else age_due_ms)
        state.changed()

    def wake_receivers(self) -> None:
        for topic in self.loaded():
            topic.changed()

    def add_subscription(
        self,
        state: TopicState,
        name: str,
        now_ms: int,
        waiting: Callable[[], Mapping[int, BitMap]] = dict,
        *,
        earliest: bool,
        keeper: bool = False,
    ) -> SubscriptionState:
        """The subscription, created durably at the beginning or the end of the log where there is none.

        waiting: gives the entries that are not due at `now_ms`, by ledger id. They come to one that begins at the end
        too: everything before it but those is recorded as acknowledged. keeper: it is marked as one, also where it was
        there before.
        """
        found = state.subscriptions.get(name)
        if found is not None and found.keeper >= keeper:
            return found
        log = state.log

        def begin() -> tuple[int, AckChanges]:
            """The first ledger, and acknowledgements that begin with what is not due, or not appended yet."""
            first = log.first_ledger
            start = Position(first, 0) if earliest else log.latest(now_ms)
            acks = AckSet(Position(first, BEFORE_FIRST))
            acks.begin(Position(start.ledger_id, start.entry_id - 1), {} if earliest else waiting(), log)
            return first, acks.take_changes()

        def work(transaction: Transaction) -> tuple[CursorRecord, dict[int, bytes]] | None:
            if transaction.get(fmt.topic_key(str(state.name))) is None:
                raise UnknownTopic(str(state.name))
            key = fmt.cursor_key(state.topic_id, name)
            fields = transaction.get(key)
            if fields is not None:
                record = CursorRecord.unpack(fields)
                if keeper:
                    record = record._replace(flags=record.flags | KEEPER)
                    transaction.put(key, record.pack())
                return record, dict(catalog.acked(transaction.raw, record.subscription_id))
            if log.first_in(transaction) != first:  # trimmed meanwhile
                return None
            number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
            mark_delete, flags = changes.mark_delete, KEEPER if keeper else 0
            record = CursorRecord(number, max(now_ms, 0), mark_delete.ledger_id, mark_delete.entry_id + 1, flags)
            transaction.put(key, record.pack())
            for ledger_id, change in changes.acked.items():
                transaction.change_bits(fmt.acked_key(number, ledger_id), change)
            return record, dict(catalog.acked(transaction.raw, number))

        written = None
        while written is None:
            first, changes = begin()
            written = self._main.write(work)
        record, rows = written
        with self._lock:
            found = state.subscriptions.get(name)
            if found is None:
                acks = AckSet.load(record.mark_delete, rows)
                attempts = AttemptCounts(self._log, record.subscription_id)
                found = SubscriptionState(state.topic_id, str(state.name), name, record, acks, attempts=attempts)
                # Replaced, not changed in place: others iterate over it without a lock.
                state.subscriptions = {**state.subscriptions, name: found}
            found.keeper |= keeper
        return found

    def keepers(self) -> Iterator[tuple[TopicState, SubscriptionState]]:
        """The subscriptions that hold dead letters, and their topics, by topic id. O(subscriptions of the store)."""
        for page in catalog.pages(self._main, fmt.prefix(fmt.Table.CURSOR)):
            for key, fields in page:
                if CursorRecord.unpack(fields).flags & KEEPER:
                    state = self.by_id(fmt.leading_u32(key))
                    if state is not None and fmt.split_named_key(key)[1] in state.subscriptions:
                        yield state, state.subscriptions[fmt.split_named_key(key)[1]]

    def loaded(self) -> list[TopicState]:
        return list(self._by_name.values())

    def names(self, prefix: str = "") -> Iterator[str]:
        for name, _ in catalog.topic_names(self._main, prefix):
            yield name

    def forget(self, state: TopicState) -> None:
        with self._lock:
            state.deleted = True
            if self._by_name.get(state.name) is state:  # else it was created again
                del self._by_name[state.name]
            self._by_id[state.topic_id] = None
        state.changed()
