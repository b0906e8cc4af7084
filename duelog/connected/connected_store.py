"""A store that another process has open, by the classes of the face: their arguments, results and errors."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from duelog.delayed_store import DelayedStore, checked_pattern
from duelog.operations.face_table import FACE, NOT_OFFERED, ONCE, Row
from duelog.operations.operation import signature_of
from duelog.operations.transacted import TRANSACTED
from duelog.operations.wire import CONNECTION, LONGEST_RECONNECT_S, Disconnected, OnlyInProcess
from duelog.operations.wire_address import connecting, is_address
from duelog.operations.wire_client import Call, Connection, is_gone, nobody
from duelog.operations.wire_values import columns, payloads_alone
from duelog.sending.producer import Producer
from duelog.store.clock import StoreClock, SystemClock
from duelog.store.codec.body import encode_send
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import (
    ClosedError,
    DuelogError,
    InvalidArgument,
    InvalidMessage,
    UnknownSubscription,
    checked_int,
    short_names,
)
from duelog.store.files.directory import checked_path
from duelog.store.log.documents import Documents
from duelog.store.message import Dedup, Message, ReceivedMessage
from duelog.store.names import TopicName, validate_subscription_name
from duelog.store.position import FoundId, MessageId, MessageIds, position_at
from duelog.store.received_messages import ReceivedMessages
from duelog.subscription import Subscription, SubscriptionAdmin
from duelog.topic import Topic
from duelog.topics.task_activity import TaskActivity
from duelog.transactions import Result, Transaction

from .pushed_messages import Acknowledging, PushedMessages, received

C = TypeVar("C", bound=type)

_SENDING = signature_of(Topic.send)
_SENT = frozenset(_SENDING.parameters) - {"self", "payload"}
_CLOCK = StoreClock(SystemClock())
_REPORT_S, _REPORT_AGAIN_S = 1.0, 10.0
_PAUSE_S = 0.05


def connect(
    place: str | os.PathLike[str],
    *,
    token: str | None = None,
    tls_trust: str | os.PathLike[str] | None = None,
    reconnect: Duration = 30,
    wait: Duration = 0,
    prefetch: int = 0,
    name: str | None = None,
) -> DelayedStore:
    """Connect to the process that has a store open, by its directory on this machine, or by its address.

    place: the directory, as the same user or root; or `duelog://host:port`, `duelog+ssl://host:port`, where
    `duelog serve --listen` listens. token: of the role that the client has there. tls_trust: a file of certificates in
    PEM that are trusted; None: those of this machine.

    The store that is returned has the methods of `DelayedStore`, and so have its topics and subscriptions; what only
    that process has (its clock, `tick`, `check`, files, callbacks) raises OnlyInProcess. `close` closes the connection:
    what was received and not acknowledged is handed out again, as when this process ends.

    reconnect: for how long a connection that has ended is tried again, at most 5 minutes. Subscriptions go on, and
    calls that may be made twice are made again: sends are numbered, so that each is stored once. Any other that
    was under way raises Disconnected, which says what is in doubt.

    wait: for how long a process is waited for that serves the store, where none does: it may be starting, or be
    restarted just then.

    prefetch: how many messages each subscription holds beyond those that `receive` has given, 0: none. They are pushed
    ahead, and `ack` (without `durable`) sends together what it is given meanwhile, so that messages that are received
    one by one cost no round trip each; others cannot have them meanwhile.

    name: how figures and the page show this client; None: the program's file. Raises Disconnected where nobody serves
    the store, NotAllowed.
    """
    prefetch = checked_int("prefetch", prefetch, 0, "an int of at least 0")
    if not isinstance(place, (str, os.PathLike)):
        raise InvalidArgument("place", place, "expected the path of a store")
    if not isinstance(name, str | None):
        raise InvalidArgument("name", name, "expected a str")
    text, patience_s = os.fspath(place), duration_ms("reconnect", reconnect) / 1_000
    if "://" in text and not is_address(text):
        raise InvalidArgument("place", place, "expected a directory, duelog://host:port or duelog+ssl://host:port")
    deadline = time.monotonic() + duration_ms("wait", wait) / 1_000
    if patience_s > LONGEST_RECONNECT_S:
        raise InvalidArgument("reconnect", reconnect, f"expected at most {LONGEST_RECONNECT_S} s")
    if token is not None and not is_address(text):
        raise InvalidArgument("token", None, "goes with an address: a directory's own user is let in")
    trust = None if tls_trust is None else checked_path("tls_trust", tls_trust)
    while True:
        try:
            found = _connection(text, token, trust, patience_s)
            if found is not None:
                found.introduce(os.path.basename(sys.argv[0]) if name is None else name)
                return ConnectedStore(found, prefetch)
        except Disconnected:  # it may be ending
            if time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            raise nobody(text)
        time.sleep(_PAUSE_S)


def _connection(place: str, token: str | None, trust: Path | None, patience_s: float) -> Connection | None:
    """Connect; None: nobody serves. Raises Disconnected."""
    if not is_address(place):
        return Connection.to(Path(place).absolute(), patience_s)
    credentials = ("none", b"") if token is None else ("token", token.encode())
    connection = Connection(connecting(place, trust), place, patience_s, credentials)
    return connection if connection.connect() else None


# -- methods made from the table -----------------------------------------------------------------------


def _asked(row: Row, base: Any) -> Any:
    """A method, or a property, that asks for an operation of the table."""
    member = getattr(base, row.method)
    if isinstance(member, property):
        return property(lambda self: self._ask(row), doc=member.__doc__)

    @functools.wraps(member)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        bound = signature_of(member).bind(self, *arguments, **named)  # raises TypeError as a call does
        return self._ask(row, bound.args[1:], bound.kwargs)

    return method


def _only_in_process(name: str, base: Any) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OnlyInProcess(f"{base.__name__}.{name}")

    member = base.__dict__[name]
    return functools.wraps(member)(refuse) if callable(member) else property(refuse, doc=member.__doc__)


def from_table(kind: C) -> C:
    """Give a class the methods of its base that the table offers, but for those that it has itself."""
    (base,) = kind.__bases__
    for row in FACE.values():
        if row.owner == base.__name__ and row.method not in vars(kind):
            setattr(kind, row.method, _asked(row, base))
    for name in NOT_OFFERED.get(base.__name__, "").split():
        if name not in vars(kind):
            setattr(kind, name, _only_in_process(name, base))
    return kind


def _ask(self: Any, row: Row, arguments: Iterable[object] = (), named: dict[str, object] | None = None) -> Any:
    if row.name in ONCE:
        return self._store.ask_once(row.name, self._target, tuple(arguments), named or {})
    return self._connection.call(row.name, self._target, tuple(arguments), named, repeated=row.repeated)


# -- the store -----------------------------------------------------------------------------------------


@from_table
class ConnectedStore(DelayedStore):
    """See `connect` and `DelayedStore`."""

    _ask = _ask
    _target = ()

    def __init__(self, connection: Connection, prefetch: int = 0) -> None:
        """Use `connect`."""
        self._connection = connection
        self._prefetch = prefetch
        self._sender = f"{CONNECTION}{os.urandom(8).hex()}"
        """Name of the producer of all that is sent."""
        self._sent: dict[str, int] = {}
        """The next number by topic."""
        self._numbering = threading.Lock()

    @property
    def place(self) -> str:
        """The directory or address that it is connected to."""
        return self._connection.place

    def number(self, topic: str, count: int = 1) -> int:
        """The first of some numbers that nothing else of this connection has."""
        with self._numbering:
            first = self._sent.get(topic, 0)
            self._sent[topic] = first + count
        return first

    def ask_once(
        self,
        name: str,
        target: Sequence[object],
        arguments: Sequence[object],
        named: dict[str, Any],
        numbers: tuple[str, int] | None = None,
    ) -> Any:
        """Ask for what one transaction stores, once, however often it is asked for. numbers: the program's own."""
        found = list(numbers or (self._sender, self.number("")))
        return self._connection.call(name, target, arguments, {**named, "numbers": found}, repeated=True)

    def topic(self, name: str) -> Topic:
        self._connection.check_process()
        return ConnectedTopic(self, TopicName.parse(name))

    def topics(self, namespace: str | None = None, pattern: str | None = None) -> Iterator[Topic]:
        search = checked_pattern(pattern).search
        names = self._connection.call("topics", (), (), {"namespace": namespace}, repeated=True)
        return (self.topic(name) for name in names if search(name))

    def send_batch(
        self, messages: Iterable[tuple[str | Topic, Message]], *, allow_past: bool = False
    ) -> list[MessageId]:
        if isinstance(messages, (Message, str, bytes)) or not isinstance(messages, Iterable):
            raise InvalidArgument("messages", messages, "expected a sequence of (topic, Message)")
        pairs = [self._named(pair) for pair in messages]
        found: list[MessageId] = self.ask_once("DelayedStore.send_batch", (), [pairs], {"allow_past": allow_past})
        return found

    def _named(self, pair: Any) -> Any:
        """A pair with the topic's name in place of a topic of this store."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], Topic):
            return pair
        topic = pair[0]
        if not isinstance(topic, ConnectedTopic) or topic._store is not self:
            raise InvalidArgument("topic", topic.name, "a topic of another open store")
        return (topic.name, pair[1])

    def transaction(self) -> Transaction:
        return ConnectedTransaction(self)

    @property
    def path(self) -> Path:
        """The store's directory, where it is connected to by that."""
        if is_address(self._connection.place):
            raise OnlyInProcess("DelayedStore.path")
        return Path(self._connection.place)

    @property
    def documents(self) -> Documents:
        return ConnectedDocuments(self)

    def close(self) -> None:
        """Disconnect; the store stays open where it is. What was received and not acknowledged is handed out again."""
        self._connection.close()

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def __enter__(self) -> ConnectedStore:
        self._connection.check_process()
        return self

    def __repr__(self) -> str:
        return f"<ConnectedStore {self._connection.place}{', closed' if self.closed else ''}>"


