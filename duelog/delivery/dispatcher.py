"""The dispatcher of one subscription: which messages each consumer holds, and which must be handed out again.

Owns the read position and the place of every message before it that is not acknowledged. Each is in exactly one place:

- held by one consumer (``outstanding.py``);
- awaiting its redelivery (``outstanding.py``);
- ready: due for redelivery, or read and kept back for its key's sake (``delivery_order.py``);
- skipped, because the reader could not read it. It stays unacknowledged until the engine acknowledges it.

Delivery is at least once: a message leaves only by being acknowledged, trimmed, skipped, or by a seek. Its state is in
memory, but for how often it was delivered (duelog/delivery/attempt_counts.py). Without storage, threads and clock: the
caller holds the subscription's lock and passes ``now_ms``. While a dispatcher exists, every acknowledgement and trim of
its subscription goes through it, those by time-to-live included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

from pyroaring import BitMap

from duelog.delivery.acks import AckSet, LedgerList
from duelog.delivery.attempt_counts import AttemptCounts
from duelog.markers.reader import Unacknowledged
from duelog.store.errors import BrokenInvariant, DuelogError, InvalidArgument
from duelog.store.position import BEFORE_FIRST, Position
from duelog.store.received_messages import ReceivedMessages

from .delivery_order import DeliveryOrder, KeyOrder
from .key_slots import KeyShared, Ranges
from .outstanding import Outstanding, Redeliveries
from .position_set import group_by_ledger

SubscriptionType = Literal["exclusive", "failover", "shared", "key_shared"]

P = ParamSpec("P")
T = TypeVar("T")


class LogReader(Protocol):
    """The engine's way to the messages of the main log; markers are resolved, ``redelivery_count`` is ignored."""

    def read(self, start: Position, max_entries: int, skip: Unacknowledged) -> tuple[ReceivedMessages, Position]:
        """The next messages in log order from ``start`` on, and one past the last entry that was looked at.

        At most ``max_entries`` messages, none that ``skip`` has acknowledged, none that cannot be read. ``start``
        may be past the end of its ledger. No messages and ``start`` itself: there is nothing more for now.
        Nor is there where the next message is not on this machine: the topic changes once it is.
        A reader may pass over a message and return it later, from before ``start``; it returns each message once
        until a seek. If it raises, it has returned nothing.
        """

    def read_at(self, positions: Sequence[Position]) -> tuple[ReceivedMessages, Position | None]:
        """The messages at these ascending positions in the same order, without those that cannot be read.

        They end before the first that is not on this machine, whose position is returned with them.
        """

    def unseen(self, start: Position, limit: Position) -> Mapping[int, BitMap]:
        """Entries before ``limit``, by ledger id, that were not returned because they are, or were, not due yet.

        ``start`` is where the next ``read`` begins. No bitmap is empty.
        """


def _whole(method: Callable[Concatenate[Dispatcher, P], T]) -> Callable[Concatenate[Dispatcher, P], T]:
    """A change that leaves the dispatcher torn if it does not come to its end; an error of duelog's changes nothing."""

    def change(self: Dispatcher, /, *arguments: P.args, **options: P.kwargs) -> T:
        self.torn = True
        try:
            value = method(self, *arguments, **options)
        except DuelogError as error:
            self.torn = isinstance(error, BrokenInvariant)
            raise
        self.torn = False
        return value

    change.__doc__ = method.__doc__
    return change


