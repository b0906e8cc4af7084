"""Sending without waiting: messages in flight, bounded in bytes, which one thread writes group by group.

What waits when the thread takes it up, of whatever topics, is one group of the write-ahead log: many small sends are
one flush. Messages are written in the order in which they were put in. Who put them in hears of a group at once, by
one call, and not message by message. Memory is bounded by back-pressure: a thread that would put in more than
`max_in_flight_bytes` waits until something has been written, or is told that there is no capacity.
"""

import _thread
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from errno import EAGAIN
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from duelog.partitions.producer_numbers import BLOCK_BITS
from duelog.store.clock import Monitor
from duelog.store.errors import ClosedError, DuelogError, InvalidArgument, NotReplicated, ResourceShortage
from duelog.store.files.process import here
from duelog.store.listener import call_supplied
from duelog.store.message import Dedup
from duelog.store.names import TopicName, validate_subscription_name
from duelog.store.position import MessageId

from ..topics.producer_state import MAX_SEQUENCE
from ..topics.topic_state import TopicState

_GROUP_ENTRIES = 5_000
_MESSAGE_BYTES = 500
"""Memory of a message in flight besides its body: its fields, and places in queues."""

_ROW_BYTES = 192
"""Most bytes of a row of the write-ahead log besides a body or numbers."""

_IDLE, _CALLED, _WRITING = range(3)
"""No thread writes; the outbox's own is to; one does."""

_BLOCK_BYTES = 8_192
"""Most bytes of the numbers of a range in a row."""


class Duplicate(Enum):
    """Outcome of a message whose numbers are all stored already; `DUPLICATE` is its one value."""

    DUPLICATE = "duplicate"


DUPLICATE = Duplicate.DUPLICATE

PutOutcome = MessageId | Duplicate | Exception
"""Outcome of a message: its id once it is durable, DUPLICATE, or the DuelogError that kept it from being stored."""

Done = Callable[[list[tuple[Any, PutOutcome]]], object]
"""Hears what became of messages: (token, outcome) of each, in the order in which they were put in."""


_check_producer = lru_cache(1_024)(validate_subscription_name)
"""Those that were checked are known: a connection's are the same for each message."""


class Numbers(NamedTuple):
    """The numbers of a message of a named producer, `last` included."""

    producer: str
    first: int
    last: int

    @classmethod
    def checked(cls, numbers: tuple[str, int, int]) -> Self:
        """Check the numbers of a caller. Raises InvalidArgument."""
        if not isinstance(numbers, tuple) or len(numbers) != 3:
            raise InvalidArgument("numbers", numbers, "expected (name of a producer, first number, last number)")
        name, first, last = numbers
        (_check_producer if isinstance(name, str) else validate_subscription_name)(name, "producer")
        if type(first) is not int or type(last) is not int or not 0 <= first <= last < MAX_SEQUENCE:
            raise InvalidArgument("numbers", numbers, f"expected first <= last, ints from 0 to {MAX_SEQUENCE - 1}")
        return cls(name, first, last)


class Outgoing(NamedTuple):
    """One checked message, delay policies applied, and the callback for its outcome."""

    name: TopicName
    topic: Callable[[int], TopicState]
    """The topic, created at a time where there is none; one object for the messages that one face of a topic sends."""
    due_ms: int
    now_ms: int
    body: bytes
    overridden: bool
    numbers: Numbers | None
    """Once these are all stored it is stored."""
    dedup: Dedup | None
    """The key by which it may be there, or take the place of another."""
    token: Any
    done: Done
    wanted: Callable[[Any], bool] | None
    """Asked with the token before the message is written: False takes it back, and nothing is heard of it. A message
    for which it raises is written."""

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return len(self.body) + _MESSAGE_BYTES

    @property
    def group_size(self) -> int:
        """Bytes of a group, at most."""
        size = len(self.body) + _ROW_BYTES
        if self.dedup is not None:
            size += _ROW_BYTES + 4 * len(self.dedup.key)
        if self.numbers is not None:
            producer, first, last = self.numbers
            row = _ROW_BYTES + 4 * len(producer)
            if first == last:
                return size + row
            size += min((last >> BLOCK_BITS) - (first >> BLOCK_BITS) + 1, 2) * (row + _BLOCK_BYTES)
        return size


