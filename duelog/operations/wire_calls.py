"""The calls of one connection to an open store: begun as they come, answered as they are ready, in any order.

The server's thread does itself what waits for nothing: messages put into the outbox, messages that are due,
acknowledgements in memory. All else is done by threads of a pool. A `receive` is a credit: it is answered when messages
are due, or its time is over; nothing is asked again meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from inspect import BoundArguments
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from duelog.store.clock import SystemClock
from duelog.store.errors import ClosedError, DuelogError, InvalidArgument
from duelog.store.limited_log import LimitedLog
from duelog.store.message import Dedup, Message
from duelog.store.names import TopicName
from duelog.store.position import MessageId

from ..sending.outbox import Numbers, Outbox, Outgoing
from . import wire_values
from .face_table import FACE, ONCE, Row, object_of
from .operation import Ask, Right, signature_of
from .transacted import changed_once, document_once, transact
from .wire import CLOSING, CONNECTION, ERROR, RESULT, Disconnected, Refused, buffer
from .wire_loop import WireLoop
from .wire_values import columns, pack_error

Guard: TypeAlias = Callable[[Right, str | None], None]
"""Raises NotAllowed where a client has not this right in the namespace of a topic, None: in the whole store."""

Store: TypeAlias = Any
Topic: TypeAlias = Any
Subscription: TypeAlias = Any
"""Objects of the face, which stands above the engine, and this module below it."""

MOST_CREDITS = 1_024
"""Requests for messages of one consumer that are not answered yet."""

MOST_CONSUMERS = 1_024
MOST_SEQUENCES = 64

FORGET_S = 600.0
"""How long the numbers of a connection's sends are known after it has ended: a client may come back for less."""

_AT_ONCE = 64
_MOST_NAME = 200
_MOST_RECEIVED_BYTES = 4 << 20
_TOPICS = 256
_MANUAL_PAUSE_S = 0.02
_LONGEST_MS = 1 << 53
"""A credit that is to wait for longer waits so long: seconds of it are a float."""
_CLOSING_MESSAGE = "the process that has this store open is closing it, and has not done this"
_SENT = Message.__dataclass_fields__.keys() - {"payload"} | {"allow_past", "numbers"}
_UNSAID = (None, None, None, None, False, None)
"""Encodes a message of nothing but a payload."""

_log = logging.getLogger("duelog.control")


class Answering(Protocol):
    """The connection, as far as its calls know it."""

    def answer(self, number: int, kind: int, value: object) -> None: ...
    def answered(self, frames: Sequence[bytes]) -> None: ...
    def hold(self, *, held: bool) -> None: ...


