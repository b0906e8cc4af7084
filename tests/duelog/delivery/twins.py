"""Plain-Python twins for the dispatcher's tests: a log in a dict, a subscription in sets, and short ways to both."""

from collections.abc import Sequence
from functools import lru_cache

from pyroaring import BitMap

from duelog.delivery.acks import AckSet
from duelog.delivery.dispatcher import Dispatcher, SubscriptionType
from duelog.delivery.key_slots import KeyShared, KeySlots, Parts, PartsOfKey
from duelog.markers.reader import Unacknowledged
from duelog.store.message import ReceivedMessage
from duelog.store.position import Position
from duelog.store.received_messages import ReceivedMessages


class Ledgers:
    """A topic's ledgers in a dict of entry counts."""

    def __init__(self, counts: dict[int, int]) -> None:
        self.counts = counts

    def lengths(self) -> dict[int, int]:
        return self.counts

    def entries_of(self, ledger_id: int) -> int | None:
        return self.lengths().get(ledger_id)

    def following(self, ledger_id: int) -> int | None:
        return min((each for each in self.lengths() if each > ledger_id), default=None)

    def positions(self) -> list[Position]:
        return [Position(ledger, entry) for ledger, count in sorted(self.lengths().items()) for entry in range(count)]


class Log(Ledgers):
    """A topic's main log: the keys of its messages by ledger. Reader and list of ledgers at once."""

    def __init__(self, keys: dict[int, list[str | None]]) -> None:
        super().__init__({})
        self.keys = keys
        self.unreadable: set[Position] = set()
        self.away: set[Position] = set()
        """Positions whose messages are not on this machine: reading ends before them."""
        self.fails = False
        self.reads = 0

    def lengths(self) -> dict[int, int]:
        return {ledger_id: len(keys) for ledger_id, keys in self.keys.items()}

    def end(self) -> Position:
        last = max(self.keys)
        return Position(last, len(self.keys[last]))

    def key_at(self, position: Position) -> str | None:
        return self.keys[position.ledger_id][position.entry_id]

    def readable(self, position: Position) -> bool:
        return position.ledger_id in self.keys and position not in self.unreadable

    def message(self, position: Position) -> ReceivedMessage:
        return ReceivedMessage(b"", self.key_at(position), {}, position, position, 0, 0, 99, "topic", "subscription")

    def read(self, start: Position, max_entries: int, skip: Unacknowledged) -> tuple[ReceivedMessages, Position]:
        self._touch()
        found: list[ReceivedMessage] = []
        for position in self.positions():
            if position >= start and position in self.away and not skip.is_acked(position):
                return columns(found), position
            if position >= start and self.readable(position) and not skip.is_acked(position):
                found.append(self.message(position))
                if len(found) == max_entries:
                    return columns(found), Position(position.ledger_id, position.entry_id + 1)
        return columns(found), max(start, self.end())

    def unseen(self, start: Position, limit: Position) -> dict[int, BitMap]:
        """Nothing is passed over."""
        return {}

    def read_at(self, positions: Sequence[Position]) -> tuple[ReceivedMessages, Position | None]:
        self._touch()
        assert list(positions) == sorted(set(positions))
        limit = next((position for position in positions if position in self.away), None)
        there = positions if limit is None else positions[: positions.index(limit)]
        return columns([self.message(position) for position in there if self.readable(position)]), limit

    def _touch(self) -> None:
        self.reads += 1
        if self.fails:
            raise OSError("the disk is gone")


def columns(messages: Sequence[ReceivedMessage]) -> ReceivedMessages:
    """Messages as a dispatcher gets them."""
    return ReceivedMessages.of("topic", "subscription", messages)


_slots = lru_cache(KeySlots)


