"""The message that a consumer is handed next: any, in log order, or by key.

Owns the positions that are ready: due for redelivery, or read from the log and kept back. The dispatcher tells it of
every change of a message's place; a message is ready, held by a consumer, awaiting redelivery, or gone.

Key-shared subscriptions: two invariants. At any time one consumer at most holds messages of a key; and a message is not
handed out while an earlier one of its key is kept back or awaits redelivery. So a key moves to another consumer only
when the one before has acknowledged, given back or lost what it held of it. Other keys go on meanwhile, past at most
``max_kept_back`` messages.

A key belongs to the consumer that ``key_slots.py`` says; it is the message's key, or what stands for it
(``KeyShared``). Messages without one go to any consumer. What only one consumer can put together has a key that stays
with it while it holds any of it (``Parts``, ``PartsOfKey``), in shared subscriptions too. Out of order both invariants
are lifted: a message goes to its key's owner.

Deliberately in memory only, and only for keys of which a message is held or queued: some 60 bytes a message and
130 a key. The bodies of messages kept back are not kept; they are read again.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from pyroaring import BitMap

from duelog.store.errors import BrokenInvariant
from duelog.store.position import Position
from duelog.store.received_messages import ReceivedMessages

from .key_slots import KeyShared, KeySlots, Parts, PartsOfKey, Ranges
from .position_set import PositionSet


class DeliveryOrder:
    """Exclusive, failover and shared subscriptions: redeliveries in log order to the first consumer that asks."""

    def __init__(self) -> None:
        self._anyone = PositionSet()

    def __len__(self) -> int:
        """Number of positions that are ready, whether or not they may be handed out just now."""
        return len(self._anyone)

    @property
    def kept_back(self) -> int:
        """How many of them were read from the log and never handed out."""
        return 0

    @property
    def for_one(self) -> bool:
        """True if there is a message that one consumer may have and others may not."""
        return False

    def set_consumers(self, consumers: Sequence[int], ranges: Mapping[int, Ranges] | None = None) -> None:
        """These are the consumers now; ranges: of keys, where consumers have any."""

    def peek(self, consumer_id: int, count: int) -> list[Position]:
        """The first ``count`` ready positions that this consumer may have now; they stay where they are."""
        return self._anyone.first(count)

    def look_ahead(self, count: int) -> int:
        """How many of ``count`` messages may be read from the log now."""
        return count

    def admit(self, consumer_id: int, messages: ReceivedMessages) -> ReceivedMessages:
        """New messages from the log, asked for by this consumer: those that it may have; the rest becomes ready."""
        return messages

    def handed_out_before(self, messages: ReceivedMessages) -> Sequence[int]:
        """Which of these ready messages were handed out before, by their places in the batch."""
        return range(len(messages))

    def hand_out(self, consumer_id: int, messages: ReceivedMessages) -> None:
        """The consumer has these now, which ``admit`` or ``peek`` allowed it."""
        if self._anyone:
            for position in messages.positions:
                self._anyone.discard(position)

    def taken_back(self, ledger_id: int, entries: BitMap) -> None:
        """Entries that a consumer held await redelivery now."""

    def fell_due(self, ledger_id: int, entries: BitMap) -> None:
        """Entries that waited for their time are ready now."""
        self._anyone.update(ledger_id, entries)

    def forget(self, ledger_id: int, entries: BitMap) -> None:
        """Entries are acknowledged or cannot be read, wherever they were."""
        self._anyone.remove(ledger_id, entries)

    def forget_through(self, position: Position) -> None:
        """Everything at or before ``position`` is acknowledged or gone, wherever it was."""
        self._anyone.remove_through(position)

    def clear(self) -> None:
        """Nothing is ready, held or awaiting redelivery; the consumers stay."""
        self._anyone.clear()

    def ready(self) -> set[Position]:
        return set(self._anyone)

    def _check(self) -> None:
        self._anyone._check()


_BY_KEY = KeyShared()
_STAYING = (Parts, PartsOfKey)


class _Key:
    """A key of which some message is held, ready or awaiting redelivery."""

    __slots__ = ("held", "holder", "name", "owner", "parked", "queued", "stays", "waiting")

    def __init__(self, name: str | int) -> None:
        self.name = name
        self.owner: int | None = None  # the consumer that is to have it, once known; valid until the consumers change
        self.holder: int | None = None  # the consumer that holds messages of it
        self.held = 0  # how many
        self.stays = False  # with its holder when the consumers change: that may hold the first parts of a message
        self.queued = 0  # how many messages of it are ready, parked or awaiting redelivery
        self.parked: PositionSet | None = None  # ready but not to be handed out before something else happens
        self.waiting: PositionSet | None = None  # nacked or overdue, until their time comes

    def park(self, position: Position) -> None:
        if self.parked is None:
            self.parked = PositionSet()
        self.parked.add(position)

    def wait(self, position: Position) -> None:
        if self.waiting is None:
            self.waiting = PositionSet()
        self.waiting.add(position)

    def awaits_before(self, position: Position) -> bool:
        least = self.waiting.least() if self.waiting else None
        return least is not None and least < position


class KeyOrder(DeliveryOrder):
    """Ready messages by the consumer that their key belongs to."""

    def __init__(self, max_kept_back: int, how: KeyShared = _BY_KEY, before: DeliveryOrder | None = None) -> None:
        """max_kept_back: how many messages may have been read and not handed out. The ranges of `how` do not count.

        before: the order until now, whose messages go to anyone.
        """
        super().__init__()
        if before is not None:
            self._anyone = before._anyone
        self._order_by = how.order_by
        self._may_order = how.may_order
        self._in_order = not how.out_of_order
        self._max_kept_back = max_kept_back
        self._slots = KeySlots()
        self._keys: dict[str | int, _Key] = {}
        self._key_at: dict[int, dict[int, _Key]] = {}  # ledger id -> entry id -> its key
        self._ready: dict[int | None, PositionSet] = {}  # by owner; None while there is no consumer
        self._kept_back = PositionSet()

    def __len__(self) -> int:
        parked = sum(len(key.parked) for key in self._keys.values() if key.parked)
        return len(self._anyone) + sum(map(len, self._ready.values())) + parked

    @property
    def kept_back(self) -> int:
        return len(self._kept_back)

    @property
    def for_one(self) -> bool:
        return bool(self._keys)

    def set_consumers(self, consumers: Sequence[int], ranges: Mapping[int, Ranges] | None = None) -> None:
        """Hand the ready messages to their new owners. O(consumers + ready messages)."""
        self._slots = KeySlots(consumers, ranges, self._slots)
        ready = [position for positions in self._ready.values() for position in positions]
        self._ready = {}
        for key in self._keys.values():
            key.owner = self._owner_of(key)
            self._unpark(key)
        for position in ready:
            self._ready_of(self._key_at[position[0]][position[1]]).add(position)

    def peek(self, consumer_id: int, count: int) -> list[Position]:
        mine: list[Position] = []
        blocked: list[tuple[_Key, Position]] = []
        ready = self._ready.get(consumer_id, ())
        for position in ready:
            key = self._key_at[position[0]][position[1]]
            if self._is_free(key, consumer_id) and not (self._in_order and key.awaits_before(position)):
                mine.append(position)
                if len(mine) == count:
                    break
            else:
                blocked.append((key, position))
        for key, position in blocked:
            self._ready[consumer_id].discard(position)
            key.park(position)
        return sorted([*mine, *self._anyone.first(count)])[:count]

    def look_ahead(self, count: int) -> int:
        return min(count, self._max_kept_back - len(self._kept_back))

    def admit(self, consumer_id: int, messages: ReceivedMessages) -> ReceivedMessages:
        if self._may_order is not None:
            with suppress(Exception):
                if not self._may_order(messages.payloads):
                    return messages
        names = self._names(messages)
        if names.count(None) == len(names):
            return messages
        admitted: list[int] = []
        for row, (name, position) in enumerate(zip(names, messages.positions, strict=True)):
            if name is None:
                admitted.append(row)
                continue
            key = self._key(name)
            self._key_at.setdefault(position[0], {})[position[1]] = key
            if key.owner == consumer_id and not (self._in_order and key.queued) and self._is_free(key, consumer_id):
                admitted.append(row)
                continue
            key.queued += 1
            self._kept_back.add(position)
            self._ready_of(key).add(position)
        return messages if len(admitted) == len(messages) else messages.pick(admitted)

    def handed_out_before(self, messages: ReceivedMessages) -> Sequence[int]:
        if not self._kept_back:
            return super().handed_out_before(messages)
        return [row for row, position in enumerate(messages.positions) if position not in self._kept_back]

    def hand_out(self, consumer_id: int, messages: ReceivedMessages) -> None:
        if not self._key_at:
            super().hand_out(consumer_id, messages)
            return
        for position in messages.positions:
            key = self._key_at.get(position[0], {}).get(position[1])
            if key is None:
                self._anyone.discard(position)
                continue
            if key.queued:
                self._unqueue(key, position)
            key.holder = consumer_id
            key.held += 1

    def taken_back(self, ledger_id: int, entries: BitMap) -> None:
        key_at = self._key_at.get(ledger_id)
        if key_at is None:
            return
        for entry_id in entries:
            key = key_at.get(entry_id)
            if key is not None:
                key.wait(Position(ledger_id, entry_id))
                key.queued += 1
                self._let_go(key)

    def fell_due(self, ledger_id: int, entries: BitMap) -> None:
        key_at = self._key_at.get(ledger_id)
        if key_at is None:
            super().fell_due(ledger_id, entries)
            return
        for entry_id in entries:
            position = Position(ledger_id, entry_id)
            key = key_at.get(entry_id)
            if key is None:
                self._anyone.add(position)
            else:
                if key.waiting is not None:
                    key.waiting.discard(position)
                self._ready_of(key).add(position)
                self._unpark(key)

    def forget(self, ledger_id: int, entries: BitMap) -> None:
        super().forget(ledger_id, entries)
        key_at = self._key_at.get(ledger_id)
        if key_at is None:
            return
        for entry_id in entries:
            key = key_at.pop(entry_id, None)
            if key is None:
                continue
            if key.queued and self._unqueue(key, Position(ledger_id, entry_id)):
                self._unpark(key)
            else:
                self._let_go(key)
            if not key.held and not key.queued:
                del self._keys[key.name]
        if not key_at:
            del self._key_at[ledger_id]

    def forget_through(self, position: Position) -> None:
        super().forget_through(position)
        ledger_id, last = position
        for at in [at for at in self._key_at if at <= ledger_id]:
            self.forget(at, BitMap([entry_id for entry_id in self._key_at[at] if at < ledger_id or entry_id <= last]))

    def clear(self) -> None:
        super().clear()
        self._keys.clear()
        self._key_at.clear()
        self._ready.clear()
        self._kept_back.clear()

    def ready(self) -> set[Position]:
        return super().ready().union(*self._ready.values(), *(key.parked or () for key in self._keys.values()))

    # -- inside --------------------------------------------------------------------------------

    def _names(self, messages: ReceivedMessages) -> Sequence[str | int | None]:
        order_by = self._order_by
        if order_by is None:
            return messages.keys
        try:
            names = [order_by(payload, key) for payload, key in zip(messages.payloads, messages.keys, strict=True)]
        except Exception:
            names = []
            for payload, key in zip(messages.payloads, messages.keys, strict=True):
                name = None
                with suppress(Exception):
                    name = order_by(payload, key)
                names.append(name)
        return [name if isinstance(name, (str, int)) else None for name in names]

    def _key(self, name: str | int) -> _Key:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key(name)
            key.owner = self._owner_of(key)
        if isinstance(name, _STAYING):
            key.stays = True
        return key

    def _owner_of(self, key: _Key) -> int | None:
        if key.stays and key.held:
            return key.holder
        owner = self._slots.owner_of(key.name)
        return min(self._slots.consumers, default=None) if owner is None and isinstance(key.name, Parts) else owner

    def _ready_of(self, key: _Key) -> PositionSet:
        ready = self._ready.get(key.owner)
        if ready is None:
            ready = self._ready[key.owner] = PositionSet()
        return ready

    def _is_free(self, key: _Key, consumer_id: int) -> bool:
        return not key.held or key.holder == consumer_id or not self._in_order

    def _let_go(self, key: _Key) -> None:
        key.held -= 1
        if not key.held:
            key.holder = None
            self._unpark(key)

    def _unpark(self, key: _Key) -> None:
        """Something that may have held this key up has happened: ``peek`` looks again."""
        if key.parked:
            ready = self._ready_of(key)
            for ledger_id, entries in key.parked.by_ledger().items():
                ready.update(ledger_id, entries)
            key.parked = None

    def _unqueue(self, key: _Key, position: Position) -> bool:
        """Take a position from where it is ready or awaits redelivery; False if it does neither."""
        places = (self._ready_of(key), key.parked, key.waiting)
        if not any(place is not None and place.discard(position) for place in places):
            return False
        key.queued -= 1
        self._kept_back.discard(position)
        return True

    def _check(self) -> None:
        """Raise BrokenInvariant unless the counts of every key are those of the positions."""
        super()._check()
        tracked = dict.fromkeys(self._keys, 0)
        for of_ledger in self._key_at.values():
            for key in of_ledger.values():
                tracked[key.name] += 1
        queued = {name: len(key.waiting or ()) + len(key.parked or ()) for name, key in self._keys.items()}
        for owner, ready in self._ready.items():
            ready._check()
            for ledger_id, entry_id in ready:
                key = self._key_at[ledger_id][entry_id]
                queued[key.name] += 1
                if key.owner != owner or (owner != self._slots.owner_of(key.name) and not key.stays):
                    raise BrokenInvariant(f"a ready message of key {key.name!r} is kept for {owner}, not {key.owner}")
        for name, key in self._keys.items():
            if key.queued != queued[name] or key.held != tracked[name] - queued[name] or key.held + key.queued < 1:
                raise BrokenInvariant(f"key {name!r}: {key.held} held, {key.queued} queued of {tracked[name]} messages")
            if (key.holder is None) != (key.held == 0):
                raise BrokenInvariant(f"key {name!r}: {key.held} messages are held by {key.holder}")
        if not set(self._kept_back) <= self.ready():
            raise BrokenInvariant("a message kept back is not ready")
        if len(self._kept_back) > self._max_kept_back:
            raise BrokenInvariant(f"{len(self._kept_back)} messages are kept back")
