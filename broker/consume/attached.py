"""A subscription with its consumers: which of them is served, what each is sent, what all of them hold.

Each subscription or reader that has consumers has one such object, which runs on the event loop's thread.

Batches of which some messages are acknowledged are kept in memory, until all are. A set has a bit for each message of
a batch that is *not* acknowledged, as 64-bit words on the wire. Acknowledgements cross on their way, so that sets are
joined by AND.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from ...store.errors import CorruptRecord
from ...store.listener import call_supplied
from ...store.received_messages import ReceivedMessages
from ...subscription import Subscription
from ...topic import Topic
from ..configuration import BrokerConfig
from ..protocol import entry
from ..protocol.commands import ActiveConsumerChange, SubscriptionType
from ..protocol.frames import MessageHeads
from ..protocol.loop_calls import LoopCalls, Workers
from .feed import LastEntry
from .pump import INDIVIDUAL, TURN_ENTRIES, Consumer, Dispatched, Plan, Polled, Pump

MOST_BATCHES = 50_000
"""Batches kept for a subscription; of what is over, the oldest is delivered whole when it comes again."""

MOST_WORDS = 1_024
"""Words of a set; a longer one is passed over."""

MOST_KEPT = 1_000
"""Subscriptions without a consumer whose sets are kept; of what is over, the one is forgotten that was left first."""

_WORD = 1 << 64


class BatchAcks:
    """Partly acknowledged batches of one subscription, by place (`ledger_id << 32 | entry_id`)."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        """The set of each. Not to be changed from outside."""

    def take(self, place: int, words: Sequence[int], messages: int | None) -> int:
        """Some messages of a batch are acknowledged; how many are left. messages: of the batch, where that is known."""
        if len(words) > MOST_WORDS:
            return messages or 1
        left = 0
        for at, word in enumerate(words):
            left |= word % _WORD << 64 * at
        if messages is not None:
            left &= (1 << min(messages, 64 * len(words))) - 1  # the size is what a client says
        before = self.left.get(place)
        if before is not None:
            left &= before
        if not left:
            self.left.pop(place, None)
            return 0
        if before is None and len(self.left) >= MOST_BATCHES:
            del self.left[next(iter(self.left))]
        self.left[place] = left
        return left.bit_count()

    def words(self, place: int) -> Sequence[int]:
        """The set of a batch for the wire; empty: nothing of it is acknowledged."""
        left = self.left.get(place)
        if left is None:
            return ()
        words = []
        while left:
            word = left & _WORD - 1
            words.append(word - _WORD if word >> 63 else word)
            left >>= 64
        return words

    def count(self, place: int) -> int | None:
        """Count the unacknowledged messages of a batch; None: nothing of it is acknowledged."""
        found = self.left.get(place)
        return None if found is None else found.bit_count()

    def forget(self, place: int) -> None:
        self.left.pop(place, None)

    def forget_through(self, place: int) -> None:
        """All entries up to this one are acknowledged. O(batches kept)."""
        if self.left:
            self.left = {each: left for each, left in self.left.items() if each > place}

    def clear(self) -> None:
        self.left.clear()


_JOB_ENTRIES = 1_000
_JOB_BYTES = 4 << 20
"""Limit of one poll, in bytes estimated from earlier entries."""

_FAILOVER_NOTICES = 12
"""Protocol version of clients that know ACTIVE_CONSUMER_CHANGE."""


@dataclass(eq=False)
class Attached:
    """A subscription that has consumers, or is getting one.

    partition: of the topic, or -1. name: of the subscription, as stored. clock: the store's, in ms.
    """

    topic: Topic
    partition: int
    name: str
    _config: BrokerConfig
    _calls: LoopCalls
    _workers: Workers
    _clock: Callable[[], int]
    _failed: Callable[["Attached", Exception], object]

    def __post_init__(self) -> None:
        self.durable = True
        self.lock = asyncio.Lock()
        """Held while a consumer comes, or the subscription moves or is deleted."""
        self.opening = 0
        self.consumers: list[Consumer] = []
        """In the order in which they came."""
        self.leaving = 0
        self.waking: Subscription | None = None
        """The consumer of the engine by which the pump is woken."""
        self.active: Consumer | None = None
        """The served consumer of a Failover subscription."""
        self.batches = BatchAcks()
        self.unacked = 0
        self.blocked = False
        self.last: LastEntry | None = None
        """The topic's last entry, as it was found last."""
        self.moving = False
        """True while a seek is under way and nothing is dispatched."""
        self.max_unacked_consumer = self._config.max_unacked_messages_per_consumer
        self.max_unacked = self._config.max_unacked_messages_per_subscription
        self.departed = Dispatched()
        """Figures of closed consumers since the start."""
        self.dispatched: Callable[[ReceivedMessages], object] | None = None
        """Called with the entries sent to a consumer; None: nobody listens."""
        self._entry_messages = 1.0
        self._entry_bytes = 1_024.0
        self._last: Consumer | None = None
        """The consumer that was sent something last; the next one has its turn."""
        fail, durable = partial(self._failed, self), self._config.ack_response_durable
        self.pump = Pump(self._calls, self._workers, self._clock, self._plan, self._deliver, fail, durable)

    @property
    def type(self) -> SubscriptionType | None:
        """The type that its consumers share; None: it has none."""
        return self.consumers[0].type if self.consumers else None

    # -- consumers -----------------------------------------------------------------------------------

    def leave(self, consumer: Consumer) -> None:
        """A consumer is gone: it is sent nothing more, and what it holds is for others."""
        consumer.state = "closed"
        consumer.generation += 1
        self.consumers.remove(consumer)
        self.unacked -= consumer.unacked
        consumer.held, consumer.unacked = {}, 0
        consumer.surplus.clear()
        self.departed.add(consumer.figures)
        if self.active is consumer:
            self.active = None
        self._unblock()

    def choose(self, names: Sequence[str]) -> int:
        """The place of the consumer of a Failover subscription that is served, by the names of those that may be."""
        ranked = sorted(range(len(names)), key=lambda at: names[at])
        return ranked[max(self.partition, 0) % len(names)]

    def active_changed(self, consumer: Consumer, active: bool) -> None:
        """The engine has begun or ceased to serve a consumer of a Failover subscription."""
        if not active:
            consumer.active = False
            consumer.generation += 1
            consumer.surplus.clear()  # the engine has taken it back
            if self.active is consumer:
                self.active = None
            return
        self.active = consumer
        consumer.active = True
        for each in self.consumers:
            each.active = each is consumer
            self.tell_active(each)
        self.pump.turn()

    @staticmethod
    def tell_active(consumer: Consumer) -> None:
        if consumer.active is not None and consumer.peer.protocol_version >= _FAILOVER_NOTICES:
            consumer.peer.send(ActiveConsumerChange(consumer.consumer_id, consumer.active))

    # -- dispatch ------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        """Plan the next polls: for which consumers, and for how many entries."""
        if self.moving or self.blocked:
            return Plan([], 0)
        consumers = self.consumers
        if self.type == SubscriptionType.FAILOVER:
            consumers = [each for each in consumers if each is self.active]
        able = [each for each in consumers if each.may_be_polled and self._can_write(each)]
        if not able:
            return Plan([], 0)
        if self.type == SubscriptionType.SHARED and len(able) > 1:
            top = min(each.priority for each in able)
            able = [each for each in able if each.priority == top]
        if self._last in able:
            following = able.index(self._last) + 1
            able = able[following:] + able[:following]
        most = max(min(_JOB_ENTRIES, int(_JOB_BYTES / self._entry_bytes)), 1)
        wanted = {each: each.permits for each in able}
        if self.type in INDIVIDUAL:
            most = min(most, self._entries(self.max_unacked - self.unacked))
            wanted = {each: min(each.permits, self.max_unacked_consumer - each.unacked) for each in able}
        wanted = {each: self._entries(messages) for each, messages in wanted.items()}
        at_once = most if len(able) == 1 else TURN_ENTRIES
        turns: list[tuple[Consumer, int, int]] = []
        planned = 0
        while wanted and (planned < most or not turns):
            for consumer in list(wanted):  # each has a turn: what one may not have, the next may
                entries = min(wanted[consumer], at_once)
                turns.append((consumer, consumer.generation, entries))
                planned += entries
                wanted[consumer] -= entries
                if not wanted[consumer]:
                    del wanted[consumer]
        return Plan(turns, most)

    def _entries(self, messages: int) -> int:
        return max(int(messages / self._entry_messages), 1)

    def _can_write(self, consumer: Consumer) -> bool:
        if consumer.peer.writable:
            return True
        if not consumer.waits_for_peer and not consumer.peer.closed:
            consumer.waits_for_peer = True

            def writable() -> None:
                consumer.waits_for_peer = False
                self.pump.turn()

            consumer.peer.on_writable(writable)
        return False

    def _deliver(self, polled: Polled) -> None:
        """Send what a poll gave, as far as there are permits."""
        consumer, generation, messages = polled
        if generation != consumer.generation or consumer.state != "ready":
            return  # it is given back, or closed: the engine has it delivered again
        self._last = consumer
        total = sum(map(len, messages.payloads))
        self._entry_bytes += (total / len(messages) - self._entry_bytes) / 4
        before = consumer.figures.messages
        surplus = consumer.surplus
        places = cast(list[int], messages.places)  # ids of entries are numbers of 32 bits
        for place, payload, count in zip(places, messages.payloads, messages.redelivery_counts, strict=True):
            try:
                size = entry.unpack(payload).messages
                blob = memoryview(payload)[entry.HEADER_BYTES :]
            except CorruptRecord:  # a program sent it, not a client
                size, blob = 1, memoryview(_blob_of(messages, place))
            if consumer.permits > 0 and not surplus:
                self._send(consumer, place, blob, size, count)
            else:
                surplus.append((place, blob, size, count))
        if self.dispatched is not None:
            call_supplied(self.dispatched, messages)
        sent = len(messages) - len(surplus)
        if sent:
            self._entry_messages += ((consumer.figures.messages - before) / sent - self._entry_messages) / 4
        consumer.blocked = consumer.blocked or consumer.unacked >= self.max_unacked_consumer
        self.blocked = self.blocked or self.unacked >= self.max_unacked

    def send_surplus(self, consumer: Consumer) -> None:
        """There are permits: send what the consumer has not been sent for want of them."""
        surplus = consumer.surplus
        while surplus and consumer.permits > 0:
            self._send(consumer, *surplus.popleft())

    def _send(self, consumer: Consumer, place: int, blob: memoryview, messages: int, count: int) -> None:
        """count: how often it was delivered before."""
        ack_set: Sequence[int] = ()
        left = messages
        if self.batches.left:
            ack_set = self.batches.words(place)
            left = self.batches.count(place) or messages
        heads = consumer.heads
        if heads is None:
            heads = consumer.heads = MessageHeads(consumer.consumer_id, self.partition)
        size = len(blob)
        told = min(count, consumer.most_redelivered)
        head = heads.head(place >> 32, place & 0xFFFFFFFF, told, ack_set, consumer.epoch, size)
        consumer.peer.send_frames(head, blob)
        consumer.permits -= messages
        figures = consumer.figures
        figures.messages += messages
        figures.bytes += size
        if count:
            figures.redelivered += messages
            self._forget_held(place)  # the store took it back from a consumer that held it too long
        if consumer.type in INDIVIDUAL:
            consumer.held[place] = left
            consumer.unacked += left
            self.unacked += left

    # -- unacknowledged ------------------------------------------------------------------------------

    def done_with(self, consumer: Consumer, place: int, left: int = 0) -> None:
        """Note that `left` messages of an entry are unacknowledged, whichever consumer holds it."""
        owner = consumer if place in consumer.held else next((c for c in self.consumers if place in c.held), None)
        if owner is None:
            return
        self._let_go(owner, place, left)
        if owner.blocked or self.blocked:
            self._unblock()

    def _forget_held(self, place: int) -> None:
        for each in self.consumers:
            if place in each.held:
                self._let_go(each, place)
                self._lift_limits()  # the next turn comes when all of this one is delivered

    def _let_go(self, consumer: Consumer, place: int, left: int = 0) -> None:
        """Count an entry that a consumer holds as acknowledged but for `left` messages."""
        change = consumer.held.pop(place) - left
        if left:
            consumer.held[place] = left
        consumer.unacked -= change
        self.unacked -= change

    def release(self, consumer: Consumer, places: Sequence[int] | None) -> list[int] | None:
        """Forget entries that a consumer gives back, None: all; those that it held."""
        if places is None:
            consumer.generation += 1
            consumer.surplus.clear()
            self.unacked -= consumer.unacked
            consumer.held, consumer.unacked = {}, 0
            released = None
        else:
            released = [place for place in dict.fromkeys(places) if place in consumer.held]
            for place in released:
                self._let_go(consumer, place)
        self._unblock()
        return released

    def _unblock(self) -> None:
        if self._lift_limits():
            self.pump.turn()

    def _lift_limits(self) -> bool:
        """Go on with what has come down to half of its limit; whether there was any."""
        again = False
        if self.blocked and self.unacked <= self.max_unacked // 2:
            self.blocked, again = False, True
        for each in self.consumers:
            if each.blocked and each.unacked <= self.max_unacked_consumer // 2:
                each.blocked, again = False, True
        return again


def _blob_of(messages: ReceivedMessages, place: int) -> bytes:
    message = messages[messages.places.index(place)]
    return entry.blob_of_program(
        message.payload, message.key, message.properties, message.publish_ms, message.message_id.entry_id
    )