class Dispatcher:
    """One subscription's deliveries. Not thread-safe.

    What an interrupt, or an error where none is expected, has left half done makes it `torn`; then it is to be mended
    before anything else: everything unacknowledged is handed out again.

    Types: "exclusive" and "shared" hand anything to any consumer ("exclusive" leaves it to the caller to admit
    one only); "failover" hands all to the active consumer, at first the one that came first; "key_shared" keeps order
    by key, see ``KeyOrder``.
    """

    def __init__(
        self,
        acks: AckSet,
        reader: LogReader,
        ledgers: LedgerList,
        *,
        type: SubscriptionType,
        ack_timeout_ms: int | None = None,
        max_kept_back: int = 2_000,
        key_shared: KeyShared | None = None,
        counts: AttemptCounts | None = None,
    ) -> None:
        """Start after the mark-delete position of ``acks``, with nothing handed out.

        ack_timeout_ms: how long a consumer may hold a message unacknowledged before others get it; None: for ever.
        max_kept_back: by key only: how many messages may be read and kept back for their keys' sake. When
        that many are, no consumer gets new messages until one of them could be handed out.
        key_shared: what stands for a key, and whether its messages are in order; None: as ever. "shared" with
        `order_by`: which messages stay together.
        counts: of earlier deliveries; None: there were none.
        """
        self.acks = acks
        self.torn = False
        self.type: SubscriptionType = type
        self._reader = reader
        self._ledgers = ledgers
        self.read_position = _after(acks.mark_delete)
        """The next position of the log to look at; may be one past the end of its ledger."""
        self._max_kept_back = max_kept_back
        self._key_shared = key_shared or KeyShared()
        self._ranges: dict[int, Ranges] = {}
        self._active: int | None = None
        self._hold_nothing(Outstanding(ack_timeout_ms, AttemptCounts() if counts is None else counts))

    def _hold_nothing(self, outstanding: Outstanding) -> None:
        self.outstanding = outstanding
        self._redeliveries = Redeliveries()
        by_key = self.type == "key_shared" or self._key_shared.order_by is not None
        self._order = KeyOrder(self._max_kept_back, self._key_shared) if by_key else DeliveryOrder()
        self._order.set_consumers(self.consumers, self._ranges)

    def mend(self, consumers: Sequence[int], rewind: Callable[[Position], None]) -> None:
        """Have nothing handed out, as after a restart, with these consumers; `rewind` takes the reader back."""
        outstanding = Outstanding(self.outstanding.timeout_ms, self.outstanding.counts)
        for consumer in consumers:
            outstanding.add_consumer(consumer)
        self.acks.mend(self._ledgers)
        self._hold_nothing(outstanding)
        self.read_position = _after(self.acks.mark_delete)
        rewind(self.read_position)
        self.torn = False

    @_whole
    def keep_together(self, key_shared: KeyShared) -> None:
        """Have "shared" keep messages together from now on, but for those that were read before."""
        if self._key_shared == key_shared:
            return  # an interrupt came between this and its caller
        self._key_shared = key_shared
        self._order = KeyOrder(self._max_kept_back, key_shared, self._order)
        self._order.set_consumers(self.consumers, self._ranges)

    @property
    def for_one(self) -> bool:
        """True if there is a message that one consumer may have and others may not, whether it has it or not."""
        return self._order.for_one

    @_whole
    def set_ack_timeout(self, ack_timeout_ms: int | None, now_ms: int) -> None:
        """Let consumers hold messages for so long from now on, those that they hold already too; None: for ever."""
        self.outstanding.set_timeout(ack_timeout_ms, now_ms)

    # -- asking --------------------------------------------------------------------------------

    @property
    def consumers(self) -> tuple[int, ...]:
        return self.outstanding.consumers

    @property
    def awaiting_redelivery_count(self) -> int:
        """Number of messages that were handed out, are not acknowledged, and no consumer holds."""
        return len(self._redeliveries) + len(self._order) - self._order.kept_back

    @property
    def kept_back_count(self) -> int:
        return self._order.kept_back

    @property
    def outstanding_count(self) -> int:
        return len(self.outstanding)

    def may_receive(self, consumer_id: int) -> bool:
        """Return True if the consumer gets messages: under "failover", if it is the active one."""
        self._known(consumer_id)
        return self.type != "failover" or self.active == consumer_id

    @property
    def active(self) -> int | None:
        """The consumer that "failover" serves; None: there is no consumer."""
        return next((each for each in self.consumers if each == self._active), next(iter(self.consumers), None))

    def next_redelivery_ms(self) -> int | None:
        """When time alone next makes a message ready: a redelivery's time or an acknowledgement timeout.

        None if none is coming. What is ready already, and new log entries, are not counted.
        """
        times = (self._redeliveries.next_ms(), self.outstanding.next_deadline_ms())
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    # -- consumers -----------------------------------------------------------------------------

    @_whole
    def add_consumer(self, consumer_id: int, ranges: Ranges | None = None) -> None:
        """A consumer comes, with ranges of keys under "key_shared"; InvalidArgument if it is there, or is negative."""
        if consumer_id < 0 or consumer_id in self.outstanding:
            raise InvalidArgument("consumer_id", consumer_id, "negative, or there is such a consumer already")
        self._ranges[consumer_id] = ranges or ()
        self.outstanding.add_consumer(consumer_id)
        self._order.set_consumers(self.consumers, self._ranges)

    @_whole
    def remove_consumer(self, consumer_id: int, now_ms: int, *, failed: bool = True) -> None:
        """A consumer goes; what it held is due for redelivery at ``now_ms``; failed: these deliveries count."""
        self._known(consumer_id)
        self._give_back(consumer_id, now_ms, failed=failed)
        self.outstanding.remove_consumer(consumer_id)
        self._ranges.pop(consumer_id, None)  # a call before may have been interrupted behind this
        self._order.set_consumers(self.consumers, self._ranges)

    @_whole
    def activate(self, consumer_id: int, now_ms: int) -> None:
        """Have "failover" serve this consumer; what others hold is due for redelivery at ``now_ms``."""
        self._known(consumer_id)
        self._active = consumer_id
        for other in self.consumers:
            if other != consumer_id:
                self._give_back(other, now_ms)

    # -- handing out ---------------------------------------------------------------------------

    def next_batch(self, consumer_id: int, max_messages: int, now_ms: int, limit: int = 0) -> ReceivedMessages:
        """Messages for one consumer: first what is ready, in log order, then new ones from the log.

        None of them means that there is nothing for this consumer before the log grows, time passes
        (``next_redelivery_ms``) or another consumer acts. Fewer than ``max_messages`` does not mean that. If the
        reader raises, nothing was handed out and nothing is lost.
        limit: how many messages the consumer may hold, these included; 0: any number.
        """
        if max_messages < 1:
            raise InvalidArgument("max_messages", max_messages, "at least 1")
        none = ReceivedMessages("", "")
        if not self.may_receive(consumer_id):
            return none
        self.torn = True
        self._bring_due(now_ms)
        if limit:
            max_messages = min(max_messages, limit - self.outstanding.held_by(consumer_id))
            if max_messages < 1:
                self.torn = False
                return none
        order, start = self._order, self.read_position
        while True:
            self.torn = False
            ready = order.peek(consumer_id, max_messages)
            found, waits = self._reader.read_at(ready) if ready else (none, None)
            in_order = False
            if waits is not None:  # those from there on stay ready
                ready = ready[: bisect_left(ready, waits)]
                in_order = self.type in ("exclusive", "failover")
            fresh = none
            room = order.look_ahead(max_messages - len(ready))
            if room > 0 and not in_order:
                fresh, start = self._reader.read(self.read_position, room, self.acks)
                if start < self.read_position:
                    raise BrokenInvariant(f"the reader went back from {self.read_position} to {start}")
            # Invariant: from here on nothing raises, so that a message recorded as handed out is handed out.
            self.torn = True
            if len(found) < len(ready):
                self._skip(ready, found)
            moved = bool(ready or fresh) or start != self.read_position
            self.read_position = start
            again = order.handed_out_before(found)
            order.hand_out(consumer_id, found)
            fresh = order.admit(consumer_id, fresh)
            order.hand_out(consumer_id, fresh)
            batch = found + fresh
            if batch:
                self.outstanding.hand_out(consumer_id, batch, again, now_ms)
            if batch or not moved:
                self.torn = False
                return batch

    @_whole
    def nack(
        self, consumer_id: int, positions: Sequence[Position], redeliver_at_ms: int, now_ms: int, *, failed: bool = True
    ) -> int:
        """Give messages back, to be handed out again at ``redeliver_at_ms`` and not before; how many were given back.

        Positions that this consumer does not hold (acknowledged, overdue, never handed to it) are passed over.
        failed: whether these deliveries count as failed ones.
        """
        count = 0
        for ledger_id, entries in group_by_ledger(positions).items():
            held = self.outstanding.release(consumer_id, ledger_id, entries)
            if held is not None:
                self._take_back(ledger_id, held, redeliver_at_ms, now_ms, failed=failed)
                count += len(held)
        return count

    @_whole
    def nack_all(self, consumer_id: int, now_ms: int) -> int:
        """Give back all that a consumer holds, to be handed out again at ``now_ms``, in log order; how many."""
        self._known(consumer_id)
        return self._give_back(consumer_id, now_ms)

    @_whole
    def extend(self, consumer_id: int, groups: Mapping[int, BitMap], until_ms: int) -> int:
        """Let a consumer hold messages until ``until_ms``, whatever the timeout says; how many of them it holds."""
        return sum(self.outstanding.extend(consumer_id, each, groups[each], until_ms) for each in groups)

    def expire(self, now_ms: int) -> int:
        """Take back what is held past the acknowledgement timeout; how many messages. They are due at ``now_ms``.

        ``next_batch`` does so by itself.
        """
        count = 0
        for ledger_id, entries in self.outstanding.take_overdue(now_ms):
            self._take_back(ledger_id, entries, now_ms, now_ms)
            count += len(entries)
        return count

    # -- acknowledging -------------------------------------------------------------------------

    def ack(self, consumer_id: int | None, positions: Sequence[Position]) -> int:
        """Acknowledge messages wherever they are; how many were not acknowledged before.

        consumer_id: the one that probably holds them, which saves a search; None if unknown. Raises InvalidArgument for
        a position that the topic does not have; nothing is acknowledged then.
        """
        return self.ack_entries(consumer_id, group_by_ledger(positions))

    @_whole
    def ack_entries(self, consumer_id: int | None, groups: Mapping[int, BitMap]) -> int:
        if len(groups) > 1:
            for ledger_id, entries in groups.items():
                self.acks.validate(ledger_id, entries.max(), self._ledgers)
        count = 0
        for ledger_id, entries in groups.items():
            count += self.acks.ack(ledger_id, entries, self._ledgers)
            if self.outstanding.forget(consumer_id, ledger_id, entries) < len(entries):
                self._redeliveries.forget(ledger_id, entries)
            self._order.forget(ledger_id, entries)
        return count

    @_whole
    def ack_cumulative(self, position: Position) -> int:
        """Acknowledge everything at or before ``position``; how many entries were not acknowledged before.

        But not what the reader passed over and has not returned since, nor what it would pass over now: that is still
        to be delivered. Raises InvalidArgument under "shared" and "key_shared", where other consumers hold some of
        those messages, and for a position that the topic does not have.
        """
        if self.type in ("shared", "key_shared"):
            raise InvalidArgument("position", position, f"no cumulative acknowledgement under type {self.type!r}")
        self.acks.validate(*position, self._ledgers)
        unseen = self._reader.unseen(self.read_position, _after(position))
        count = self.acks.ack_cumulative(position, self._ledgers, unseen)
        still_to_read = any(Position(ledger, each.max()) >= self.read_position for ledger, each in unseen.items())
        self._forget_through(position, moving=not still_to_read)
        return count

    # -- moving --------------------------------------------------------------------------------

    @_whole
    def seek(self, mark_delete: Position, but: Mapping[int, BitMap] | None = None) -> None:
        """Go to just after ``mark_delete``: everything after it is unacknowledged and will be delivered as new.

        So are the entries ``but`` before it, by ledger id.
        What is held or awaits redelivery is forgotten; an acknowledgement of it still counts when it comes.
        """
        self.acks.begin(mark_delete, but or {}, self._ledgers)
        self.outstanding.clear()
        self._redeliveries.clear()
        self._order.clear()
        self.read_position = _after(self.acks.mark_delete)

    @_whole
    def trimmed(self, first_ledger_id: int) -> None:
        """The ledgers before ``first_ledger_id`` are gone: forget their messages, and trim ``acks`` likewise."""
        self.acks.trim_to(first_ledger_id, self._ledgers)
        self._forget_through(Position(first_ledger_id, BEFORE_FIRST))

    # -- inside --------------------------------------------------------------------------------

    def _known(self, consumer_id: int) -> None:
        if consumer_id not in self.outstanding:
            raise InvalidArgument("consumer_id", consumer_id, "no such consumer")

    def _give_back(self, consumer_id: int, now_ms: int, *, failed: bool = True) -> int:
        held = self.outstanding.take_all(consumer_id)
        for ledger_id, entries in held.by_ledger().items():
            self._take_back(ledger_id, entries, now_ms, now_ms, failed=failed)
        return len(held)

    def _take_back(self, ledger_id: int, entries: BitMap, at_ms: int, now_ms: int, *, failed: bool = True) -> None:
        """Entries that a consumer held until now are to be handed out again.

        Those that wait for no time are ready at once: they do not wait for a clock that is set back meanwhile.
        """
        if failed:
            self.outstanding.counts.note_failed(ledger_id, entries, now_ms)
        self._order.taken_back(ledger_id, entries)
        if at_ms <= now_ms:
            self._order.fell_due(ledger_id, entries)
        else:
            self._redeliveries.add(ledger_id, entries, at_ms)

    def _bring_due(self, now_ms: int) -> None:
        self.expire(now_ms)
        for ledger_id, entries in self._redeliveries.take_due(now_ms):
            self._order.fell_due(ledger_id, entries)

    def _skip(self, asked: Sequence[Position], found: ReceivedMessages) -> None:
        intact = set(found.positions)
        for ledger_id, entries in group_by_ledger([p for p in asked if p not in intact]).items():
            self._order.forget(ledger_id, entries)

    def _forget_through(self, position: Position, *, moving: bool = True) -> None:
        self.outstanding.forget_through(position)
        self._redeliveries.forget_through(position)
        self._order.forget_through(position)
        if moving:
            self.read_position = max(self.read_position, _after(position))

    def _check(self) -> None:
        """Raise BrokenInvariant unless every message has one place, none is acknowledged and all were read."""
        self.acks._check(self._ledgers)
        self.outstanding._check()
        self._redeliveries._check()
        self._order._check()
        seen: set[Position] = set()
        places = [*self.outstanding.by_consumer().values(), set(self._redeliveries.waiting()), self._order.ready()]
        for place in places:
            if not seen.isdisjoint(place):
                raise BrokenInvariant(f"{min(seen & place)} is in two places")
            seen |= place
        for position in seen:
            if self.acks.is_acked(position):
                raise BrokenInvariant(f"{position} is acknowledged and not forgotten")
            if position >= self.read_position:
                raise BrokenInvariant(f"{position} was handed out before it was read")


def _after(position: Position) -> Position:
    return Position(position.ledger_id, position.entry_id + 1)