@from_table
class ConnectedDocuments(Documents):
    """See `Documents`."""

    _ask = _ask
    _target = ()

    def __init__(self, store: ConnectedStore) -> None:
        self._store = store
        self._connection = store._connection


class ConnectedTransaction(Transaction):
    """See `Transaction`. Its operations are asked for at its end, in one request, and are checked then."""

    def __init__(self, store: ConnectedStore) -> None:
        store._connection.check_process()
        self._store_asked = store
        self._numbers = None
        self._asked: list[tuple[dict[str, Any], float]] = []
        self._results: list[Result[Any]] = []
        self._ended = False

    def _collect(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Result[Any]:
        """Note an operation, and the result that it will have."""
        self._check_begun()
        arguments = signature_of(getattr(Transaction, name)).bind(self, *given, **named).arguments
        del arguments["self"]
        if isinstance(topic := arguments.get("topic"), ConnectedTopic):
            arguments["topic"] = topic.name
        if isinstance(consumer := arguments.get("consumer"), ConnectedSubscription):
            arguments["consumer"] = consumer._key
        self._asked.append(({"operation": name, **arguments}, time.monotonic()))
        about = [text for text in list(arguments.values())[:1] if isinstance(text, str)]
        result = Result[Any](" ".join([name, *about]))
        self._results.append(result)
        return result

    def _store(self) -> None:
        now = time.monotonic()
        operations = [_counting_from(asked, now - at) for asked, at in self._asked]
        store = self._store_asked
        if not operations:
            store._connection.check_process()
            return
        try:
            values = store.ask_once("DelayedStore.transaction", (), operations, {}, self._numbers)
        except Disconnected as error:
            if not error.stored:
                raise
            for result in self._results:
                result._lost = error
            return
        for result, value in zip(self._results, values, strict=True):
            result._store(value)

    def __repr__(self) -> str:
        return f"<Transaction of {self._store_asked!r}{', ended' if self._ended else ''}>"


def _collecting(name: str) -> Any:
    @functools.wraps(getattr(Transaction, name))
    def collect(self: ConnectedTransaction, *given: Any, **named: Any) -> Any:
        result = self._collect(name, given, named)
        return None if name == "ack" else result

    return collect


for _name in TRANSACTED:
    setattr(ConnectedTransaction, _name, _collecting(_name))


def _listed(ids: Sequence[MessageId]) -> list[MessageId]:
    return ids.to_list() if isinstance(ids, MessageIds) else list(ids)


def _counting_from(asked: dict[str, Any], seconds_ago: float) -> dict[str, Any]:
    """An operation on the wire, with a delay that began some time ago as it is now."""
    found = {name: columns(value) for name, value in asked.items()}
    if (delay := found.get("deliver_after")) is not None:
        found["deliver_after"] = max(duration_ms("deliver_after", delay, InvalidMessage) / 1_000 - seconds_ago, 0)
    return found


@from_table
class ConnectedTopic(Topic):
    """See `Topic`."""

    _ask = _ask

    def __init__(self, store: ConnectedStore, name: TopicName) -> None:
        self._store = store
        self._connection = store._connection
        self._name = name
        self._target = (str(name),)

    def send(self, *given: Any, **named: Any) -> MessageId:
        return self._sent(self._send(given, named, None).wait(), named.get("dedup_key"))

    def _sent(self, message_id: MessageId | None, key: str | None) -> MessageId:
        """The id of a message that was sent. Raises Disconnected for one that was stored before, whose id nobody knows.

        key: its deduplication key, by which it is found while it is pending.
        """
        if message_id is None and key is not None:
            found = self.find(key)
            message_id = None if found is None else FoundId(*found.message_id)
        if message_id is None:
            raise Disconnected("the message is stored; its id was lost with the connection", stored=True)
        return message_id

    def send_async(self, *given: Any, **named: Any) -> Future[MessageId]:
        """`Topic.send_async`; a future that is cancelled does not take its message back, and policies refuse later."""
        message = _SENDING.bind(self, *given, **named)
        message.apply_defaults()
        values = dict(message.arguments)
        del values["self"]
        hold, replace, allow = values.pop("dedup_for"), values.pop("replace"), values.pop("allow_past")
        dedup = Dedup.checked(values["dedup_key"], hold, replace)
        most = self._connection.facts["most_message_bytes"]
        del values["dedup_key"]
        key = dedup and dedup.key
        encode_send(**values, now_ms=SystemClock().now_ms(), max_message_bytes=most, allow_past=allow, dedup_key=key)
        future: Future[MessageId] = Future()
        future.set_running_or_notify_cancel()

        def done(call: Call) -> None:
            try:
                if call.error is not None:
                    raise call.error
                future.set_result(self._sent(call.result, None))
            except BaseException as error:
                future.set_exception(error)

        self._send(given, named, done)
        return future

    def _send(self, given: tuple[Any, ...], named: dict[str, Any], done: Callable[[Call], None] | None) -> Call:
        """Ask for a message to be stored, once."""
        if len(given) != 1 or not named.keys() <= _SENT:
            _SENDING.bind(self, *given, **named)
        payload = given[0] if given else named.pop("payload")
        number = self._store.number(self._target[0])
        named["numbers"] = [self._store._sender, number, number]
        return self._connection.start("Topic.send", self._target, [payload], named, repeated=True, done=done)

    def send_batch(self, messages: Iterable[Message], *, allow_past: bool = False) -> list[MessageId]:
        named: dict[str, Any] = {"allow_past": allow_past}
        batch = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, (str, bytes)) else []
        if not batch:
            found: list[MessageId] = self._ask(FACE["Topic.send_batch"], [messages], named)
            return found
        if (payloads := payloads_alone(batch)) is not None:
            with suppress(InvalidMessage):  # which message is refused is told below
                return _listed(self._numbered("Topic.send_payloads", payloads, dict(named)))
        return _listed(self._numbered("Topic.send_batch", batch, named))

    def send_payloads(self, payloads: Sequence[bytes], **named: Any) -> MessageIds:
        signature_of(Topic.send_payloads).bind(self, payloads, **named)
        if not isinstance(payloads, (list, tuple)) or not payloads:
            found: MessageIds = self._ask(FACE["Topic.send_payloads"], [payloads], named)
            return found
        ids = self._numbered("Topic.send_payloads", payloads, named)
        return ids if isinstance(ids, MessageIds) else MessageIds([(*run, 1) for run in ids])

    def send_once(self, producer: str, first: int, messages: list[Message]) -> list[MessageId | None]:
        """Send a batch, due in the past too, under a producer's numbers from `first` on; None: it was stored before."""
        named = {"allow_past": True, "numbers": [producer, first]}
        return list(self._connection.call("Topic.send_batch", self._target, [messages], named, repeated=True))

    def _numbered(self, name: str, batch: Sequence[object], named: dict[str, Any]) -> Sequence[MessageId]:
        """Send a batch that is stored once, however often it is asked for."""
        named["numbers"] = [self._store._sender, self._store.number(self._target[0], len(batch))]
        ids: Any = self._connection.call(name, self._target, [batch], named, repeated=True)
        return ids if isinstance(ids, MessageIds) or None not in ids else [self._sent(each, None) for each in ids]

    def producer(self, name: str) -> Producer:
        validate_subscription_name(name, "producer")
        return ConnectedProducer(self._connection, self._target[0], name)

    def subscribe(self, name: str, **named: Any) -> Subscription:
        return ConnectedSubscription(self._store, "Topic.subscribe", self._target, name, **named)

    def reader(self, *given: Any, **named: Any) -> Subscription:
        return ConnectedSubscription(self._store, "Topic.reader", self._target, *given, **named)

    def subscription(self, name: str) -> SubscriptionAdmin:
        if name not in self.subscriptions():
            raise UnknownSubscription(self.name, name)
        return ConnectedAdmin(self._connection, self._target[0], name)


