"""A connection to the process that has a store open: requests by number, from any thread, answered in any order.

A call gives its frame to the socket and waits for its own answer. Where it is the only one under way its thread reads
the answer, so that this wakes no other first; else the connection's own reads for all: where one of several that wait
did, a send of 16 took a tenth more of a processor. When the connection ends, that thread connects again, for as long as
it was told to: consumers are attached again, calls that may be done twice are asked again, and the others end with
Disconnected, which says what is in doubt.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

from duelog.store.clock import HEAR_S
from duelog.store.errors import ClosedError, DuelogError, InvalidArgument
from duelog.store.files.process import here

from . import wire_values
from .wire import (
    CLOSING,
    ERROR,
    HEAD,
    LAST,
    MORE,
    MOST_GREETING_BYTES,
    Disconnected,
    Frames,
    NotAllowed,
    Refused,
    address_in,
    buffer,
    checked_greeting,
    framed,
)
from .wire_address import is_address

_log = logging.getLogger("duelog.connect")

GREETED_WITHIN_S = 10.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_QUIET_S = 0.05
"""The connection's thread reads once no other has for so long."""
_ALONE = 8
"""It leaves reading to those who call after so many answers that came while no other call was under way."""
_SEND_BUFFER = 1 << 20
"""Bytes that the socket takes before the other end has read them: a batch goes in one piece."""


_of_process: WeakSet[Connection] = WeakSet()


def _close_all() -> None:
    """Close a parent's connections in its child, so that the other end sees when the parent ends."""
    for each in list(_of_process):
        if each._socket is not None:
            each._socket.close()


os.register_at_fork(after_in_child=_close_all)


class Call:
    """One request, from its frame to its answer."""

    finished = False
    result: Any = None
    kind = 0
    error: BaseException | None = None
    connection = 0
    """By which the answer came, as `Connection.count` was then."""

    def __init__(
        self,
        number: int,
        name: str,
        frame: bytes,
        others: list[Any],
        repeated: bool,
        done: Callable[[Call], None] | None,
        reading: Callable[[Call], None],
    ) -> None:
        """reading: waits for it where its thread is to read."""
        self.reading = reading
        self.number = number
        self.name = name
        self.frame = frame
        self.others = others
        self.repeated = repeated
        """True where it is asked again after the connection has ended."""
        self.done = done
        self.ready = threading.Lock()
        self.ready.acquire()

    def finish(self) -> None:
        """Have who waits for it go on; again, where an interrupt has kept that from its end."""
        if self.done is not None and not self.finished:
            try:
                self.done(self)
            except Exception:
                _log.exception("what hears of %s failed", self.name)
        self.finished = True
        with suppress(RuntimeError):  # it has gone on
            self.ready.release()

    def attend(self) -> None:
        self.reading(self)
        while not self.finished:
            self.ready.acquire(timeout=HEAR_S)

    def wait(self) -> Any:
        """The result. Raises what the other process raised; Disconnected."""
        self.attend()
        if self.error is not None:
            raise self.error
        return self.result