class Outbox:
    """Messages on their way into a store. Thread-safe."""

    def __init__(
        self,
        write: Callable[[Sequence[Outgoing]], Sequence[PutOutcome]],
        max_bytes: int,
        group_bytes: int,
        path: Path,
        settle: Callable[[TopicName], None],
    ) -> None:
        """`write` stores messages of up to `group_bytes` together and says what became of each.

        `settle` waits until the copy has what was written, where a topic asks for that; it raises NotReplicated.

        `path` is the store's, for what errors say.
        """
        self._write = write
        self._settle = settle
        self._path = path
        self._max_bytes = max_bytes
        self._group_bytes = group_bytes
        self._condition = Monitor()
        self._items: deque[Outgoing] = deque()
        self._called = threading.Condition(self._condition.lock)
        """Notified for the outbox's own thread alone."""
        self._state = _IDLE
        self._bytes = 0
        self._closed = False
        self._thread: int | None = None
        """The outbox's own thread, from the first message to the end."""
        self._writer: int | None = None
        """The thread that writes."""
        self._process = here.pid

    def put(self, item: Outgoing, *, wait: bool = True) -> bool:
        """Take one message; False: there is no capacity, and `wait` is False. Raises ClosedError, ResourceShortage.

        A message larger than the bound is taken when nothing else is in flight. The thread that writes (a `done`, a
        callback of a future) never waits, as no other thread would make space.
        """
        size = item.size
        with self._condition.lock:
            while not self._closed and self._bytes and self._bytes + size > self._max_bytes:
                if self._writer == threading.get_ident():
                    break
                if not wait:
                    return False
                self._condition.wait()
            if self._closed:
                raise ClosedError("store")
            self._bytes += size
            try:
                self._items.append(item)
                if self._state == _IDLE:
                    self._begin()
            except BaseException:
                with suppress(IndexError):  # the thread has taken it
                    self._items.pop()
                    self._bytes -= size
                    self._condition.notify_all()
                raise
        return True

    def has_room(self, size: int, before: int) -> bool:
        """True if a message of `size` bytes is within the bound, or nothing else is in flight.

        before: bytes of messages that the caller puts in together with it.
        """
        others = self._bytes + before
        return not others or others + size <= self._max_bytes

    def put_together(self, items: Sequence[Outgoing], size: int) -> bool:
        """Take messages of `size` bytes, for which `has_room` was asked; True: the caller is the thread that writes.

        It calls `write` next. False: another thread is at it, and writes these too. Raises ClosedError.
        """
        with self._condition.lock:
            if self._closed:
                raise ClosedError("store")
            self._bytes += size
            self._items += items
            if self._state != _IDLE:
                return False
            self._state = _WRITING
            return True

    def write(self) -> None:
        """Write until nothing waits. REQUIRES: `put_together` has said so. Raises nothing."""
        self._writer = threading.get_ident()
        self._work()

    def _begin(self) -> None:
        """Have the outbox's own thread write. REQUIRES: the lock. Raises ResourceShortage."""
        if self._thread is None:
            try:
                _thread.start_new_thread(self._run, ())  # one step: an interrupt leaves no lock of a pool taken
            except RuntimeError as error:
                raise ResourceShortage(self._path, "a thread that writes cannot be started", EAGAIN) from error
        self._state = _CALLED
        self._called.notify_all()

    def _run(self) -> None:
        """Write whenever it is called, until the outbox is closed."""
        with self._condition.lock:
            if self._thread is not None:  # an interrupt kept its caller from knowing of the first
                return
            self._thread = threading.get_ident()
        while True:
            with self._condition.lock:
                while self._state != _CALLED and not self._closed:
                    self._called.wait()
                if self._state != _CALLED:
                    self._thread = None
                    self._condition.notify_all()
                    return
                self._state = _WRITING
            self.write()

    def _work(self) -> None:
        """Write what waits, group by group, until nothing does. Nothing that others supplied or raise ends it."""
        while items := self._take():
            wanted = [
                item for item in items if item.wanted is None or call_supplied(item.wanted, item.token) is not False
            ]
            outcomes: Sequence[PutOutcome] = []
            try:
                if wanted:
                    outcomes = self._settled(wanted, self._write(wanted))
            except Exception as error:
                outcomes = [error] * len(wanted)
            except BaseException as error:
                broken_off = DuelogError(f"writing was broken off by {error!r}: the message may be stored, or not")
                broken_off.__cause__ = error
                outcomes = [broken_off] * len(wanted)
            size = sum([item.size for item in items])
            with self._condition.lock:
                self._bytes -= size
                self._condition.notify_all()
            heard: dict[Done, list[tuple[Any, PutOutcome]]] = {}
            for item, outcome in zip(wanted, outcomes, strict=True):
                results = heard.get(item.done)
                if results is None:
                    results = heard[item.done] = []
                results.append((item.token, outcome))
            for done, results in heard.items():
                call_supplied(done, results)

    def _settled(self, items: Sequence[Outgoing], outcomes: Sequence[PutOutcome]) -> Sequence[PutOutcome]:
        """Wait for the copy; the outcomes, with the error of those that are not known to be there."""
        errors: dict[TopicName, NotReplicated] = {}
        for name in {item.name for item in items}:
            try:
                self._settle(name)
            except NotReplicated as error:
                errors[name] = error
        if not errors:
            return outcomes
        stored = zip(items, outcomes, strict=True)
        return [each if isinstance(each, Exception) else errors.get(item.name, each) for item, each in stored]

    def _take(self) -> list[Outgoing]:
        """Take the next group to write. REQUIRES: one caller at a time."""
        taken: list[Outgoing] = []
        waiting, room = self._items, self._group_bytes
        if len(waiting) == 1:
            return [waiting.popleft()]
        while waiting and len(taken) < _GROUP_ENTRIES:
            room -= waiting[0].group_size
            if room < 0 and taken:
                break
            taken.append(waiting.popleft())
        if not taken:
            with self._condition.lock:
                if waiting:
                    return self._take()
                self._state, self._writer = _IDLE, None
                self._condition.notify_all()
        return taken

    def close(self) -> None:
        """Refuse further messages, and write those in flight. A thread that waits for capacity gets ClosedError.

        Raises DuelogError, with nothing done, in a callback, whose end it would wait for for ever.
        """
        if here.pid != self._process:
            return  # what waits, and who writes it, is the parent's
        if self._writer == threading.get_ident():
            raise DuelogError("a callback of send_async or put cannot close the store, which waits for it to end")
        with self._condition.lock:
            self._closed = True
            self._condition.notify_all()
            self._called.notify_all()
            while self._thread is not None or self._items or self._state != _IDLE:
                self._condition.wait()
