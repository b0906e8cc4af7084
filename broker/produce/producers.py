"""PRODUCER, SEND and CLOSE_PRODUCER: the producers of every connection, by topic.

Owns who is admitted, the names that the broker makes, and what a connection is told of a closed producer. A
producer is opened in three steps: the topic is made ready in a thread; then, topic by topic, one at a time, it is
admitted or has to wait; then it is answered. What happens meanwhile (CLOSE, a lost connection) is looked at after each.

Who may produce beside whom is `ProducerAccess`, a state machine of one topic without input or output. An exclusive
producer has a topic epoch, which rises whenever another becomes the exclusive one; one that comes back with a lower
epoch was fenced meanwhile. Source of the rules: Apache Pulsar, AbstractTopic.addProducer, and PIP-68.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...store.errors import DuelogError
from ...topic import Topic
from ..configuration import BrokerConfig
from ..lookup.topic_address import stored_name
from ..lookup.topic_facts import TopicFacts
from ..protocol import commands
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.loop_calls import LoopCalls, Workers
from ..protocol.peer import Peer
from .sends import Figures, OpenProducer, SendingPeer, Sends

_log = logging.getLogger("duelog.broker")

MAX_EPOCH = 1 << 48
"""No producer has had a higher one; a client that says so would end the epochs that there are."""


class Admission(NamedTuple):
    """The outcome of asking for a place among the producers."""

    admitted: bool
    """False: it waits for its turn."""
    new_epoch: int | None
    """The topic's epoch to be recorded before the producer hears that it is admitted; None: it stays."""
    fenced: list[OpenProducer]
    """Producers that are to be closed."""


class ProducerAccess:
    """The producers of one topic, and those that wait to be the only one."""

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch
        """None: no producer was ever exclusive."""
        self.members: set[OpenProducer] = set()
        self.exclusive: OpenProducer | None = None
        self._waiting: deque[tuple[OpenProducer, int | None]] = deque()

    def admit(self, producer: OpenProducer, mode: commands.AccessMode, epoch: int | None) -> Admission:
        """Admit a producer, or have it wait; `epoch` is what it had when it was exclusive before. Raises Refused."""
        taken = bool(self.members or self._waiting)
        if mode == commands.AccessMode.SHARED:
            if self.exclusive is not None or self._waiting:
                raise Refused(ServerError.PRODUCER_BUSY, "the topic has an exclusive producer, or one that waits")
            self.members.add(producer)
            return Admission(admitted=True, new_epoch=None, fenced=[])
        self._check_epoch(epoch)
        if mode == commands.AccessMode.EXCLUSIVE and taken:
            raise Refused(ServerError.PRODUCER_FENCED, "the topic has producers already")
        if mode == commands.AccessMode.WAIT_FOR_EXCLUSIVE and taken:
            self._waiting.append((producer, epoch))
            return Admission(admitted=False, new_epoch=None, fenced=[])
        fenced = [*self.members, *(each for each, _ in self._waiting)]
        self.members.clear()
        self._waiting.clear()
        return Admission(admitted=True, new_epoch=self._make_exclusive(producer, epoch), fenced=fenced)

    def leave(self, producer: OpenProducer) -> tuple[OpenProducer | None, int | None, list[OpenProducer]]:
        """Remove a producer: (the one whose turn it is now or None, the epoch to be recorded, those that are fenced).

        A producer that was removed before changes nothing.
        """
        self._waiting = deque(each for each in self._waiting if each[0] is not producer)
        self.members.discard(producer)
        if self.exclusive is producer:
            self.exclusive = None
        fenced: list[OpenProducer] = []
        while self._waiting and not self.members:
            following, epoch = self._waiting.popleft()
            try:
                self._check_epoch(epoch)
            except Refused:
                fenced.append(following)
                continue
            return following, self._make_exclusive(following, epoch), fenced
        return None, None, fenced

    def _check_epoch(self, epoch: int | None) -> None:
        if epoch is not None and epoch > MAX_EPOCH:
            raise Refused(ServerError.NOT_ALLOWED, f"no topic has had epoch {epoch}")
        if epoch is not None and self.epoch is not None and epoch < self.epoch:
            raise Refused(ServerError.PRODUCER_FENCED, f"the topic's epoch is {self.epoch}, the producer's {epoch}")

    def _make_exclusive(self, producer: OpenProducer, epoch: int | None) -> int:
        self.members.add(producer)
        self.exclusive = producer
        if epoch is None:
            epoch = 0 if self.epoch is None else self.epoch + 1
        self.epoch = epoch
        return epoch