class Connection:
    """A connection. A context manager; thread-safe; not to be used in a child process after fork."""

    def __init__(
        self, connect: Callable[[], Any], place: str, patience_s: float, credentials: tuple[str, bytes] | None = None
    ) -> None:
        """connect: makes a socket, None: nobody serves. patience_s: how long it tries to connect again; 0: never.

        credentials: their method, and themselves, of a connection over TCP.
        """
        self._credentials = credentials
        self.place = place
        self._make = connect
        self._patience_s = patience_s
        self._pid = here.pid
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._attached: dict[int, bytes] = {}
        """Requests that attach consumers, by the consumer's number: made again after each new connection."""
        self._lock = threading.RLock()
        """Held to write, and to change the socket."""
        self._changed = threading.Condition(self._lock)
        self._socket: Any = None
        self._frames = Frames(MOST_GREETING_BYTES)
        self._room = buffer()
        self._turn = threading.Lock()
        """Held to change who reads: the next three fields."""
        self._reader: object = None
        """The call whose thread reads, or the connection: its own thread does, or there is nothing to be read."""
        self._attended = 0
        """How often a call's thread has begun to read."""
        self._rests = False
        """True where the connection's own thread waits until it is called: another reads, for long."""
        self._alone = 0
        """Answers that came one after the other while no other call was under way."""
        self._called = threading.Lock()
        """Released to call the connection's own thread."""
        self._called.acquire()
        self._readable = select.poll()
        self._has_more: Callable[[], int] = int
        self._broken: str | None = None
        """Why there is nothing to be read."""
        self._closing: Exception | None = None
        """Why the other end does not go on: it closes the store, or refuses the credentials."""
        self._reading = False
        self._closed = False
        self.count = 0
        """How many connections have ended: what came by one of them is held no more."""
        self.facts: dict[str, Any] = {}
        _of_process.add(self)

    @classmethod
    def to(cls, path: Path, patience_s: float = 0) -> Self | None:
        """Connect to the process that has the store in a directory open; None: no process listens.

        Raises Disconnected where one does not answer, or refuses.
        """
        found = cls(lambda: _socket_in(path), str(path), patience_s)
        return found if found.connect() else None

    def connect(self) -> bool:
        """Connect; False: nobody serves. Raises Disconnected."""
        with self._lock:
            return self._socket is not None or self._connect()

    def _connect(self) -> bool:
        """Connect, attach consumers, and ask again what is under way. REQUIRES: the lock."""
        connection = self._make()
        if connection is None:
            return False
        frames = Frames(MOST_GREETING_BYTES)
        try:
            connection.settimeout(GREETED_WITHIN_S)
            self.facts = checked_greeting(_read(connection, frames), self.place)
            frames.most_bytes = 1 << 31
            if self._credentials is not None:
                connection.sendall(framed(wire_values.pack([1, "hello", [], list(self._credentials), {}])))
                error = _error_in(connection, frames)
                if error is not None:
                    raise error
            connection.settimeout(None)
            for key, frame in list(self._attached.items()):  # before anything else is asked
                connection.sendall(frame)
                error = _error_in(connection, frames)
                if error is not None:
                    if is_closing(error):
                        raise ConnectionResetError(str(error))
                    del self._attached[key]  # another has taken it, or it is deleted: asking it says that it is closed
        except OSError as error:
            connection.close()
            raise Disconnected(f"{self.place}: no answer from the process that has this store open: {error}") from error
        except BaseException:
            connection.close()
            raise
        self._socket, self._frames, self._closing, self._broken = connection, frames, None, None
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._has_more = getattr(connection, "pending", int)
        with suppress(OSError):  # the thread that reads finds out
            for number in sorted(self._calls):
                connection.sendall(self._calls[number].frame)
        if not self._reading:
            self._reading = True
            threading.Thread(target=self._run, name="duelog-connection", daemon=True).start()
        self._pass_on(self)
        self._changed.notify_all()
        return True

    @property
    def closed(self) -> bool:
        return self._closed

    # -- asking ----------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise ClosedError in a child process after fork, and once it is closed."""
        if self._pid != here.pid:
            raise ClosedError(
                f"{self.place}: connected by process {self._pid}; process {here.pid} is its child after fork, "
                "and connects for itself: the parent's connection"
            )
        if self._closed:
            raise ClosedError(f"the connection to {self.place}")

    def start(
        self,
        name: str,
        target: Sequence[object] = (),
        arguments: Sequence[object] = (),
        named: Mapping[str, object] | None = None,
        *,
        repeated: bool = False,
        done: Callable[[Call], None] | None = None,
        by: int | None = None,
    ) -> Call:
        """Ask for an operation without waiting for its answer. Raises Disconnected, ClosedError, InvalidArgument.

        by: the connection, by its `count`, that is asked; Disconnected: it has ended, and nothing was done.
        """
        self.check_process()
        number = next(self._numbers)
        others: list[Any] = []
        frame = wire_values.request(number, name, list(target), arguments, dict(named or {}), others)
        size = len(frame) - HEAD.size
        if size > (most := self.facts.get("most_frame_bytes", size)):
            raise InvalidArgument("arguments", size, f"{name}: a request has at most {most} bytes")
        call = Call(number, name, frame, others, repeated, done, self._attend)
        with self._lock:
            if self._socket is None:
                self._ready()
            if by is not None and by != self.count:
                raise Disconnected(f"{self.place}: the connection by which a message came has ended: it comes again")
            self._calls[number] = call
            try:
                self._socket.sendall(frame)
            except OSError:  # the thread that reads finds out, and decides on what is under way
                pass
            except BaseException:  # an interrupt, perhaps amid the frame: the next would be taken for its rest
                self._calls.pop(number, None)
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise
        if done is not None:
            self._call_thread()
        return call

    def _ready(self) -> None:
        """Wait until there is a connection. REQUIRES: the lock. Raises Disconnected."""
        while self._socket is None:
            if self.facts and not self._patience_s:  # what was attached to it is gone
                raise self._closing or Disconnected(f"{self.place}: the process that had this store open has ended")
            if self._reading:  # the thread connects again
                self._changed.wait(1.0)
            elif not self._connect():
                raise nobody(self.place)

    def call(self, name: str, *request: Any, repeated: bool = False, by: int | None = None) -> Any:
        """Ask for an operation and wait for its result, an iterator if it is a sequence."""
        call = self.start(name, *request, repeated=repeated, by=by)
        result = call.wait()
        return self._sequence(call) if call.kind in (MORE, LAST) else result

    def _sequence(self, first: Call) -> Iterator[Any]:
        """The items of a sequence, a page of which has come; further ones are asked for when they are wanted."""
        page: list[Any] = first.result
        more = first.kind == MORE
        try:
            while True:
                for item in page:
                    self.check_process()
                    yield item
                if not more:
                    return
                call = self.start("next", (), [first.number])
                page = call.wait()
                more = call.kind == MORE
        finally:
            if more and not self._closed and self._socket is not None:
                with suppress(Disconnected, ClosedError):
                    self.start("drop", (), [first.number])

    def ask(self, name: str, arguments: Mapping[str, object]) -> Any:
        """Do an operation of the table by its name, with arguments and result in JSON, as `Operations.ask`."""
        return self.call(name, (), (), arguments)

    def attach(
        self, name: str, target: Sequence[object], key: int, arguments: Sequence[object], named: Mapping[str, object]
    ) -> Any:
        """Attach a consumer, and again after each new connection until `detach`."""
        call = self.start(name, target, [key, *arguments], named, repeated=True)
        facts = call.wait()
        self._attached[key] = call.frame
        return facts

    def introduce(self, name: str) -> None:
        """Say who the client is, now and after each new connection; to a server that does not know this, nothing."""
        from importlib.metadata import version  # noqa: PLC0415 - it is much to import for a command

        with suppress(DuelogError):
            self.attach("introduce", (), 0, [name[:200], version("duelog")], {})

    def detach(self, key: int) -> bool:
        """Attach a consumer no more; False: there is no connection to which it is attached."""
        with self._lock:
            self._attached.pop(key, None)
            return self._socket is not None

    def next_number(self) -> int:
        """A number that no other call and no consumer of this connection has."""
        return next(self._numbers)

    # -- reading ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Read where nobody does, and connect again, until the connection is closed or cannot be made again."""
        while True:
            reason = self._watch()
            with self._lock:
                self._socket.close()
                self._socket = None
                self.count += 1
                again = bool(self._patience_s) and not self._closed
                kept = again and self._closing is not None
                calls = list(self._calls.values())
                over = [call for call in calls if call.finished or not (kept or (again and call.repeated))]
                for call in over:
                    del self._calls[call.number]
            for call in over:
                if not call.finished:
                    call.error = self._lost(call, reason)
                call.finish()
            if not (again and self._reconnect()):
                break
        with self._lock:
            self._reading = False
            left, self._calls = list(self._calls.values()), {}
            self._changed.notify_all()
        for call in left:
            call.error = self._lost(call, "it cannot be connected to again")
            call.finish()

    def _watch(self) -> str:
        """Read where no thread does that waits; why there is nothing more to be read."""
        seen = -1
        while self._broken is None:
            called = self._called.acquire(timeout=-1 if self._rests else _QUIET_S)
            with self._turn:
                is_quiet, seen = self._attended == seen, self._attended
                self._rests = self._reader is not None and is_quiet
                mine = self._reader is None and (is_quiet or self._closed or (called and bool(self._calls)))
                if mine:
                    self._reader = self
            if mine:
                self._alone = 0
                self._read()
                self._pass_on(self)
        return self._broken

    def _attend(self, call: Call) -> None:
        """Read until a call is finished, where no other is under way; else see to it that the thread reads."""
        try:
            with self._turn:
                if self._reader is None and (call.finished or len(self._calls) > 1):
                    self._call_thread()
                elif self._reader is None:
                    self._attended += 1
                    self._reader = call
            if self._reader is call:
                self._read(call)
        finally:
            try:
                self._pass_on(call)
            except BaseException:  # an interrupt as it began
                self._pass_on(call)
                raise

    def _read(self, call: Call | None = None) -> None:
        """Read answers until a call is finished; None: until those come one by one. REQUIRES: this thread reads.

        An interrupt of a call's thread while there is nothing does nothing, one amid an answer ends the connection,
        which is made again.
        """
        amid = False
        try:
            while not (call.finished if call is not None else self._alone >= _ALONE and not self._calls):
                if call is not None and not self._has_more():
                    while not self._readable.poll(HEAR_S * 1000):
                        pass
                amid = True
                bodies = self._frames.receive(self._socket, self._room)
                if bodies is None:
                    self._broken = "it has ended"
                    return
                for body in bodies:
                    self._take(body)
                amid = False
        except (OSError, InvalidArgument) as error:
            self._broken = str(error)
        finally:
            if amid and self._broken is None:
                self._broken = "a thread was interrupted amid an answer"

    def _pass_on(self, reader: object) -> None:
        """Have who reads read no more; the connection's thread does where something is under way."""
        if self._reader is reader:
            with self._turn:
                self._reader = None if self._broken is None else self
                if self._reader is self or self._rests or self._calls:
                    self._rests = False
                    self._call_thread()

    def _call_thread(self) -> None:
        with suppress(RuntimeError):  # it is called already
            self._called.release()

    def _take(self, body: bytes | memoryview) -> None:
        number = wire_values.number_of(body)
        call = self._calls.get(number)
        if call is None:
            if number == 0:  # no answer: why the other end does not go on
                reason = wire_values.error_of(wire_values.unpack(body)[2])
                if not is_closing(reason):
                    raise InvalidArgument("connection", self.place, str(reason))
                self._closing = reason
            return
        try:
            _, call.kind, value = wire_values.unpack(body, call.others)
            if call.kind == ERROR:
                call.error = wire_values.error_of(value)
                if is_closing(call.error) and self._patience_s:
                    call.repeated, call.error = True, None  # it was not begun, and is asked of the next process
                    return
            else:
                call.result, call.connection = value, self.count
        except Exception as error:
            call.error = error
        self._alone = 0 if len(self._calls) > 1 else self._alone + 1
        call.finish()
        self._calls.pop(number, None)  # behind it: what an interrupt breaks off is decided when the connection ends

    def _lost(self, call: Call, reason: str) -> Exception:
        if self._closing is not None:  # it has begun none of those that it has not answered
            return self._closing
        text = f"{self.place}: no answer from the process that has this store open: {reason}"
        return Disconnected(text, call.name)

    def _reconnect(self) -> bool:
        deadline, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while not self._closed and time.monotonic() < deadline:
            try:
                if self.connect():
                    return True
            except NotAllowed as error:
                self._closing = error
                return False
            except DuelogError:
                pass
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        return False

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect. Messages received and not acknowledged are handed out again."""
        self._closed = True
        with self._lock:
            connection = self._socket
        if connection is not None and self._pid == here.pid:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            self._call_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_closing(error: BaseException) -> bool:
    """True if a process has said that it closes its store, and has not begun what it was asked for."""
    return isinstance(error, Refused) and error.type == CLOSING


def is_gone(error: BaseException) -> bool:
    """True if the other process has ended, or is closing its store: what a consumer held goes to others."""
    return isinstance(error, Disconnected) or is_closing(error)


def nobody(place: str) -> Disconnected:
    """The error where no process has the store open."""
    how = f"DIRECTORY --listen {place.partition('://')[2].rstrip('/')}" if is_address(place) else place
    return Disconnected(f"{place}: no process serves this store; `duelog serve {how}` does")


def _socket_in(path: Path) -> socket.socket | None:
    unreachable = f"{path}: the process that has this store open cannot be asked"
    try:
        connection = socket.socket(socket.AF_UNIX)
    except OSError as error:  # no descriptor left
        raise Disconnected(f"{unreachable}: {error}") from error
    try:
        connection.settimeout(GREETED_WITHIN_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        with address_in(path) as address:
            connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise Disconnected(f"{unreachable}: {error}") from error
    return connection


def _read(connection: Any, frames: Frames) -> Any:
    """The next frame, of a connection that nobody else reads. Raises OSError, what the other end has said."""
    bodies: list[memoryview] | None = []
    try:
        while not bodies:
            bodies = frames.receive(connection, buffer())
            if bodies is None:
                raise ConnectionResetError("it has ended")
        found = list(map(wire_values.unpack, bodies))
    except InvalidArgument as error:
        raise ConnectionAbortedError(f"it does not speak this protocol: {error}") from error
    for each in found:  # that it does not go on may come right behind
        if isinstance(each, list) and len(each) == 3 and each[:2] == [0, ERROR]:
            raise _said(each[2])
    return found[0]


def _error_in(connection: Any, frames: Frames) -> BaseException | None:
    """The error that the next answer is. Raises as `_read`."""
    match _read(connection, frames):
        case [int(), int(kind), value]:
            return _said(value) if kind == ERROR else None
        case other:
            raise ConnectionAbortedError(f"it does not speak this protocol: {str(other)[:200]}")


def _said(error: object) -> BaseException:
    try:
        said: BaseException = wire_values.error_of(error)
    except (TypeError, ValueError) as strange:
        raise ConnectionAbortedError(f"it does not speak this protocol: {str(error)[:200]}") from strange
    return said