class Twin:
    """The rules of a dispatcher, with sets of positions and no thought for speed."""

    def __init__(
        self, log: Log, kind: str, ack_timeout_ms: int | None, max_kept_back: int, how: KeyShared | None = None
    ) -> None:
        self.log = log
        self.how = how or KeyShared()
        self.ranges: dict[int, tuple[tuple[int, int], ...]] = {}
        self.kind = kind
        self.timeout_ms = ack_timeout_ms
        self.max_kept_back = max_kept_back
        self.consumers: list[int] = []
        self.owners: dict[str | int, int | None] = {}
        """By key of parts, as it was when the consumers changed, or when it came."""
        self.chosen: int | None = None
        self.acked: set[Position] = set()
        self.held: dict[Position, tuple[int, int | None]] = {}  # consumer, deadline_ms
        self.waiting: dict[Position, int] = {}
        self.ready: set[Position] = set()
        self.times: dict[Position, int] = {}
        self.read_position = log.positions()[0] if log.positions() else log.end()

    @property
    def kept_back(self) -> set[Position]:
        return {position for position in self.ready if position not in self.times}

    def key(self, position: Position) -> str | int | None:
        if self.kind != "key_shared" and self.how.order_by is None:
            return None
        key = self.log.key_at(position)
        return key if self.how.order_by is None else self.how.order_by(b"", key)

    def due(self, now_ms: int) -> None:
        for position, (_, deadline_ms) in list(self.held.items()):
            if deadline_ms is not None and deadline_ms <= now_ms:
                del self.held[position]
                self.ready.add(position)
        for position, at_ms in list(self.waiting.items()):
            if at_ms <= now_ms:
                del self.waiting[position]
                self.ready.add(position)

    def may_have(self, position: Position, consumer_id: int) -> bool:
        key = self.key(position)
        if key is None:
            return True
        owner = self.owner(key)
        if self.how.out_of_order:
            return owner == consumer_id
        return (
            owner == consumer_id
            and all(who == consumer_id for at, (who, _) in self.held.items() if self.key(at) == key)
            and not any(at < position for at in self.waiting if self.key(at) == key)
        )

    def owner(self, key: str | int) -> int | None:
        slots = KeySlots(self.consumers, self.ranges) if self.ranges else _slots(tuple(self.consumers))
        if not isinstance(key, Parts | PartsOfKey):
            return slots.owner_of(key)
        if not any(self.key(at) == key for at in [*self.held, *self.waiting, *self.ready]):
            self.owners.pop(key, None)
        owner = slots.owner_of(key)
        return self.owners.setdefault(key, min(self.consumers) if owner is None and isinstance(key, Parts) else owner)

    def consumers_changed(self) -> None:
        keys = {at: self.key(at) for at in self.held}
        self.owners = {key: self.held[at][0] for at, key in keys.items() if isinstance(key, Parts | PartsOfKey)}

    def peek(self, consumer_id: int, count: int) -> list[Position]:
        return [position for position in sorted(self.ready) if self.may_have(position, consumer_id)][:count]

    def hand_out(self, position: Position, consumer_id: int, now_ms: int) -> tuple[Position, int]:
        before = self.times.get(position, 0)
        self.times[position] = before + 1
        self.ready.discard(position)
        self.held[position] = (consumer_id, None if self.timeout_ms is None else now_ms + self.timeout_ms)
        return position, before

    def next_batch(self, consumer_id: int, count: int, now_ms: int) -> list[tuple[Position, int]]:
        if self.kind == "failover" and self.active != consumer_id:
            return []
        self.due(now_ms)
        while True:
            asked = self.peek(consumer_id, count)
            room = count - len(asked)
            if away := [position for position in asked if position in self.log.away]:
                asked = asked[: asked.index(away[0])]
                room = 0 if self.kind in ("exclusive", "failover") else count - len(asked)
            if self.kind == "key_shared" or self.how.order_by is not None:
                room = min(room, self.max_kept_back - len(self.kept_back))
            batch = [self.hand_out(at, consumer_id, now_ms) for at in asked if self.log.readable(at)]
            for position in asked:
                if not self.log.readable(position):
                    self.forget(position)
            before = self.read_position
            for position in self.log.positions() if room > 0 else ():
                if position >= before and position in self.log.away - self.acked:
                    self.read_position = position
                    break
                if position >= before and self.log.readable(position) and position not in self.acked:
                    self.read_position = Position(position.ledger_id, position.entry_id + 1)
                    key = self.key(position)
                    queued = (
                        key is not None
                        and not self.how.out_of_order
                        and any(self.key(at) == key for at in [*self.ready, *self.waiting])
                    )
                    if self.may_have(position, consumer_id) and (self.how.out_of_order or not queued):
                        batch.append(self.hand_out(position, consumer_id, now_ms))
                    else:
                        self.ready.add(position)
                    room -= 1
                    if not room:
                        break
            else:
                if room > 0:
                    self.read_position = max(before, self.log.end())
            if batch or not (asked or self.read_position != before):
                return batch

    def forget(self, position: Position) -> None:
        self.held.pop(position, None)
        self.waiting.pop(position, None)
        self.ready.discard(position)
        self.times.pop(position, None)

    def ack(self, positions: Sequence[Position]) -> int:
        new = set(positions) - self.acked
        for position in positions:
            self.forget(position)
        self.acked |= new
        return len(new)

    def nack(self, consumer_id: int, positions: Sequence[Position], redeliver_at_ms: int, now_ms: int) -> int:
        mine = {position for position in positions if self.held.get(position, (None,))[0] == consumer_id}
        for position in mine:
            del self.held[position]
            if redeliver_at_ms > now_ms:
                self.waiting[position] = redeliver_at_ms
            else:
                self.ready.add(position)
        return len(mine)

    @property
    def active(self) -> int:
        return self.consumers[0] if self.chosen is None or self.chosen not in self.consumers else self.chosen

    def activate(self, consumer_id: int, now_ms: int) -> None:
        self.chosen = consumer_id
        for other in self.consumers:
            if other != consumer_id:
                self.nack(other, list(self.held), now_ms, now_ms)

    def remove_consumer(self, consumer_id: int, now_ms: int) -> None:
        self.nack(consumer_id, list(self.held), now_ms, now_ms)
        self.consumers.remove(consumer_id)
        self.consumers_changed()

    def trimmed(self) -> None:
        for position in {*self.held, *self.waiting, *self.ready, *self.times}:
            if position.ledger_id not in self.log.keys:
                self.forget(position)
        self.read_position = max(self.read_position, Position(min(self.log.keys), 0))

    def seek(self, mark_delete: Position) -> None:
        self.held.clear()
        self.waiting.clear()
        self.ready.clear()
        self.times.clear()
        self.acked = {position for position in self.log.positions() if position <= mark_delete}
        self.read_position = Position(mark_delete.ledger_id, mark_delete.entry_id + 1)


