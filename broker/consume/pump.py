"""Consumers, and the pump of one subscription: messages from the engine to them, acknowledgements back.

All that waits for the disk or for a lock of the engine is one job at a time in a worker: acknowledgements, messages
given back, calls (attach, seek, ...), then polls. What comes meanwhile is the next job. So the loop's thread never
waits, the engine's locks are not contended, and a busy subscription has few large jobs where an idle one has many small
ones.

A job polls for consumers with permits, the lowest priority_level first and those of one level in turn, some entries at
a time. Wake-ups of the engine are coalesced: one is pending at most.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ...delivery.key_slots import KeyShared
from ...store.errors import BrokenInvariant, ClockJumped, DuelogError, InvalidArgument, NotLeader, StoreFull
from ...store.listener import call_supplied
from ...store.position import MessageId
from ...store.received_messages import ReceivedMessages
from ...subscription import Subscription
from ..protocol.commands import Subscribe, SubscriptionType
from ..protocol.frames import MessageHeads
from ..protocol.loop_calls import LoopCalls, Timer, Workers
from ..protocol.peer import Peer

_log = logging.getLogger("duelog.broker")

TURN_ENTRIES = 20
"""Entries that a consumer is polled before the next one is."""

_RETRY_S = 1.0
"""Seconds until a subscription that the store cannot deliver from is tried again."""

T = TypeVar("T")

INDIVIDUAL = frozenset({SubscriptionType.SHARED, SubscriptionType.KEY_SHARED})
"""Types of which messages are acknowledged one by one: what a consumer holds of them is counted, and bounded."""

_LOOPING = ("Pulsar-CPP", "Pulsar-Java")
"""Clients that rely on Pulsar's counting nothing for the other types.

With a dead-letter policy of n redeliveries, 1 or more, they keep from the program what was redelivered more often, and
ask for it again at once, for ever: they send to a dead-letter topic for the types above only.
"""

_ANY = 1 << 31


@dataclass(slots=True)
class Dispatched:
    """Counted since the start: messages and bytes sent, messages of them sent again, acknowledgements taken."""

    messages: int = 0
    bytes: int = 0
    redelivered: int = 0
    acked: int = 0

    def add(self, other: "Dispatched") -> None:
        self.messages += other.messages
        self.bytes += other.bytes
        self.redelivered += other.redelivered
        self.acked += other.acked


class Consumer:
    """One consumer. Runs on the event loop's thread; `engine` is for workers."""

    __slots__ = (
        "active", "blocked", "command", "consumer_id", "engine", "epoch", "figures", "generation", "heads", "held",
        "most_redelivered", "name", "opened_at", "peer", "permits", "priority", "sharing", "state", "surplus", "type",
        "unacked", "waits_for_peer",
    )  # fmt: skip

    def __init__(self, peer: Peer, command: Subscribe, name: str, opened_at: float) -> None:
        self.peer = peer
        self.command = command
        self.consumer_id = command.consumer_id
        self.name = name
        self.type = command.type
        self.most_redelivered = 1 if self.type not in INDIVIDUAL and peer.client_version.startswith(_LOOPING) else _ANY
        """The largest count of earlier deliveries that the client is told."""
        self.priority = command.priority_level
        self.sharing = KeyShared()
        """Its share of the keys, as the client asked for it."""
        self.epoch = command.epoch
        """The consumer's epoch, which a client raises to have everything sent again; None: it has none."""
        self.state = "opening"
        """"opening", "ready", then "closed"."""
        self.active: bool | None = None
        """True if the consumer is the served one of a Failover subscription; None for other types."""
        self.engine: Subscription | None = None
        self.heads: MessageHeads | None = None
        self.opened_at = opened_at

        self.permits = 0
        """Messages that it may be sent; below zero by a part of a batch."""
        self.blocked = False
        """True while nothing is sent as too many messages are unacknowledged."""
        self.waits_for_peer = False
        self.held: dict[int, int] = {}
        """Unacknowledged messages of shared types, by the place of their entry."""
        self.unacked = 0
        """Sum of `held`."""
        self.surplus: deque[tuple[int, memoryview, int, int]] = deque()
        """Handed out by the engine, and not sent for want of permits: at most the entries of a turn.

        Place, blob, messages, and how often it was delivered before, of each.
        """
        self.generation = 0
        """Raised when what is on its way to it is not to be sent."""
        self.figures = Dispatched()
        """Counted since it was opened; a cumulative acknowledgement is one."""

    @property
    def may_be_polled(self) -> bool:
        return self.permits > 0 and not self.blocked and self.state == "ready" and not self.surplus


Answer = Callable[[BaseException | None], object]
"""Called with why an acknowledgement was not taken, or None."""


class Polled(NamedTuple):
    """The result of one poll."""

    consumer: Consumer
    generation: int
    messages: ReceivedMessages


