"""From SEND to the engine and back to SEND_RECEIPT: checks, refusals, back-pressure, answers in order.

All of it belongs to the event loop's thread, but for `_heard`, by which the engine's thread tells what became of a
group of messages: one hop to the loop for all of them.

A connection is not read while it has many SENDs unanswered, nor while the engine has no capacity. What of it was read
already waits in order, bounded by what a connection reads at once; nothing is dropped, and no other connection waits.

Answers leave in the order of the SENDs, as a client takes one before its turn for a broken connection. The engine
finishes messages of several time partitions in any order, and refuses a delay at once.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from ...sending.outbox import Duplicate
from ...store.errors import (
    ClosedError,
    DelayTooLong,
    Deposed,
    DuelogError,
    InvalidArgument,
    NotLeader,
    QuotaExceeded,
    StoreFailed,
)
from ...store.position import MessageId
from ...topic import Topic
from ..configuration import BrokerConfig
from ..lookup.topic_address import stored_name
from ..protocol import entry
from ..protocol.commands import MessageIdData, Producer, ProducerSuccess, Send, SendError, SendReceipt
from ..protocol.entry import decode_metadata
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.fields import ProtocolError
from ..protocol.frames import ReceiptFrames, checksum_matches, head, metadata_of
from ..protocol.loop_calls import LoopCalls
from ..protocol.peer import Peer

_log = logging.getLogger("duelog.broker")

Outcome: TypeAlias = MessageId | Duplicate | Exception

_NO_ID = 2**64 - 1
_SENT_AGAIN = StoreFailed, ClosedError, NotLeader, Deposed
"""Errors after which a client opens its producer again, here or where another leads, and sends what has no answer."""

_MOST_MESSAGES = 2**32 - 1
_MOST_OVER_QUOTA = 10_000
_RETRY_S = 0.01
"""Seconds until the engine is asked again after it had no capacity, if it reports no message before."""


@dataclass(slots=True)
class Figures:
    """Counted since the start. messages, entries, bytes: of what the engine has taken."""

    messages: int = 0
    entries: int = 0
    bytes: int = 0
    refused: int = 0
    duplicates: int = 0
    last_s: float = 0.0
    """When the last message came that is stored, by the clock of `time.monotonic`; 0: none."""

    def add(self, other: "Figures") -> None:
        self.messages += other.messages
        self.entries += other.entries
        self.bytes += other.bytes
        self.refused += other.refused
        self.duplicates += other.duplicates
        self.last_s = max(self.last_s, other.last_s)


class OpenProducer:
    """A producer of a connection; `open` completes it once its topic is ready."""

    __slots__ = (
        "command", "connection", "epoch", "figures", "frames", "name", "numbered", "on_answered", "opened_at",
        "partition", "producer_id", "replies", "state", "stored_name", "success", "topic", "topic_name",
    )  # fmt: skip

    def __init__(self, connection: "SendingPeer", command: Producer) -> None:
        self.connection = connection
        self.command = command
        self.producer_id = command.producer_id
        self.epoch = command.epoch
        self.topic_name = command.topic
        self.state = "opening"
        """"opening", "waiting" for its turn or "ready", then "closed"."""
        self.success: ProducerSuccess | None = None

    def open(self, name: str, topic: Topic, partition: int, *, numbered: bool) -> None:
        """numbered: what it sends is stored once however often it comes."""
        self.frames = ReceiptFrames(self.producer_id, partition)
        self.name = name
        self.stored_name = stored_name(name)
        self.topic = topic
        self.topic_name = topic.name
        self.partition = partition
        self.numbered = numbered
        self.opened_at = monotonic()
        self.replies: deque[Reply] = deque()
        """Replies that have not left, in the order of the SENDs; bounded by what its connection may have unanswered."""
        self.on_answered: Callable[[], object] | None = None
        """Called once all replies have left; it is to be closed then."""
        self.figures = Figures()


@dataclass(slots=True, eq=False)
class Reply:
    """The answer to one SEND."""

    producer: OpenProducer
    sequence_id: int
    highest_sequence_id: int
    came_s: float = 0.0
    """When the SEND came, by a clock that never goes back."""
    outcome: Outcome | None = None
    """None: not known yet."""


class SendingPeer:
    """A connection that has or had producers."""

    __slots__ = ("blocked", "closed", "full", "peer", "producers", "unanswered")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.producers: dict[int, OpenProducer] = {}
        self.closed: dict[int, float] = {}
        """Times at which the broker closed producers, by number, while the client may not know it yet."""
        self.unanswered = 0
        self.full = False
        """True while the connection is not read as it has too many unanswered SENDs."""
        self.blocked: deque[tuple[Reply, _Entry]] = deque()
        """Entries read and not yet accepted by the engine."""


class _Entry(NamedTuple):
    payload: bytes
    deliver_at: int | None
    key: str | None
    numbers: tuple[str, int, int] | None
    messages: int


class Sends:
    """SENDs of all producers. Runs on the event loop's thread."""

    def __init__(self, calls: LoopCalls, config: BrokerConfig, clock: Callable[[], int]) -> None:
        """clock: the store's, in ms."""
        self._calls = calls
        self._clamp_delays = config.delay_rejection == "clamp"
        self._max_unanswered = config.max_pending_publish_requests_per_connection
        self._clock = clock
        self._results: deque[Sequence[tuple[Any, Outcome]]] = deque()
        self._blocked: dict[SendingPeer, None] = {}
        self._retrying = False
        self.errors: Counter[ServerError] = Counter()
        """SENDs refused since the start, by error."""
        self.received: Callable[[OpenProducer, list[float]], object] | None = None
        """Called with the times (`time.monotonic`) at which SENDs came, as their receipts leave; a group at a time."""
        self.on_failed: Callable[[OpenProducer], object] = lambda _: None
        """The store of a producer takes nothing more: it is to be closed."""
        self.over_quota: dict[tuple[str, str], None] = {}
        """Producers, by topic and name, that were closed for a full quota: not to be opened while it is full."""
        self._done = self._heard  # one object, by which the engine knows what is heard together

    @property
    def blocked_entries(self) -> int:
        return sum(len(each.blocked) for each in self._blocked)

    # -- in ------------------------------------------------------------------------------------------

    def send(self, producer: OpenProducer, command: Send, blob: memoryview) -> None:
        connection = producer.connection
        reply = Reply(producer, command.sequence_id, command.highest_sequence_id, monotonic())
        producer.replies.append(reply)
        connection.unanswered += 1
        if connection.unanswered >= self._max_unanswered and not connection.full:
            connection.full = True
            connection.peer.pause_reading("unanswered")
        try:
            item = self._checked(producer, command, blob)
        except Refused as refused:
            self._answer(reply, refused)
            return
        if connection.blocked or not self._put(reply, item):
            self._block(connection, reply, item)

    def _checked(self, producer: OpenProducer, command: Send, blob: memoryview) -> _Entry:
        if command.txn_least is not None or command.txn_most is not None:
            raise Refused(ServerError.NOT_ALLOWED, "transactions are not offered")
        if not checksum_matches(blob):
            raise Refused(ServerError.CHECKSUM, "the checksum does not match")
        try:
            metadata = decode_metadata(metadata_of(blob))
        except ProtocolError as error:
            raise self._refusal(producer, str(error)) from error
        batch = metadata.num_messages_in_batch
        messages = command.num_messages if batch is None else batch
        if not 1 <= messages <= _MOST_MESSAGES:
            raise self._refusal(producer, f"{messages} messages in a batch")
        header = entry.header_for(metadata, messages, is_batch=batch is not None, is_chunk=command.is_chunk)
        deliver_at = metadata.deliver_at_time
        if deliver_at is not None and deliver_at <= self._clock():
            deliver_at = None
        numbers = None
        if producer.numbered and not command.is_chunk:  # chunks of a message have one number
            first = command.sequence_id
            numbers = (producer.stored_name, first, max(first, command.highest_sequence_id))
        return _Entry(entry.pack(header, blob), deliver_at, entry.key_of(metadata), numbers, messages)

    @staticmethod
    def _refusal(producer: OpenProducer, message: str) -> Refused:
        """A refusal of one message, in the form that makes this client fail it and go on."""
        cpp = producer.connection.peer.client_version.startswith("Pulsar-CPP")
        return Refused(ServerError.CHECKSUM if cpp else ServerError.NOT_ALLOWED, message)

    def _put(self, reply: Reply, item: _Entry) -> bool:
        """Hand an entry to the engine; False: it has no capacity now."""
        producer = reply.producer
        payload, deliver_at, key, numbers, messages = item
        try:
            taken = producer.topic.put(
                payload, deliver_at=deliver_at, key=key, numbers=numbers, token=reply, done=self._done, wait=False
            )
        except DelayTooLong as error:
            if self._clamp_delays:
                return self._put(reply, item._replace(deliver_at=self._clock() + error.limit_ms))
            self._answer(reply, self._refusal(producer, str(error)))
            return True
        except DuelogError as error:
            self._answer(reply, self._refusal(producer, str(error)) if isinstance(error, InvalidArgument) else error)
            return True
        if taken:
            figures = producer.figures
            figures.messages += messages
            figures.entries += 1
            figures.bytes += len(payload) - entry.HEADER_BYTES
        return taken

    # -- no capacity ---------------------------------------------------------------------------------

    def _block(self, connection: SendingPeer, reply: Reply, item: _Entry) -> None:
        connection.blocked.append((reply, item))
        if connection not in self._blocked:
            self._blocked[connection] = None
            connection.peer.pause_reading("capacity")
        self._retry_later()

    def _retry_later(self) -> None:
        if self._blocked and not self._retrying:
            self._retrying = True
            self._calls.loop.call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        self._unblock()
        self._retry_later()

    def _unblock(self) -> None:
        """Hand on what waits, a connection after the other, while the engine takes it."""
        for connection in list(self._blocked):
            while connection.blocked:  # which is another one where a producer is closed meanwhile
                reply, item = connection.blocked[0]
                if not self._put(reply, item):
                    self._blocked[connection] = self._blocked.pop(connection)  # the next begins next time
                    return
                if connection.blocked and connection.blocked[0][0] is reply:
                    connection.blocked.popleft()
            if self._blocked.pop(connection, self) is None:
                connection.peer.resume_reading("capacity")

    def forget(self, producer: OpenProducer) -> None:
        """The producer is closed or gone: what the engine has not taken of it is not stored, nor answered."""
        connection = producer.connection
        connection.unanswered -= len(producer.replies)
        producer.replies = deque()
        kept = [each for each in connection.blocked if each[0].producer is not producer]
        connection.blocked = deque(kept)
        if not kept and self._blocked.pop(connection, self) is None:
            connection.peer.resume_reading("capacity")
        self._resume(connection)

    # -- out -----------------------------------------------------------------------------------------

    def _heard(self, results: Sequence[tuple[Any, Outcome]]) -> None:
        """Take the outcomes of messages; a thread of the engine calls."""
        self._results.append(results)
        self._calls.post(self._deliver)

    def _deliver(self) -> None:
        producers: dict[OpenProducer, None] = {}
        while self._results:
            for reply, outcome in self._results.popleft():
                reply.outcome = outcome
                producers[reply.producer] = None
        for producer in producers:
            self._flush(producer)
        if self._blocked:
            self._unblock()

    def _answer(self, reply: Reply, outcome: Exception) -> None:
        reply.outcome = outcome
        self._flush(reply.producer)

    def _flush(self, producer: OpenProducer) -> None:
        connection, peer, frames_of = producer.connection, producer.connection.peer, producer.frames
        frames: list[bytes] = []
        came: list[float] = []
        sent, failed = 0, False
        replies = producer.replies
        while replies and replies[0].outcome is not None:
            reply = replies.popleft()
            outcome, sequence_id, highest = reply.outcome, reply.sequence_id, reply.highest_sequence_id
            sent += 1
            if failed:
                continue  # a client takes answers in order only
            if isinstance(outcome, MessageId):
                frames.append(frames_of.frame(sequence_id, highest, *outcome))
                came.append(reply.came_s)
            elif isinstance(outcome, Duplicate):
                producer.figures.duplicates += 1
                message_id = MessageIdData(_NO_ID, _NO_ID)
                frames.append(head(SendReceipt(producer.producer_id, sequence_id, message_id, highest)))
            elif isinstance(outcome, _SENT_AGAIN) or isinstance(getattr(outcome, "__cause__", None), Deposed):
                failed = True
            elif isinstance(outcome, QuotaExceeded):  # as Pulsar does: the client fails what waits when it reopens
                failed = True
                producer.figures.refused += 1
                if len(self.over_quota) >= _MOST_OVER_QUOTA:
                    del self.over_quota[next(iter(self.over_quota))]
                self.over_quota[producer.topic.name, producer.name] = None
            elif outcome is not None:
                producer.figures.refused += 1
                if not isinstance(outcome, DuelogError | Refused):
                    _log.error("a message of producer %s failed", producer.name, exc_info=outcome)
                number = server_error(outcome)
                self.errors[number] += 1
                frames.append(head(SendError(producer.producer_id, sequence_id, number, str(outcome))))
        if frames:
            peer.send_frames(b"".join(frames))
        if came:
            producer.figures.last_s = came[-1]
            if self.received is not None:
                self.received(producer, came)
        connection.unanswered -= sent
        self._resume(connection)
        if failed:
            self.on_failed(producer)
        elif producer.on_answered is not None and not producer.replies:
            answered, producer.on_answered = producer.on_answered, None
            answered()

    def _resume(self, connection: SendingPeer) -> None:
        if connection.full and connection.unanswered <= self._max_unanswered // 2:
            connection.full = False
            connection.peer.resume_reading("unanswered")