def log_of(*keys: str | None) -> Log:
    """One ledger, number 1, with a message for each key."""
    return Log({1: list(keys)})


def dispatcher_on(
    log: Log,
    type: SubscriptionType = "shared",
    *,
    consumers: Sequence[int] = (1, 2),
    ack_timeout_ms: int | None = None,
    max_kept_back: int = 100,
) -> Dispatcher:
    """A dispatcher at the start of the log, with consumers."""
    acks = AckSet(Position(1, -1))
    dispatcher = Dispatcher(acks, log, log, type=type, ack_timeout_ms=ack_timeout_ms, max_kept_back=max_kept_back)
    for consumer_id in consumers:
        dispatcher.add_consumer(consumer_id)
    return dispatcher


def at(*entries: int) -> list[Position]:
    """Positions of ledger 1."""
    return [Position(1, entry) for entry in entries]


def entries(batch: Sequence[ReceivedMessage]) -> list[int]:
    """Entry ids of a batch."""
    return [message.position.entry_id for message in batch]


def acked_after_mark(acks: AckSet) -> int:
    """How many acknowledged entries the mark-delete position does not cover."""
    return sum(map(len, acks._acked.values()))


def has_ready(dispatcher: Dispatcher, now_ms: int, consumer_id: int | None = None) -> bool:
    """True if a message that was read before could be handed out now, to one consumer or to any."""
    dispatcher._bring_due(now_ms)
    if consumer_id is not None:
        return dispatcher.may_receive(consumer_id) and bool(dispatcher._order.peek(consumer_id, 1))
    return any(dispatcher._order.peek(some_id, 1) for some_id in dispatcher.consumers)