@from_table
class ConnectedProducer(Producer):
    """See `Producer`."""

    def _ask(self, row: Row, arguments: Iterable[object] = (), named: dict[str, Any] | None = None) -> Any:
        numbered = named is not None and any(
            named.get(each) is not None for each in ("sequence_id", "first_sequence_id")
        )
        return _ask(self, row._replace(repeated=row.repeated or numbered), arguments, named)

    def __init__(self, connection: Connection, topic: str, name: str) -> None:
        self._connection = connection
        self._target = (topic, name)
        self.name = name
        _ = self.last_sequence_id  # its topic comes into being


@from_table
class ConnectedAdmin(SubscriptionAdmin):
    """See `SubscriptionAdmin`."""

    _ask = _ask

    def __init__(self, connection: Connection, topic: str, name: str) -> None:
        self._connection = connection
        self._target = (topic, name)

    @property
    def name(self) -> str:
        return self._target[1]

    @property
    def topic(self) -> str:
        return self._target[0]

    def __repr__(self) -> str:
        return f"<ConnectedAdmin of {self.name!r} of {short_names(self.topic)!r}>"


# -- subscriptions -------------------------------------------------------------------------------------


@from_table
class ConnectedSubscription(Subscription):
    """See `Subscription`. A `receive` is one request, which is answered when messages are due."""

    def __init__(self, store: ConnectedStore, method: str, topic: tuple[str, ...], *given: Any, **named: Any) -> None:
        signature_of(getattr(Topic, method.removeprefix("Topic."))).bind(None, *given, **named)
        connection = store._connection
        self._store = store
        self._connection = connection
        self._key = connection.next_number()
        self._target = (self._key,)
        self._closed = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        """Numbers of the requests of `receive_unless`."""
        self._facts = connection.attach(method, topic, self._key, given, named)
        self.type = self._facts[2]
        ask = functools.partial(connection.start, "Subscription.receive", self._target, repeated=True)
        self._pushed = PushedMessages(connection, ask, store._prefetch) if store._prefetch else None
        self._held: set[MessageId] = set()
        """Positions of messages that were pushed and given to the program, and not acknowledged."""
        self._acking: Acknowledging | None = None

    @property
    def topic(self) -> str:
        return str(self._facts[0])

    @property
    def name(self) -> str:
        return str(self._facts[1])

    @property
    def durable(self) -> bool:
        return bool(self._facts[3])

    @property
    def closed(self) -> bool:
        return self._closed or self._connection.closed

    @property
    def clock(self) -> StoreClock:
        """The clock of this machine, which the other process's follows too."""
        return _CLOCK

    def report_task(self, activity: TaskActivity | Callable[[], TaskActivity]) -> None:
        """See `Subscription.report_task`: a thread tells what has changed each second, and all of it now and then."""
        tell = activity if callable(activity) else lambda: activity
        threading.Thread(target=self._report, args=[tell], name="duelog-report", daemon=True).start()

    def _report(self, tell: Callable[[], TaskActivity]) -> None:
        told, again_s = None, 0.0
        try:
            while not self.closed:
                activity, now_s = tell(), time.monotonic()
                if activity != told or now_s >= again_s:  # a server that came anew does not know it
                    self._ask(FACE["Subscription.report_task"], [activity])
                    told, again_s = activity, now_s + _REPORT_AGAIN_S
                self._ended.wait(_REPORT_S)
        except DuelogError:  # the connection is over, or the server does not take it
            pass

    def acknowledging(self, message: ReceivedMessage) -> Transaction:
        transaction = ConnectedTransaction(self._store)
        transaction.ack(message, consumer=self)
        return transaction

    @property
    def may_wait(self) -> bool:
        """True: the process that has the store open waits."""
        return True

    def _ask(self, row: Row, arguments: Iterable[object] = (), named: dict[str, object] | None = None) -> Any:
        self._check()
        return _ask(self, row, arguments, named)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"subscription {self.name!r}")

    # -- receiving -------------------------------------------------------------------------------------

    def receive(self, max_messages: int = 1, timeout: Duration | None = None) -> list[ReceivedMessage]:
        timeout_ms = None if timeout is None else duration_ms("timeout", timeout)
        if self._pushed is None or (timeout_ms == 0 and not self._pushed):
            return self._received(self._credit(max_messages, timeout_ms))
        return self._take(max_messages, timeout_ms, lambda: False)

    def receive_async(self, max_messages: int = 1, timeout: Duration | None = None) -> Future[list[ReceivedMessage]]:
        """Receive without waiting: a future of the messages; cancelled, what comes meanwhile is given back."""
        timeout_ms = None if timeout is None else duration_ms("timeout", timeout)
        future: Future[list[ReceivedMessage]] = Future()
        self._check()

        def done(call: Call) -> None:
            if not future.set_running_or_notify_cancel():
                self._give_back(call.result)
            elif call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(received(call))

        arguments = [max_messages, timeout_ms]
        call = self._connection.start("Subscription.receive", self._target, arguments, repeated=True, done=done)
        future.add_done_callback(lambda ended: self._recall([call.number]) if ended.cancelled() else None)
        return future

    def give_back(self, received: Future[list[ReceivedMessage]]) -> None:
        """Give back, without waiting, what a future of `receive_async` has that nobody takes any more."""
        if not received.cancelled() and received.exception() is None:
            with suppress(DuelogError):  # closed or deleted meanwhile, which gives it back as well
                self._give_back(received.result())

    def _give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        if messages:
            self._connection.start("Subscription.nack", self._target, [_places(messages)], {"delay": 0})

    def _take(self, max_messages: int, timeout_ms: int | None, stopped: Callable[[], bool]) -> list[ReceivedMessage]:
        self._check()
        max_messages = checked_int("max_messages", max_messages, 1, "an int of at least 1")
        timeout_s = None if timeout_ms is None else timeout_ms / 1_000
        messages = [] if self._pushed is None else self._pushed.take(max_messages, timeout_s, stopped)
        self._held.update(message.position for message in messages)
        return messages

    def receive_unless(self, stopped: Callable[[], bool], max_messages: int = 1) -> list[ReceivedMessage]:
        if self._pushed is not None:
            while not (messages := self._take(max_messages, None, stopped)) and not stopped():
                pass
            return messages
        while True:
            with self._lock:  # so that `wake` finds the request, or `stopped` is asked after it
                if stopped():
                    return []
                call = self._credit(max_messages, None)
                self._waiting.add(call.number)
            try:
                if messages := self._received(call):
                    return messages
            finally:
                with self._lock:
                    self._waiting.discard(call.number)

    def _credit(self, max_messages: int, timeout_ms: int | None) -> Call:
        self._check()
        return self._connection.start("Subscription.receive", self._target, [max_messages, timeout_ms], repeated=True)

    def _received(self, call: Call) -> list[ReceivedMessage]:
        try:
            call.wait()
        except BaseException as error:
            if call.error is not error:  # an interrupt of this thread: what comes meanwhile is given back
                self._recall([call.number])
                call.attend()
                if call.result:
                    self.nack(received(call), delay=0)
            raise
        return received(call)

    def wake(self) -> None:
        """Have every receiver of this subscription that waits in `receive_unless` look again."""
        if self._pushed is not None:
            self._pushed.wake()
            return
        with self._lock:
            numbers = list(self._waiting)
        if numbers:
            self._recall(numbers)

    def _recall(self, numbers: list[int]) -> None:
        self._connection.start("Subscription.recall", self._target, numbers, repeated=True)

    # -- what becomes of messages ----------------------------------------------------------------------

    def ack(self, messages: Any, *, durable: bool = False) -> int:
        places, before = _places(messages), len(self._held)
        if self._pushed is not None and self._forget(places) and not durable:
            self.ack_soon([places] if isinstance(places, MessageId) else places)
            return before - len(self._held)
        if self._acking is not None:
            self._acking.wait()
        return self._settle("ack", places, {"durable": durable} if durable else {})

    def _forget(self, places: Any) -> bool:
        """Take what is settled, or about to be, from what the program holds; False: it did not hold all of it."""
        given = places if isinstance(places, list) else [places]
        found = self._held.intersection(each for each in given if isinstance(each, MessageId))
        self._held -= found
        return len(found) == len(given)

    def ack_soon(self, positions: Sequence[MessageId]) -> None:
        """Acknowledge together with others, and wait for no answer but in `close`. Raises what earlier ones did."""
        self._check()
        with self._lock:
            if self._acking is None:
                self._acking = Acknowledging(lambda positions: self._settle("ack", positions, {}))
        self._acking.add(positions)

    def ack_cumulative(self, message: Any, *, durable: bool = False) -> int:
        last = _places(message)
        if isinstance(last, MessageId):
            self._held = {position for position in self._held if position > last}
        return self._settle("ack_cumulative", last, {"durable": durable})

    def extend(self, messages: Any, timeout: Duration | None = None) -> int:
        return self._settle("extend", messages, {"timeout": timeout})

    def _settle(self, method: str, messages: Any, named: dict[str, object]) -> int:
        count: int = self._ask(FACE[f"Subscription.{method}"], [_places(messages)], named)
        return count

    def nack(self, messages: Any, *, delay: Duration | None = None) -> int:
        by = self._connection.count
        if isinstance(messages, Iterable) and not isinstance(messages, (MessageId, str, bytes)):
            messages = list(messages)
            given: Any = [_without_payload(each) for each in messages if getattr(each, "_connection", by) == by]
        else:
            by, given = getattr(messages, "_connection", by), _without_payload(messages)
        self._forget(_places(messages))
        count: int = self._of_delivery("nack", by, [given], {"delay": delay}, given_back=0)
        return count

    def holds(self, message: ReceivedMessage) -> bool:
        return bool(self._of_delivery("holds", _by(message), [message], given_back=False))

    def retry_later(self, message: ReceivedMessage, delay: Duration, *, reason: str | None = None) -> MessageId | None:
        self._forget(_places(message))
        new_id: MessageId | None = self._of_delivery("retry_later", _by(message), [message, delay], {"reason": reason})
        return new_id

    def dead_letter(self, message: ReceivedMessage, reason: str | None = None) -> None:
        self._forget(_places(message))
        self._of_delivery("dead_letter", _by(message), [message, reason])

    def _of_delivery(
        self, method: str, by: int | None, arguments: list[Any], named: Any = None, given_back: Any = None
    ) -> Any:
        """Ask for what concerns a delivery, by the connection by which the message came.

        Once that has ended the message is given back: the result is `given_back`; None: Disconnected is raised.
        """
        self._check()
        try:
            return self._connection.call(f"Subscription.{method}", self._target, arguments, named, by=by)
        except Disconnected:
            if given_back is None or by in (None, self._connection.count):
                raise
            return given_back

    def close(self, *, failed: bool = True) -> None:
        """See `Subscription.close`. Raises what acknowledgements on their way did, not that the process is gone."""
        if self._closed:
            return
        try:
            if self._acking is not None:
                self._acking.close()
        finally:
            try:
                if self._connection.detach(self._key) and not self._connection.closed:
                    self._ask(FACE["Subscription.close"], (), {"failed": failed})
            except DuelogError as error:
                if not is_gone(error):
                    raise
            self._closed = True

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Subscription {self.name!r} of {short_names(self.topic)!r}, {self.type}{closed}>"


def _places(messages: Any) -> Any:
    """Positions in place of received messages."""
    if isinstance(messages, ReceivedMessage):
        return messages.position
    if isinstance(messages, ReceivedMessages):
        return list(map(position_at, messages.places))
    if isinstance(messages, Iterable) and not isinstance(messages, (MessageId, str, bytes)):
        return [each.position if isinstance(each, ReceivedMessage) else each for each in messages]
    return messages


def _by(message: Any) -> int | None:
    """The connection by which a message came, where it is one."""
    return getattr(message, "_connection", None)


def _without_payload(message: Any) -> Any:
    """A received message as far as giving it back looks at it: where it stands, and how often it was handed out."""
    if not isinstance(message, ReceivedMessage):
        return message
    return ReceivedMessage(
        b"", None, None, message.message_id, message.position, message.due_ms, message.publish_ms,
        message.redelivery_count, message.topic, message.subscription, message.retries,
    )  # fmt: skip