_ALIVE_S = 5.0
"""Seconds in which the connection of a producer must answer a PING when another wants its name."""

OpenTopic = Callable[[Peer, str], Awaitable[tuple["Topic", int]]]
"""A peer may produce to a topic: the topic, made where policies allow it, and its partition or -1. Raises Refused."""


class _Producing:
    """The producers of one topic."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held while a producer is admitted, until its epoch is on disk."""
        self.access: ProducerAccess | None = None
        self.by_name: dict[str, OpenProducer] = {}
        self.opening = 0


@dataclass(eq=False)
class Producers:
    """All producers. Of the event loop's thread. clock: the store's, in ms."""

    _open_topic: OpenTopic
    _facts: TopicFacts
    _workers: Workers
    _calls: LoopCalls
    _clock: Callable[[], int]
    _config: BrokerConfig

    def __post_init__(self) -> None:
        self._most = self._config.max_producers_per_connection
        self._keep_alive_s = self._config.keep_alive_interval_seconds
        self.sends = Sends(self._calls, self._config, self._clock)
        self.sends.on_failed = self._close
        self._time = self._calls.loop.time
        self._connections: dict[int, SendingPeer] = {}
        self._topics: dict[str, _Producing] = {}
        self.departed: dict[str, Figures] = {}
        """Figures of closed producers, by topic; every topic that has had a producer is in it."""
        self._names = f"duelog-{secrets.token_hex(4)}"
        self._named = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- commands ------------------------------------------------------------------------------------

    async def open(self, peer: Peer, command: commands.Producer) -> None:
        if peer.closed:
            return
        connection = self._connections.setdefault(peer.number, SendingPeer(peer))
        known = connection.producers.get(command.producer_id)
        if known is not None:
            if known.state == "opening" or known.success is None:
                message = f"producer {command.producer_id} is being opened"
                peer.send(commands.Error(command.request_id, ServerError.SERVICE_NOT_READY, message))
            else:
                peer.send(replace(known.success, request_id=command.request_id, ready=known.state == "ready"))
            return
        if len(connection.producers) >= self._most:
            message = f"the connection has {len(connection.producers)} producers"
            peer.send(commands.Error(command.request_id, ServerError.NOT_ALLOWED, message))
            return
        producer = OpenProducer(connection, command)
        connection.producers[command.producer_id] = producer
        try:
            await self._open(producer)
        except (Refused, DuelogError) as error:
            self._answer_failed(producer, error)
        except BaseException:
            self._answer_failed(producer, Refused(ServerError.UNKNOWN, "the producer could not be opened"))
            raise

    def send(self, peer: Peer, command: commands.Send, blob: memoryview) -> None:
        connection = self._connections.get(peer.number)
        if connection is not None:
            producer = connection.producers.get(command.producer_id)
            if producer is not None and producer.state == "ready":
                self.sends.send(producer, command, blob)
                return
            closed_at = connection.closed.get(command.producer_id)
            if closed_at is not None and self._time() - closed_at < self._keep_alive_s:
                return
        peer.close(f"SEND for producer {command.producer_id}, which is not open")

    def close(self, peer: Peer, command: commands.CloseProducer) -> None:
        """CLOSE_PRODUCER; answered once its SENDs are. One that is not open is closed already."""
        producer = self._connections.get(peer.number, SendingPeer(peer)).producers.get(command.producer_id)

        def closed() -> None:
            if producer is not None:
                self._remove(producer)
            peer.send(commands.Success(command.request_id))

        if producer is not None and producer.state == "ready" and producer.replies:
            producer.on_answered = closed
        else:
            closed()

    def gone(self, peer: Peer) -> None:
        connection = self._connections.pop(peer.number, None)
        if connection is not None:
            for producer in list(connection.producers.values()):
                self._remove(producer)

    # -- from elsewhere ------------------------------------------------------------------------------

    def close_topic(self, topic: str) -> None:
        """Close every producer of a topic, by its full name: clients reopen them."""
        producing = self._topics.get(topic)
        for producer in list(producing.by_name.values()) if producing is not None else ():
            self._close(producer)

    def close_all(self) -> None:
        for topic in list(self._topics):
            self.close_topic(topic)

    async def answered(self) -> None:
        while self.unanswered:
            await asyncio.sleep(0.005)

    def of_connection(self, number: int) -> list[OpenProducer]:
        """Producers of a connection, those that are not ready among them."""
        found = self._connections.get(number)
        return [] if found is None else list(found.producers.values())

    def of_topic(self, topic: str) -> list[OpenProducer]:
        producing = self._topics.get(topic)
        return [] if producing is None else [each for each in producing.by_name.values() if each.state == "ready"]

    @property
    def unanswered(self) -> int:
        return sum(each.unanswered for each in self._connections.values())

    @property
    def count(self) -> int:
        return sum(len(each.producers) for each in self._connections.values())

    # -- opening -------------------------------------------------------------------------------------

    async def _open(self, producer: OpenProducer) -> None:
        command, peer = producer.command, producer.connection.peer
        topic, partition = await self._open_topic(peer, command.topic)
        name = command.producer_name
        if not name:
            self._named += 1
            name = f"{self._names}-{self._named}"
        producing = self._topics.setdefault(topic.name, _Producing())
        self.departed.setdefault(topic.name, Figures())
        producing.opening += 1
        try:
            numbered, last, version = await self._workers(lambda: self._prepare(topic, name, command))
            producer.open(name, topic, partition, numbered=numbered)
            async with producing.lock:
                if producing.access is None:
                    epoch = await self._workers(lambda: self._facts.epoch(topic.name))
                    producing.access = ProducerAccess(epoch)
                await self._take_over(producing, producer)
                if producer.state == "closed" or peer.closed:
                    return
                producer.success = commands.ProducerSuccess(command.request_id, name, last, version)
                admission = producing.access.admit(producer, command.access_mode, command.topic_epoch)
                producing.by_name[name] = producer
                for each in admission.fenced:
                    self._fence(each)
                if not admission.admitted:
                    producer.state = "waiting"
                    peer.send(commands.ProducerSuccess(command.request_id, name, last, version, ready=False))
                    return
                await self._admitted(producing, producer, admission.new_epoch)
        finally:
            producing.opening -= 1
            self._drop_unused(topic.name)

    def _prepare(self, topic: Topic, name: str, command: commands.Producer) -> tuple[bool, int, bytes | None]:
        """(whether it is numbered, its last number, its schema's version). A worker calls.

        Raises StoreFailed where nothing can be stored any more: creating it again is what tells. QuotaExceeded: it was
        closed for that, and the topic is still full.
        """
        topic.create()
        if (topic.name, name) in self.sends.over_quota:
            topic.sender.check_place()
            self.sends.over_quota.pop((topic.name, name), None)
        version = None if command.schema is None else self._facts.schema_version(topic.name, command.schema)
        initial = command.initial_subscription
        if initial and initial not in topic.subscriptions():
            topic.subscribe(initial, type="shared", initial_position="earliest").close()
        if not self._facts.deduplicates(topic.name):
            return False, -1, version
        return True, topic.producer(stored_name(name)).last_sequence_id, version

    async def _take_over(self, producing: _Producing, producer: OpenProducer) -> None:
        """Close another producer of the same name, if it is an earlier one or its connection is dead."""
        while (known := producing.by_name.get(producer.name)) is not None:
            other = known.connection.peer
            if producer.epoch <= known.epoch:
                same = other.number == producer.connection.peer.number
                if same or (not other.closed and await other.ping(_ALIVE_S)):
                    raise Refused(ServerError.PRODUCER_BUSY, f"producer {producer.name} is connected already")
                other.close("the connection does not answer")
            if known.state != "closed":
                self._close(known)

    async def _admitted(self, producing: _Producing, producer: OpenProducer, epoch: int | None) -> None:
        """Record the topic's epoch and answer. REQUIRES: the topic's lock."""
        if epoch is not None:
            await self._workers(lambda: self._facts.set_epoch(producer.topic_name, epoch))
        success = producer.success
        if producer.state == "closed" or success is None:
            return
        success.topic_epoch = None if producing.access is None else producing.access.epoch
        producer.state = "ready"
        producer.connection.closed.pop(producer.producer_id, None)
        producer.connection.peer.send(success)

    def _answer_failed(self, producer: OpenProducer, error: Exception) -> None:
        if producer.state != "closed":
            peer = producer.connection.peer
            self._remove(producer)
            peer.send(commands.Error(producer.command.request_id, server_error(error), str(error)))

    # -- closing -------------------------------------------------------------------------------------

    def _close(self, producer: OpenProducer) -> None:
        if producer.state == "waiting":
            self._fence(producer)
        elif producer.state == "ready":
            connection = producer.connection
            now = self._time()
            if len(connection.closed) >= self._most:
                connection.closed = {
                    number: at for number, at in connection.closed.items() if now - at < self._keep_alive_s
                }
            connection.closed[producer.producer_id] = now
            self._remove(producer)
            connection.peer.send(commands.CloseProducer(producer.producer_id, commands.NO_REQUEST))

    def _fence(self, producer: OpenProducer) -> None:
        """Another is the exclusive producer now, or the topic is closed: end one that is ready, waits or is opening."""
        if producer.state == "ready":
            self._close(producer)
        elif producer.state != "closed":
            self._answer_failed(producer, Refused(ServerError.PRODUCER_FENCED, "another producer is the exclusive one"))

    def _remove(self, producer: OpenProducer) -> None:
        """Forget a producer; the next may have its turn."""
        if producer.state == "closed":
            return
        opened, producer.state = producer.state != "opening", "closed"
        connection = producer.connection
        if connection.producers.get(producer.producer_id) is producer:
            del connection.producers[producer.producer_id]
        if producer.success is None and not opened:
            return  # its topic is not known yet
        self.sends.forget(producer)
        topic = producer.topic_name
        self.departed.setdefault(topic, Figures()).add(producer.figures)
        producing = self._topics.get(topic)
        if producing is None or producing.access is None:
            return
        if producing.by_name.get(producer.name) is producer:
            del producing.by_name[producer.name]
        following, epoch, fenced = producing.access.leave(producer)
        for each in fenced:
            self._fence(each)
        if following is not None:
            self._start(self._promote(producing, following, epoch))
        self._drop_unused(topic)

    async def _promote(self, producing: _Producing, producer: OpenProducer, epoch: int | None) -> None:
        """It is its turn: the second PRODUCER_SUCCESS."""
        async with producing.lock:
            try:
                await self._admitted(producing, producer, epoch)
            except DuelogError as error:
                self._answer_failed(producer, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drop_unused(self, topic: str) -> None:
        producing = self._topics.get(topic)
        if producing is not None and not producing.opening and not producing.by_name and not producing.lock.locked():
            del self._topics[topic]