class Service:
    """The store that connections ask, and what they share."""

    def __init__(self, store: Store, path: Path, operations: Ask, most_bytes: int, outbox: Outbox) -> None:
        """most_bytes: of a frame. outbox: of the store. Raises OSError."""
        self.store = store
        self.path = path
        self.operations = operations
        self.most_bytes = most_bytes
        self.outbox = outbox
        self.loop = WireLoop(lambda error: self.log_error("a turn has failed", error), self._take_up, outbox.write)
        self._sends: list[Outgoing] = []
        """Messages that have come in this turn of the thread."""
        self._sends_bytes = 0
        self.held: list[Callable[[], None]] = []
        """Puts into the outbox that wait for capacity there, once the messages before them are put in."""
        self.buffer = buffer()
        """For the frames of all connections, which one thread reads."""
        self.closing = False
        """True once the store is being closed: nothing more is begun."""
        self.log = LimitedLog(_log)
        self.producers = Counter[tuple[str, str]]()
        """Connections by the topics and names under which they have numbered what they sent."""
        self._leaving = Counter[tuple[str, str]]()
        """By topic and name of a subscription, its consumers of clients that have gone and the pool is detaching."""
        self._attaching: deque[tuple[tuple[str, str], Callable[[], None]]] = deque()
        """Attachments that wait for one of these, which may be the client's own, of the connection before."""

    def send(self, item: Outgoing) -> bool:
        """Have a message written at the end of the turn; False: there is no capacity. Of the thread."""
        size = item.size
        if not self.outbox.has_room(size, self._sends_bytes):
            return False
        self._sends.append(item)
        self._sends_bytes += size
        return True

    def _take_up(self) -> int:
        """Put the messages of a turn into the outbox: how many this thread is to write, 0: none, or another does."""
        if not (self._sends or self.held):
            return 0
        items, size, held = self._sends, self._sends_bytes, self.held
        self._sends, self._sends_bytes, self.held = [], 0, []
        try:
            is_writer = bool(items) and self.outbox.put_together(items, size)
        except ClosedError:
            is_writer = False
            _outcomes([(item.token, closing()) for item in items])
        for put in held:
            self.loop.pool.submit(put)
        return len(items) if is_writer else 0

    def leave(self, subscriptions: Sequence[tuple[str, str]], detach: Callable[[], None]) -> None:
        """Have the pool detach consumers of some subscriptions; then those that wait are attached. Of the thread."""
        self._leaving.update(subscriptions)

        def left() -> None:
            self._leaving.subtract(subscriptions)
            self._leaving = +self._leaving
            waiting, self._attaching = self._attaching, deque()
            for subscription, attach in waiting:
                self.attach(subscription, attach)

        def work() -> None:
            try:
                detach()
            finally:
                self.loop.later(left)

        self.loop.pool.submit(work)

    def attach(self, subscription: tuple[str, str], attach: Callable[[], None]) -> None:
        """Have the pool attach a consumer, once none is leaving that subscription. Of the thread."""
        if subscription in self._leaving:
            self._attaching.append((subscription, attach))
        else:
            self.loop.pool.submit(attach)

    def log_error(self, text: str, error: BaseException) -> None:
        self.log.log(logging.ERROR, "%s: %s by an error of duelog itself: %r", self.path, text, error, error=error)

    def forget_left(self) -> None:
        """Forget the numbers of connections to a process before this one that have not come back; raises nothing."""
        try:
            self.forget(self.store._numbered(CONNECTION))
        except DuelogError as error:  # the next process does it
            self.log.log(logging.WARNING, "%s: numbers of connections stay: %s", self.path, error)

    def forget(self, producers: set[tuple[str, str]]) -> None:
        """Forget the numbers of a connection that has ended, and has not come back."""
        names: dict[str, list[str]] = {}
        for topic, name in producers:
            if not self.producers[topic, name]:
                names.setdefault(topic, []).append(name)

        def forget() -> None:
            for topic, ended in names.items():
                try:
                    self.store._forget_numbers(topic, ended)
                except DuelogError as error:  # they stay, some bytes each
                    self.log.log(logging.WARNING, "%s: numbers of connections stay: %s", self.path, error)

        if names and not self.closing:
            self.loop.pool.submit(forget)