class Plan(NamedTuple):
    """The polls of the next job."""

    turns: list[tuple[Consumer, int, int]]
    """Consumer, its generation, entries at most."""
    entries: int
    """At which the job ends, of all turns together."""


class _Acks:
    """Acknowledgements of one consumer that wait for the next job."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.positions: set[MessageId] = set()
        """Up to which everything is acknowledged."""
        self.answers: list[tuple[Sequence[int | MessageId], Answer]] = []
        """With the places, or the position, that each is about."""


class _Call(NamedTuple):
    work: Callable[[], Any]
    done: Callable[[Any, BaseException | None], object]


class _Job:
    """The work of one worker for a subscription, and its results."""

    def __init__(self) -> None:
        self.acks: dict[Consumer, _Acks] = {}
        self.nacks: dict[Consumer, list[int] | None] = {}
        """Places that are given back; None: all that the consumer holds."""
        self.calls: deque[_Call] = deque()
        self.plan = Plan([], 0)

        self.answers: list[tuple[Answer, BaseException | None]] = []
        self.results: list[tuple[_Call, Any, BaseException | None]] = []
        self.polled: list[Polled] = []
        self.again_ms: int | None = None
        self.error: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self.acks or self.nacks or self.calls or self.plan.turns)

    def run(self, durable: bool) -> None:
        """Do it; a worker calls. Whatever raises, each acknowledgement has an answer, and each call a result."""
        for consumer, acks in self.acks.items():
            self._acknowledge(consumer, acks, durable)
        for consumer, places in self.nacks.items():
            self._give_back(consumer, places)
        for call in self.calls:
            try:
                self.results.append((call, call.work(), None))
            except BaseException as error:
                self.results.append((call, None, error))
        try:
            self._poll()
        except Exception as error:
            self.error = self.error or error

    def _acknowledge(self, consumer: Consumer, acks: _Acks, durable: bool) -> None:
        engine = consumer.engine
        failed: dict[int | MessageId, Exception] = {}
        error: BaseException | None = None
        if engine is not None:
            try:
                _take(engine, acks, failed)
                if durable:
                    engine.ack((), durable=True)  # all that was taken: nothing is answered before it is on disk
            except BaseException as wrong:
                error = wrong
                if not isinstance(wrong, DuelogError):
                    _log.exception("acknowledgements of consumer %s failed", consumer.name)
        for places, answer in acks.answers:
            self.answers.append((answer, error or next((failed[each] for each in places if each in failed), None)))

    def _give_back(self, consumer: Consumer, places: list[int] | None) -> None:
        engine = consumer.engine
        try:
            if engine is None:
                return
            if places is None:
                engine.nack_all()
            else:
                engine.nack(_ids(places), delay=0)
        except DuelogError:
            _log.debug("consumer %s: what it gave back is not held any more", consumer.name, exc_info=True)
        except BaseException as error:
            _log.exception("messages of consumer %s are not given back", consumer.name)
            self.error = BrokenInvariant(f"giving messages back raised {error!r}")

    def _poll(self) -> None:
        empty: set[Consumer] = set()
        left = self.plan.entries
        for consumer, generation, most in self.plan.turns:
            if consumer in empty or consumer.engine is None:
                continue
            messages, again_ms = consumer.engine.poll_columns(min(most, left))
            if messages:
                self.polled.append(Polled(consumer, generation, messages))
                left -= len(messages)
                if left <= 0:
                    return
                continue
            if again_ms is not None:
                self.again_ms = again_ms if self.again_ms is None else min(self.again_ms, again_ms)
            if consumer.engine.hands_alike:
                return
            empty.add(consumer)


@dataclass(eq=False)
class Pump:
    """The pump of one subscription. Runs on the event loop's thread, but for `wake`.

    clock: the store's, in ms. plan: what the next job polls. failed: called when the store has failed. durable_acks:
    acknowledgements are answered once they are on disk.
    """

    _calls: LoopCalls
    _workers: Workers
    _clock: Callable[[], int]
    _plan: Callable[[], Plan]
    _deliver: Callable[[Polled], object]
    _failed: Callable[[Exception], object]
    durable_acks: bool

    def __post_init__(self) -> None:
        self._next = _Job()
        self._running = self._look_again = self._woken = False
        self._stopped = False
        """True while nothing is polled until the timer fires."""
        self._timer: Timer | None = None
        self.closed = False

    # -- asking for work -----------------------------------------------------------------------------

    def wake(self) -> None:
        """The engine may have something; from any thread, takes no lock."""
        if not self._woken:
            self._woken = True
            self._calls.post(self._wake)

    def _wake(self) -> None:
        self._woken = False
        self.turn()

    def ack(self, consumer: Consumer, places: Sequence[int], answer: Answer | None) -> int:
        """Acknowledge entries; how many of this consumer wait for a worker now."""
        acks = self._acks_of(consumer)
        acks.places.extend(places)
        if answer is not None:
            acks.answers.append((places, answer))
        self.turn()
        return len(acks.places)

    def ack_through(self, consumer: Consumer, position: MessageId, answer: Answer | None) -> None:
        acks = self._acks_of(consumer)
        acks.positions.add(position)
        if answer is not None:
            acks.answers.append(((position,), answer))
        self.turn()

    def _acks_of(self, consumer: Consumer) -> _Acks:
        acks = self._next.acks.get(consumer)
        if acks is None:
            acks = self._next.acks[consumer] = _Acks()
        return acks

    def drop_acks(self) -> None:
        """Answer the acknowledgements that wait, and apply none of them.

        REQUIRES: the subscription has moved in the job that just ended, so that they are of the place before.
        """
        waiting, self._next.acks = self._next.acks, {}
        for acks in waiting.values():
            for _, answer in acks.answers:
                call_supplied(answer, None)

    def give_back(self, consumer: Consumer, places: list[int] | None) -> None:
        """Have entries that a consumer holds delivered again; None: all of them."""
        waiting = self._next.nacks.get(consumer, [])
        self._next.nacks[consumer] = None if places is None or waiting is None else waiting + places
        self.turn()

    def call(
        self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], object] = lambda *_: None
    ) -> None:
        """Have a worker call the engine, after what was asked for before; `done` hears of it."""
        self._next.calls.append(_Call(work, done))
        self.turn()

    async def run(self, work: Callable[[], T], then: Callable[[T], object] | None = None) -> T:
        """Have a worker call the engine, and wait for what it returns.

        then: called with it before the next job begins, also where nobody waits any more.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if error is None and then is not None:
                try:
                    then(result)
                except BaseException as wrong:
                    error = wrong
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call(work, done)
        return await future

    # -- working -------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Begin the next job, if there is work and none is under way."""
        if self._running:
            self._look_again = True
            return
        job = self._next
        if not self.closed and not self._stopped:
            job.plan = self._plan()
        if not job:
            return
        self._next = _Job()
        self._running, self._look_again = True, False
        if job.plan.turns and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._workers.start(lambda: self._work(job))

    def _work(self, job: _Job) -> None:
        try:
            job.run(self.durable_acks)
        except BaseException as error:
            job.error = BrokenInvariant(f"a job of a subscription raised {error!r}")
        self._calls.post(lambda: self._finish(job))

    def _finish(self, job: _Job) -> None:
        """Hand on what the job brought; the next one begins after all of it.

        Whatever raises, every answer and every call hears. Messages whose delivery raised are still held for their
        consumer: its subscription is closed, and clients that subscribe again get them.
        """
        for polled in job.polled:
            try:
                self._deliver(polled)
            except BaseException as error:
                _log.exception("delivery to consumer %s failed", polled.consumer.name)
                polled.consumer.generation += 1  # nothing after a gap: it may acknowledge all up to there
                job.error = BrokenInvariant(f"delivery raised {error!r}")
        for answer, refusal in job.answers:
            call_supplied(answer, refusal)
        for call, result, wrong in job.results:
            call_supplied(call.done, result, wrong)
        self._running = False
        failure = job.error
        if failure is not None and not self.closed:
            if isinstance(failure, DuelogError) and not isinstance(failure, StoreFull | ClockJumped | NotLeader):
                self._failed(failure)
            else:
                traceback = None if isinstance(failure, DuelogError) else failure
                _log.warning("delivery stopped, and is tried again: %s", failure, exc_info=traceback)
                self._stopped = True
                self._arm(_RETRY_S)
        elif job.again_ms is not None and not self.closed:
            self._arm(max(job.again_ms - self._clock(), 1) / 1000)
        if self._look_again or job.polled or self._next:
            self.turn()

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._calls.loop.call_later(delay_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._stopped = False
        self.turn()

    def close(self) -> None:
        """Stop polling; work that was asked for is still done."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _take(engine: Subscription, acks: _Acks, failed: dict[int | MessageId, Exception]) -> None:
    """Acknowledge all but what the topic does not have, which is put into `failed`."""
    try:
        if acks.places:
            engine.ack(_ids(acks.places))
    except InvalidArgument:  # nothing was acknowledged
        for place in acks.places:
            try:
                engine.ack(_ids([place]))
            except InvalidArgument as wrong:
                failed[place] = wrong
    for position in sorted(acks.positions, reverse=True):
        try:
            engine.ack_cumulative(position)
            break  # it covers the others
        except InvalidArgument as wrong:
            failed[position] = wrong


def _ids(places: Sequence[int]) -> list[MessageId]:
    return [MessageId(place >> 32, place & 0xFFFFFFFF) for place in places]