class _Consumer:
    """A consumer of a client, and the credits that this has given."""

    def __init__(self, calls: WireCalls, subscription: Subscription) -> None:
        self.subscription = subscription
        self.credits: deque[tuple[int, int, int | None]] = deque()
        """Number of the request, most messages, epoch ms at which it ends."""
        self._calls = calls
        self._lock = threading.Lock()
        """Held while one of them is answered."""
        self._looks_at: float | None = None
        """When the thread looks again by itself, by the monotonic clock."""
        self._wakes = False
        """True once the thread has been told to look."""
        subscription.add_waker(self._wake)

    def _wake(self) -> None:
        if not self._wakes and self.credits:
            self._wakes = True
            self._calls.service.loop.later(self._woken)

    def _woken(self) -> None:
        self._wakes = False
        self.serve()

    def serve(self) -> None:
        """Answer credits with what is due. Of the thread."""
        if self.credits:
            self._calls.in_thread_or_pool(self.subscription, self._answer_credits)

    def _answer_credits(self) -> None:
        subscription, answering = self.subscription, self._calls.answering
        with self._lock:
            while self.credits:
                number, most, _ = self.credits[0]
                try:
                    batch, again_ms = self._due(most)
                except BaseException as error:
                    self.credits.popleft()
                    self._calls.fail(number, "Subscription.receive", error)
                    continue
                if batch is not None or not subscription.may_wait:
                    self.credits.popleft()
                    answering.answer(number, RESULT, batch)
                    continue
                now_ms = subscription.clock.now_ms()
                for credit in list(self.credits):  # others come meanwhile
                    if credit[2] is not None and credit[2] <= now_ms:
                        self.credits.remove(credit)
                        answering.answer(credit[0], RESULT, None)
                again = [ms for ms in (again_ms, *(each[2] for each in list(self.credits))) if ms is not None]
                if again and self.credits:
                    self._look_again((min(again) - now_ms) / 1_000 - time.time() % 0.001)
                return

    def _due(self, most: int) -> tuple[Any, int | None]:
        """Messages that are due, None: none are; and when to look again."""
        poll = self.subscription.poll_columns
        messages, again_ms = poll(min(most, _AT_ONCE))
        if not messages:
            return None, again_ms
        if len(messages) == _AT_ONCE < most:  # payloads may be large: how many more is told by the first
            size = sum(map(len, messages.payloads)) // _AT_ONCE + 1
            further = min(most - _AT_ONCE, _MOST_RECEIVED_BYTES // size - _AT_ONCE)
            with suppress(DuelogError):  # some are handed out; what stops the store is raised when it is asked again
                messages += poll(further)[0] if further > 0 else []
        return messages, None

    def _look_again(self, seconds: float) -> None:
        if not isinstance(self.subscription.clock.wrapped, SystemClock):
            seconds = min(seconds, _MANUAL_PAUSE_S)
        at, loop = time.monotonic() + max(seconds, 0), self._calls.service.loop

        def note() -> None:
            if self._looks_at is None or at < self._looks_at:
                self._looks_at = at
                loop.at(at, lambda: self._look(at))

        note() if loop.is_here else loop.later(note)

    def _look(self, at: float) -> None:
        if self._looks_at == at:  # else an earlier one has taken its place
            self._looks_at = None
            self.serve()

    def recall(self, numbers: Sequence[int]) -> int:
        """End credits by the numbers of their requests: they are answered with no messages; how many."""
        with self._lock:
            ended = [each for each in list(self.credits) if each[0] in numbers]
            for each in ended:
                self.credits.remove(each)
        for each in ended:
            self._calls.answering.answer(each[0], RESULT, None)
        return len(ended)

    def end_credits(self, error: DuelogError) -> None:
        with self._lock:
            while self.credits:
                self._calls.answering.answer(self.credits.popleft()[0], ERROR, error)

    def detach(self, *, failed: bool = True) -> None:
        """Close the subscription; see `Subscription.close`."""
        self.subscription.remove_waker(self._wake)
        with self._lock:
            self.credits.clear()
            self.subscription.close(failed=failed)


class WireCalls:
    """The calls of one connection, and what they have made: consumers, sequences, producers."""

    def __init__(self, service: Service, answering: Answering) -> None:
        self.service = service
        self.answering = answering
        self.guard: Guard | None = None
        """Checks each call; None: the client may do everything."""
        self.consumers: dict[int, _Consumer] = {}
        self.introduced = ("", "")
        """The client's name and the version of its library, where it has said them."""
        self.reports = False
        """True once it has told what a worker's task does."""
        self._left = False
        self._attaching = threading.Lock()
        self._topics = lru_cache(_TOPICS)(service.store.topic)
        self._producers: set[tuple[str, str]] = set()
        """Topics and names under which it has numbered what it sent."""
        self._numbering: dict[str, str] = {}
        """Name of the producer of what it sent last, by the name of a topic as it was asked for."""
        self._sequences: dict[int, Iterator[Any]] = {}

    def producers(self) -> list[tuple[str, str]]:
        """Topics, and names under which it has numbered what it sent to them."""
        return list(self._producers)

    # -- beginning and end, of the thread --------------------------------------------------------------

    def begin(self, number: int, name: str, target: list[Any], arguments: list[Any], named: dict[str, Any]) -> None:
        """Begin a call, which is answered now or later."""
        try:
            if self.guard is not None:
                self.guard(*_need(name, target, arguments))
            quick = _QUICK.get(name)
            if quick is not None and quick(self, number, target, arguments, named):
                return
        except BaseException as error:
            self.fail(number, name, error)
            return
        self.service.loop.pool.submit(lambda: self._do(number, name, target, arguments, named))

    def stop_waiting(self) -> None:
        """Have calls that wait for messages come to their end; from any thread."""
        for consumer in list(self.consumers.values()):
            self.service.loop.later(partial(consumer.end_credits, closing()))

    def leave(self, ended: Callable[[], object]) -> None:
        """Hand to others what its consumers hold; `ended` is called then."""
        service = self.service
        with self._attaching:
            self._left = True
            consumers, self.consumers = list(self.consumers.values()), {}
        producers, self._producers = self._producers, set()
        if producers:
            service.producers.subtract(producers)
            service.loop.at(time.monotonic() + FORGET_S, lambda: service.forget(producers))
        failed = not service.closing  # what they hold counts as failed, but where the store is closed in order

        def detach() -> None:
            for consumer in consumers:
                with suppress(DuelogError):  # of a store that has failed, or is closed
                    consumer.detach(failed=failed)
            ended()

        if consumers:
            service.leave([(each.subscription.topic, each.subscription.name) for each in consumers], detach)
        else:
            ended()

    def in_thread_or_pool(self, subscription: Subscription, work: Callable[[], None]) -> None:
        """Do what looks at messages: here, or where that may wait for a disk in the pool."""
        work() if subscription.polls_at_once else self.service.loop.pool.submit(work)

    # -- what may wait, in a thread of the pool --------------------------------------------------------

    def _do(self, number: int, name: str, target: Any, arguments: Any, named: Any) -> None:
        """Do a call and answer it; raises nothing."""
        try:
            row = FACE.get(name)
            self.reports |= name == "Subscription.report_task"
            if name in ("next", "drop"):
                self._go_on(number, name, arguments)
            elif row is None:
                self._result(number, self.service.operations(name, named))
            elif name == "DelayedStore.transaction":
                self.answering.answer(number, RESULT, self._transact(arguments, named))
            elif "numbers" in named:
                once = self._done_once if name in ONCE else self._send_numbered
                self._result(number, once(row, target, arguments, named))
            else:
                self._result(number, self._call(row, target, arguments, named))
        except BaseException as error:
            self.fail(number, name, error)

    def fail(self, number: int, name: str, error: BaseException) -> None:
        """Answer a call with an error; one of duelog itself is logged."""
        if not isinstance(error, (DuelogError, OSError, MemoryError)):
            self.service.log_error(f"{name} is broken off", error)
        if name == "Topic.send" and type(error) is ClosedError:
            error = closing()  # the outbox has not taken it, as the store is being closed
        self.answering.answer(number, ERROR, error)

    def _result(self, number: int, result: Any) -> None:
        if isinstance(result, Iterator):
            if len(self._sequences) >= MOST_SEQUENCES:
                reason = f"{MOST_SEQUENCES} at most; read them to the end"
                raise InvalidArgument("sequences", len(self._sequences), reason)
            self._sequences[number] = result
            self._page(number, number, result)
        else:
            self.answering.answer(number, RESULT, columns(result))

    def _go_on(self, number: int, name: str, arguments: list[Any]) -> None:
        """Answer with the next items of a sequence, or end it: [number of the request that began it]."""
        match arguments:
            case [int(sequence)] if name == "next":
                self._page(number, sequence, self._sequences.get(sequence, iter(())))
            case [int(sequence)]:
                self._sequences.pop(sequence, None)
                self.answering.answer(number, RESULT, None)
            case _:
                raise InvalidArgument("arguments", arguments, "expected [number of a request]")

    def _page(self, number: int, sequence: int, items: Iterator[Any]) -> None:
        try:
            page, more = wire_values.pages(items)
        except BaseException:
            self._sequences.pop(sequence, None)
            raise
        if not more:
            self._sequences.pop(sequence, None)
        self.answering.answered([wire_values.items_answer(number, page, more=more)])

    def _topic(self, name: object) -> Topic:
        """A topic by name, the same object each time for some."""
        return self._topics(name) if isinstance(name, str) else self.service.store.topic(name)

    def _consumer(self, target: list[Any]) -> _Consumer:
        consumer = self.consumers.get(target[0]) if target and isinstance(target[0], int) else None
        if consumer is None:
            raise ClosedError("subscription")
        return consumer

    def _call(self, row: Row, target: list[Any], arguments: list[Any], named: dict[str, Any]) -> Any:
        owner = self._owner(row, target)
        member = getattr(type(owner), row.method)
        if isinstance(member, property):
            return getattr(owner, row.method)
        return _called(row.name, member, [owner, *arguments], named)

    def _transact(self, operations: list[Any], named: dict[str, Any]) -> list[Any]:
        for each in operations:
            if isinstance(each, dict) and each.get("consumer") is not None:
                each["consumer"] = self._consumer([each["consumer"]]).subscription
        return transact(self._transaction(named), operations, in_json=False)

    def _transaction(self, named: dict[str, Any]) -> Any:
        """A transaction, which is stored once where `numbers` has [name of a producer, number]."""
        transaction = self.service.store.transaction()
        if "numbers" in named:
            transaction.number(*self._number(named))
        return transaction

    def _number(self, named: dict[str, Any]) -> tuple[str, int]:
        """The number under which something is stored once: [name of a producer, number] in `numbers`."""
        match named.pop("numbers"):
            case [str(producer), int(number)] as numbers:
                self._use("", numbers)
                return producer, number
            case numbers:
                raise InvalidArgument("numbers", numbers, "expected [name of a producer, number]")

    def _done_once(self, row: Row, target: list[Any], arguments: list[Any], named: dict[str, Any]) -> Any:
        """Make one change, or send a batch to several topics, once: `numbers` as of a transaction."""
        owner = self._owner(row, target)
        if row.name == "DelayedStore.send_batch":
            return self._send_once(owner, arguments, named)
        transaction = self._transaction(named)
        bound = _bind(row.name, getattr(type(owner), row.method), [owner, *arguments], named)
        if row.owner == "Documents":
            return document_once(transaction, row.method, *bound.args, **bound.kwargs)
        return changed_once(transaction, row.method, bound.args, bound.kwargs)

    def _send_once(self, store: Store, arguments: list[Any], named: dict[str, Any]) -> Any:
        arguments = [store, *self._number(named), *arguments]
        ids = _called("DelayedStore.send_batch", type(store)._send_once, arguments, named)
        if ids is None:
            raise Disconnected("the messages are stored; their ids were lost with the connection", stored=True)
        return ids

    def _send_numbered(self, row: Row, target: list[Any], arguments: list[Any], named: dict[str, Any]) -> Any:
        """Send a batch whose messages are numbered: [name of a producer, first number] in `numbers`."""
        encoders = {"Topic.send_batch": "encode", "Topic.send_payloads": "encode_payloads"}
        match named.pop("numbers"), target:
            case [str(producer), int(first)], [name] if first >= 0 and row.name in encoders:
                topic = self._topic(name)
                self._use(topic.name, [producer])
                encode = getattr(type(topic.sender), encoders[row.name])
                encoded, now_ms = _called(row.name, encode, [topic.sender, *arguments], named)
                if not (topic.exists() or encoded.dedups):  # what is refused makes no topic
                    topic.sender.apply_policies(encoded.part(0, len(encoded)), now_ms)
                ids = topic.producer(producer).send_encoded(encoded, now_ms, first, keep_ids=False)
                return list(ids) if encoded.dedups else ids  # which of them were there before is told of each
        raise InvalidArgument("numbers", target, "expected [name of a producer, first number], of a batch")

    def _use(self, topic: str, numbers: Any) -> None:
        """Note a producer of the connection, whose numbers are forgotten some time after it has ended."""
        if not (isinstance(numbers, (list, tuple)) and numbers and str(numbers[0]).startswith(CONNECTION)):
            return
        producer = topic, str(numbers[0])
        with self._attaching:
            if producer not in self._producers and len(self._producers) < MOST_CONSUMERS and not self._left:
                self._producers.add(producer)
                self.service.producers[producer] += 1

    def _owner(self, row: Row, target: list[Any]) -> Any:
        if row.owner == "Subscription" and len(target) == 1:
            return self._consumer(target).subscription
        return object_of(self.service.store, row, target, self._topic)

    # -- what waits for nothing, in the thread ---------------------------------------------------------

    def _put(self, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """Send one message by the outbox: [payload], and by name what `Topic.send` takes, and its numbers."""
        if len(arguments) != 1 or len(target) != 1 or not named.keys() <= _SENT:
            return False
        topic, given, numbers = self._topic(target[0]), named.get, named.pop("numbers", None)
        if numbers is not None:
            numbers = Numbers.checked(tuple(numbers) if type(numbers) is list else numbers)
            if self._numbering.get(target[0]) != numbers.producer:
                self._use(topic.name, numbers)
                if len(self._numbering) >= _TOPICS:
                    self._numbering.clear()
                self._numbering[target[0]] = numbers.producer
        dedup, facts = None, _UNSAID
        if named:
            dedup = Dedup.checked(given("dedup_key"), given("dedup_for"), given("replace", False))
            times = given("deliver_at"), given("deliver_after")
            facts = (*times, given("key"), given("properties"), given("allow_past", False), given("ttl"))
        encoded = topic.sender.encode_one(arguments[0], *facts, dedup)
        item = topic.sender.outgoing(encoded, (self.answering, number), _outcomes, dedup=dedup, numbers=numbers)
        if not self.service.send(item):
            self.answering.hold(held=True)

            def put() -> None:
                try:
                    self.service.outbox.put(item)
                except BaseException as error:
                    self.fail(number, "Topic.send", error)
                self.service.loop.later(lambda: self.answering.hold(held=False))

            self.service.held.append(put)
        return True

    def _receive(self, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """Take a credit: [most messages, ms until it ends or None]."""
        consumer = self._consumer(target)
        match arguments:
            case [most, None]:
                deadline_ms = None
            case [most, int(timeout_ms)]:
                deadline_ms = consumer.subscription.clock.now_ms() + min(max(timeout_ms, 0), _LONGEST_MS)
            case _:
                raise InvalidArgument("arguments", arguments, "expected [most messages, ms or nil]")
        if type(most) is not int or most < 1:
            raise InvalidArgument("max_messages", most, "expected an int of at least 1")
        if len(consumer.credits) >= MOST_CREDITS:
            raise InvalidArgument("credits", len(consumer.credits), "too many are not answered")
        consumer.credits.append((number, most, deadline_ms))
        consumer.serve()
        return True

    def _recall(self, number: int, target: Any, arguments: Any, named: Any) -> bool:
        consumer = self._consumer(target)
        recall = lambda: self.answering.answer(number, RESULT, consumer.recall(arguments))  # noqa: E731 - it is passed on
        self.in_thread_or_pool(consumer.subscription, recall)
        return True

    def _ack(self, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """Acknowledge without waiting for the disk."""
        if len(arguments) != 1 or named:
            return False
        self.answering.answer(number, RESULT, self._consumer(target).subscription.ack(arguments[0]))
        return True

    def _introduce(self, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """Note who the client is, for figures: [0, name, version]; it says so again on each new connection."""
        match arguments:
            case [int(), str(name), str(version)] if len(name) <= _MOST_NAME and len(version) <= _MOST_NAME:
                self.introduced = name, version
            case _:
                raise InvalidArgument("arguments", arguments, f"expected [0, name, version] of {_MOST_NAME} characters")
        self.answering.answer(number, RESULT, None)
        return True

    # -- consumers -------------------------------------------------------------------------------------

    def _subscribe(self, number: int, target: Any, arguments: Any, named: Any, *, method: str) -> bool:
        """Attach a consumer, which the client knows by the number that it gives: [number, ...]."""

        def attach() -> list[object]:
            key, *rest = arguments or [None]
            if not isinstance(key, int) or key in self.consumers or len(self.consumers) >= MOST_CONSUMERS:
                raise InvalidArgument("consumer", key, f"expected another number, of {MOST_CONSUMERS} consumers")
            subscription: Subscription = self._call(FACE[method], target, rest, named)
            consumer = _Consumer(self, subscription)
            with self._attaching:
                is_late = self._left
                if not is_late:
                    self.consumers[key] = consumer
            if is_late:
                consumer.detach()
            return [subscription.topic, subscription.name, subscription.type, subscription.durable]

        topic = str(target[0]) if target else ""
        with suppress(InvalidArgument):
            topic = str(TopicName.parse(topic))
        name = str(named.get("name", arguments[1] if len(arguments) > 1 else None))
        self.service.attach((topic, name), lambda: self._do_and_answer(number, method, attach))
        return True

    def _unsubscribe(self, number: int, target: Any, arguments: Any, named: Any) -> bool:
        consumer = self.consumers.pop(target[0], None) if target and isinstance(target[0], int) else None
        failed = named.get("failed", True) is not False

        def leave() -> None:
            if consumer is not None:
                consumer.end_credits(ClosedError(f"subscription {consumer.subscription.name!r}"))
                consumer.detach(failed=failed)

        return self._in_pool(number, "Subscription.close", leave)

    def _in_pool(self, number: int, name: str, work: Callable[[], object]) -> bool:
        """Answer a call with what is done by a thread of the pool."""
        self.service.loop.pool.submit(lambda: self._do_and_answer(number, name, work))
        return True

    def _do_and_answer(self, number: int, name: str, work: Callable[[], object]) -> None:
        try:
            self.answering.answer(number, RESULT, work())
        except BaseException as error:
            self.fail(number, name, error)


_QUICK: dict[str, Callable[[WireCalls, int, Any, Any, Any], bool]] = {
    "introduce": WireCalls._introduce,
    "Topic.send": WireCalls._put,
    "Topic.subscribe": partial(WireCalls._subscribe, method="Topic.subscribe"),
    "Topic.reader": partial(WireCalls._subscribe, method="Topic.reader"),
    "Subscription.receive": WireCalls._receive,
    "Subscription.recall": WireCalls._recall,
    "Subscription.ack": WireCalls._ack,
    "Subscription.close": WireCalls._unsubscribe,
}
"""Calls that are begun in the server's thread; False: it is done as all else is."""


def _outcomes(results: list[tuple[tuple[Answering, int], Any]]) -> None:
    """Answer sends that became durable together: one piece of data a connection."""
    answers: dict[Answering, list[bytes]] = {}
    for (answering, number), outcome in results:
        if isinstance(outcome, Exception):
            frame = wire_values.answer(number, ERROR, pack_error(outcome))
        elif isinstance(outcome, MessageId):
            frame = wire_values.id_answer(number, outcome)
        else:  # of a duplicate: it is stored, its id not known
            frame = wire_values.answer(number, RESULT, b"\xc0")
        answers.setdefault(answering, []).append(frame)
    for answering, frames in answers.items():
        answering.answered(frames)


def _need(name: str, target: list[Any], arguments: list[Any]) -> tuple[Right, str | None]:
    """The right that a call needs, and the topic. A consumer's was looked at when it was attached."""
    row = FACE.get(name)
    if name in ("introduce", "next", "drop", "Subscription.recall") or (
        row is not None and row.owner == "Subscription"
    ):
        return Right.NONE, None
    if row is None or row.owner in ("DelayedStore", "Documents"):
        if name == "DelayedStore.effective_policies" and arguments:
            return Right.READ, str(arguments[0])
        return Right.ADMIN, None
    return row.right, str(target[0]) if target else None


def _bind(name: str, method: Callable[..., object], arguments: list[Any], named: dict[str, Any]) -> BoundArguments:
    """The arguments of a method, with its object, in its order. Raises InvalidArgument for those it does not take."""
    try:
        return signature_of(method).bind(*arguments, **named)
    except TypeError as error:
        raise InvalidArgument("arguments", [*arguments[1:], named], f"{name}: {error}") from None


def _called(name: str, method: Callable[..., Any], arguments: list[Any], named: dict[str, Any]) -> Any:
    """Call a method with its object. Raises as `_bind`, and as the method."""
    _bind(name, method, arguments, named)
    return method(*arguments, **named)


def closing() -> Refused:
    """The error that answers what a process that closes its store has not begun."""
    return Refused(CLOSING, _CLOSING_MESSAGE)
