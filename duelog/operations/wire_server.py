"""The server of an open store: one thread for all connections, and a few that do what may wait for a disk.

The thread reads requests and answers at once what waits for nothing: messages put into the outbox, messages that are
due, acknowledgements in memory. All else is done by threads of a pool, and answered as it is ready. A `receive` is a
credit: it is answered when messages are due, or its time is over; nothing is asked again meanwhile.

Who is heard at the socket: this user, and root, by the socket's mode and by the peer's credentials. A peer costs no
more than its bounds: bytes of a frame, requests that are not answered, answers that it does not read, consumers. A
store works without a socket: where none can be made that is logged.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import queue
import selectors
import socket
import stat
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from importlib.metadata import version
from inspect import Signature, signature
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from duelog.store.clock import SystemClock
from duelog.store.errors import ClosedError, DuelogError, InvalidArgument
from duelog.store.limited_log import LimitedLog

from . import wire_values
from .face_table import FACE, TRANSACTED, Row
from .operation import Right
from .wire import (
    CLOSING,
    CONNECTION,
    ERROR,
    GREETED,
    MOST_GREETING_BYTES,
    RESULT,
    SOCKET,
    VERSION,
    Disconnected,
    Frames,
    NotAllowed,
    Refused,
    address_in,
    buffer,
    framed,
)
from .wire_values import columns, pack, pack_error, unpack

Guard: TypeAlias = Callable[[Right, str | None], None]
"""Raises NotAllowed where a client has not this right in the namespace of a topic, None: in the whole store."""

Admit: TypeAlias = Callable[[str, bytes], Guard]
"""Says what a client may do, by its method and credentials. In a thread that may wait. Raises NotAllowed."""

Store: TypeAlias = Any
Topic: TypeAlias = Any
Subscription: TypeAlias = Any
"""Objects of the face, which stands above the engine, and this module below it."""

MOST_CLIENTS = 4_096
MOST_REQUESTS = 1_024
"""Requests of a connection that are not answered; further ones are not read."""

MOST_UNREAD_BYTES = 16 << 20
"""Bytes of answers that a peer has not read; its requests are not read meanwhile."""

MOST_CONSUMERS = 1_024
MOST_SEQUENCES = 64
STALLED_S = 30.0
"""How long a peer may leave its answers unread, or a frame without its end."""

LAST_ANSWER_S = 2.0
"""The same, while the store is being closed."""

FRAME_BYTES = 1 << 20
"""Largest frame, besides a whole group of the write-ahead log."""

FORGET_S = 600.0
"""How long the numbers of a connection's sends are known after it has ended: a client may come back for less."""

_THREADS = 16
_AT_ONCE = 64
_MOST_RECEIVED_BYTES = 4 << 20
_TOPICS = 256
_PAUSE_S = 1.0
_MANUAL_PAUSE_S = 0.02
_CLOSING_MESSAGE = "the process that has this store open is closing it, and has not done this"
_SENT = {"deliver_at", "deliver_after", "key", "properties", "allow_past", "ttl", "dedup_key", "dedup_for", "replace",
         "numbers"}  # fmt: skip

_log = logging.getLogger("duelog.control")


class ClientOperations(Protocol):
    """The operations of one client: `Operations`, which stands above the engine."""

    def ask(self, name: str, arguments: Mapping[str, object]) -> object: ...
    def close(self, *, failed: bool = True) -> None: ...


MakeOperations: TypeAlias = "Callable[[Waiting], ClientOperations]"
"""Makes the operations of a client, which waits in the given way."""


class Waiting(threading.Event):
    """How a thread waits for a client's messages: until it is woken, or the client goes."""

    gone = False
    wake = threading.Event.set

    def wait(self, seconds: float | None = None) -> bool:
        """False: the client has gone."""
        super().wait(seconds)
        return not self.gone


class _Pool:
    """Threads that do what may wait, begun as they are needed."""

    def __init__(self, most: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._most = most
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._stopped = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have it done, by the caller once the threads have been ended; `work` raises nothing."""
        with self._lock:
            stopped = self._stopped
            self._free -= 1
            if not stopped and self._free < 0 and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name="duelog-request", daemon=True)
                with suppress(RuntimeError):  # none can be started: those that there are do it
                    thread.start()
                    self._threads.append(thread)
                    self._free += 1
            if not stopped:
                self._work.put(work)
        if stopped:
            work()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._free += 1

    def stop(self) -> None:
        """End the threads, once they have done what there is."""
        with self._lock:
            self._stopped = True
            for _ in self._threads:
                self._work.put(None)
        for thread in self._threads:
            thread.join()


class _Consumer:
    """A consumer of a peer, and the credits that it has given."""

    def __init__(self, peer: _Peer, subscription: Subscription) -> None:
        self.peer = peer
        self.subscription = subscription
        self.credits: deque[tuple[int, int, int | None]] = deque()
        """Number of the request, most messages, epoch ms at which it ends."""
        self.lock = threading.Lock()
        """Held while one of them is answered."""
        self.looks_at: float | None = None
        """When the thread looks again by itself, by the monotonic clock."""
        self.wakes = False
        """True once the thread has been told to look."""
        self.wake: Callable[[], object] = bool


class _Peer:
    """One connection. What the server's thread alone uses stands first."""

    def __init__(self, connection: Any, most_bytes: int) -> None:
        self.socket = connection
        self.frames = Frames(most_bytes)
        self.consumers: dict[int, _Consumer] = {}
        self.topics: OrderedDict[str, Topic] = OrderedDict()
        self.producers: set[tuple[str, str]] = set()
        """Topics and names under which it has numbered what it sent."""
        self.events = 0
        """Events that the selector looks for; 0: it is not in the selector."""
        self.held = False
        """True while it is not read because something that it asked for has no capacity."""
        self.corked: list[bytes] | None = None
        self.requests: deque[bytes | memoryview] = deque()
        """Those that have come, and wait because others are under way."""
        self.since = time.monotonic()
        """When it last was as it should be: its answers read, its frames whole."""
        self.admit: Admit | None = None
        """Checks its credentials; None: that is done, or need not be."""
        self.guard: Guard | None = None
        self.operations: ClientOperations | None = None
        self.waiting = Waiting()
        self.asking = threading.Lock()
        self.sequences: dict[int, Iterator[Any]] = {}
        self.counting = threading.Lock()
        self.under_way = 0
        """Requests that are not answered."""
        self.lock = threading.Lock()
        """Held to change the fields below, and while something is sent."""
        self.outbox: deque[bytes] = deque()
        self.unread = 0
        self.closed = False


class WireServer:
    """The socket, its thread, and those that do requests. `stop` and `join` end them."""

    def __init__(self, store: Store, path: Path, operations: MakeOperations, group_bytes: int) -> None:
        """path: the store's directory, whose lock this process has. group_bytes: of the largest batch."""
        self._store = store
        self._path = path
        self._operations = operations
        self._most_bytes = FRAME_BYTES + group_bytes
        self._peers: set[_Peer] = set()
        self._stopping = False
        self._ended = False
        self._calls: deque[Callable[[], object]] = deque()
        self._ready: deque[_Consumer] = deque()
        self._woken = False
        self._timers: list[tuple[float, int, _Consumer]] = []
        self._timer_numbers = itertools.count()
        self._sockets: list[socket.socket] = []
        """A pair that wakes the thread, then the one that listens."""
        self._doors: dict[socket.socket, tuple[Callable[[socket.socket], Any] | None, Admit]] = {}
        """Those that listen for clients from elsewhere."""
        self._ended_producers: deque[tuple[float, set[tuple[str, str]]]] = deque()
        """When the producers of connections that have ended are forgotten, by the monotonic clock."""
        self._selector: selectors.BaseSelector | None = None
        self._buffer = buffer()
        self._pool = _Pool(_THREADS)
        self._long = threading.Semaphore(MOST_CONSUMERS)
        """Threads of requests that wait for messages."""
        self._limited = LimitedLog(_log)
        self._thread = threading.Thread(target=self._run, name="duelog-control", daemon=True)
        _of_process.add(self)

    # -- beginning and end -----------------------------------------------------------------------------

    def start(self) -> bool:
        """Listen, and start the thread. False: no socket can be made here, which is logged."""
        try:
            self._sockets += socket.socketpair()
            for each in self._sockets:
                each.setblocking(False)
            listener = socket.socket(socket.AF_UNIX)
            self._sockets.append(listener)
            with address_in(self._path) as address:
                with suppress(FileNotFoundError):
                    if not stat.S_ISSOCK(os.lstat(address).st_mode):
                        raise FileExistsError(f"{SOCKET} is no socket")
                    os.unlink(address)  # of a process that was killed
                listener.bind(address)
                os.chmod(address, 0o600)  # before it listens: no client has been let in
            listener.listen(128)
            listener.setblocking(False)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            _log.warning("%s: takes no commands while it is open: %s", self._path, error)
            self._close_sockets()
            return False
        return True

    def listen(self, host: str, port: int, tls: Any, admit: Admit) -> int:
        """Take clients at an address too, whose credentials `admit` checks; the port. Raises OSError.

        tls: an SSLContext, None: nothing is encrypted.
        """
        listener = socket.create_server((host, port), backlog=128, family=_family(host))
        listener.setblocking(False)
        encrypt: Callable[[socket.socket], Any] | None = None
        if tls is not None:
            from .wire_tls import EncryptedPeer  # noqa: PLC0415 - ssl is much to import for stores that do without

            encrypt = partial(EncryptedPeer, tls)
        self._doors[listener] = (encrypt, admit)

        def watch() -> None:
            if self._selector is not None:
                self._selector.register(listener, selectors.EVENT_READ, None)

        self._later(watch)
        bound: int = listener.getsockname()[1]
        return bound

    def stop(self) -> None:
        """Take no more clients and no more requests; those that wait come to an end. Of the process that started it."""
        if self._stopping:
            return
        self._stopping = True
        with suppress(OSError), address_in(self._path) as address:
            os.unlink(address)
        for peer in list(self._peers):
            peer.waiting.gone = True
            peer.waiting.set()
        self._wake()

    def join(self) -> None:
        """After `stop`: wait until the requests that were being done are answered."""
        deadline = time.monotonic() + LAST_ANSWER_S
        while (peers := list(self._peers)) and time.monotonic() < deadline:
            if not any(peer.under_way or peer.unread for peer in peers):
                break
            time.sleep(0.001)
        self._pool.stop()
        self._ended = True
        self._wake()
        self._thread.join()
        self._close_sockets()

    def forget(self) -> None:
        """In a child after fork: close what is the parent's, so that clients see when the parent ends."""
        self._stopping = self._ended = True
        for peer in self._peers:
            peer.socket.close()
        if self._selector is not None:
            self._selector.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in (*self._sockets, *self._doors):
            each.close()

    # -- the thread ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Have the thread look at what there is to do; from any thread, without a lock."""
        if not self._woken:
            self._woken = True
            with suppress(OSError):  # full: it is woken anyway; closed
                self._sockets[1].send(b"x")

    def _later(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self._wake()

    def _run(self) -> None:
        woken, _, *listeners = self._sockets
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            for each in (woken, *listeners):
                selector.register(each, selectors.EVENT_READ, None)
            while not self._ended:
                try:
                    self._turn(selector, woken)
                except Exception as error:
                    self._limited.log(logging.ERROR, "%s: a turn has failed: %r", self._path, error, error=error)
            for peer in list(self._peers):
                self._send(peer, wire_values.answer(0, ERROR, pack_error(_closing())))
                self._part(peer)

    def _turn(self, selector: selectors.BaseSelector, woken: socket.socket) -> None:
        now = time.monotonic()
        timeout = max(self._timers[0][0] - now, 0) if self._timers else (_PAUSE_S if self._peers else None)
        if timeout is None and self._ended_producers:
            timeout = max(self._ended_producers[0][0] - now, 0)
        for key, events in selector.select(timeout):
            if key.data is None:
                if key.fileobj is woken:
                    with suppress(BlockingIOError):
                        while woken.recv(1 << 12):
                            pass
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]  # a socket
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            except Exception as error:
                text = "%s: a connection is ended by an error of duelog itself: %r"
                self._limited.log(logging.ERROR, text, self._path, error, error=error)
                self._part(key.data)
        self._woken = False
        while self._calls:
            self._calls.popleft()()
        while self._ready:
            consumer = self._ready.popleft()
            consumer.wakes = False
            self._serve(consumer)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            at, _, consumer = heapq.heappop(self._timers)
            if consumer.looks_at == at:  # else an earlier one has taken its place
                consumer.looks_at = None
                self._serve(consumer)
        if self._ended_producers and self._ended_producers[0][0] <= now and not self._stopping:
            self._forget(now)
        if self._stopping:
            for peer in list(self._peers):
                for consumer in list(peer.consumers.values()):
                    while consumer.credits:
                        self._answer(peer, consumer.credits.popleft()[0], ERROR, _closing())
        for peer in [each for each in self._peers if now - each.since > STALLED_S]:
            if peer.unread or peer.frames.begun or peer.admit is not None:
                _log.info("%s: a connection ends: its peer does not go on", self._path)
                self._part(peer)
            else:
                peer.since = now

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor left
            self._limited.log(logging.WARNING, "%s: a client cannot be taken: %s", self._path, error)
            time.sleep(_PAUSE_S / 10)
            return
        connection.setblocking(False)
        encrypt, admit = self._doors.get(listener, (None, None))
        if admit is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        refusal = None if _is_trusted(connection) else "this user may not"
        if refusal is None and len(self._peers) >= MOST_CLIENTS:
            refusal = f"{MOST_CLIENTS} clients are connected; try again"
        if refusal is not None:
            with connection, suppress(OSError):
                connection.send(framed(wire_values.answer(0, ERROR, pack_error(Disconnected(refusal)))))
            return
        most_bytes = self._most_bytes if admit is None else MOST_GREETING_BYTES
        peer = _Peer(connection if encrypt is None else encrypt(connection), most_bytes)
        peer.admit = admit
        self._peers.add(peer)
        facts = {
            "server": version("duelog"),
            "pid": os.getpid(),
            "most_frame_bytes": self._most_bytes,
            "most_requests": MOST_REQUESTS,
            "most_message_bytes": self._store.config.max_message_bytes,
            "capabilities": sorted(FACE),
        }
        self._send(peer, pack([GREETED, VERSION, facts]))
        self._watch(peer)

    def _watch(self, peer: _Peer) -> None:
        """Have the selector look for what is wanted of a peer now. Of the thread."""
        selector = self._selector
        if selector is None or peer.closed:
            return
        wanted = selectors.EVENT_WRITE if peer.outbox and not getattr(peer.socket, "stuck", False) else 0
        if not (peer.held or peer.requests) and peer.under_way < MOST_REQUESTS and peer.unread < MOST_UNREAD_BYTES:
            wanted |= selectors.EVENT_READ
        if wanted != peer.events:
            if not peer.events:
                selector.register(peer.socket, wanted, peer)
            elif not wanted:
                selector.unregister(peer.socket)
            else:
                selector.modify(peer.socket, wanted, peer)
            peer.events = wanted

    def _read(self, peer: _Peer) -> None:
        if not peer.frames.begun:
            peer.since = time.monotonic()
        try:
            # An encrypted connection is read and written by one thread at a time.
            with nullcontext() if type(peer.socket) is socket.socket else peer.lock:
                bodies = peer.frames.receive(peer.socket, self._buffer)
        except BlockingIOError:
            self._flush(peer)
            return
        except OSError:
            bodies = None
        except InvalidArgument as error:
            self._refuse(peer, error)
            return
        if bodies is None:
            self._part(peer)
            return
        if bodies:
            peer.since = time.monotonic()
            self._take(peer, bodies)
        pending = getattr(peer.socket, "pending", None)
        if pending is not None and not peer.closed and (pending() or peer.outbox):
            self._later(lambda: None if peer.closed else self._read(peer))  # which the selector does not tell

    def _take(self, peer: _Peer, bodies: Sequence[bytes | memoryview] = ()) -> None:
        """Take requests that have come; what is answered meanwhile is sent as one piece. Those too many wait."""
        peer.corked = []
        broken: InvalidArgument | None = None
        waiting = peer.requests
        try:
            waiting += bodies
            while waiting and not (peer.closed or peer.held) and peer.under_way < MOST_REQUESTS:
                body = waiting.popleft()
                try:
                    request = unpack(body)
                except InvalidArgument as error:
                    self._refuse_one(peer, body, error)
                    continue
                self._request(peer, request)
            for at, body in enumerate(waiting):
                waiting[at] = bytes(body)  # the buffer is used again
        except InvalidArgument as error:
            broken = error
        finally:
            corked, peer.corked = peer.corked, None
            if corked:
                self._send_data(peer, b"".join(corked))
        if broken is not None:
            self._refuse(peer, broken)
        self._watch(peer)

    def _refuse_one(self, peer: _Peer, body: bytes | memoryview, error: InvalidArgument) -> None:
        """Answer a request whose arguments cannot be read. Raises InvalidArgument if it is none."""
        number = wire_values.number_of(body)
        if not number or body[0] != 0x95:
            raise error
        with peer.counting:
            peer.under_way += 1
        self._answer(peer, number, ERROR, error)

    def _refuse(self, peer: _Peer, error: InvalidArgument) -> None:
        """End a connection whose stream is of no use any more."""
        self._send(peer, wire_values.answer(0, ERROR, pack_error(error)))
        self._part(peer)

    def _part(self, peer: _Peer) -> None:
        """End a connection: what its consumers hold is handed to others. Of the thread."""
        with peer.lock:
            if peer.closed:
                return
            peer.closed = True
            if peer.events and self._selector is not None:
                self._selector.unregister(peer.socket)
            peer.socket.close()  # while no other thread sends: its number is the next connection's
        peer.waiting.gone = True
        peer.waiting.set()
        if peer.producers:
            self._ended_producers.append((time.monotonic() + FORGET_S, peer.producers))
        consumers, peer.consumers = list(peer.consumers.values()), {}
        operations = peer.operations

        failed = not self._stopping  # what they hold counts as failed, but where the store is closed in order

        def leave() -> None:
            for consumer in consumers:
                consumer.credits.clear()
                with suppress(DuelogError):  # of a store that has failed, or is closed
                    self._detach(consumer, failed=failed)
            if operations is not None:
                with suppress(DuelogError):
                    operations.close(failed=failed)
            self._peers.discard(peer)

        leave() if self._ended or not (consumers or operations) else self._pool.submit(leave)

    def _detach(self, consumer: _Consumer, *, failed: bool = True) -> None:
        consumer.subscription.remove_waker(consumer.wake)
        with consumer.lock:
            consumer.subscription.close(failed=failed)

    # -- answers ---------------------------------------------------------------------------------------

    def _answer(self, peer: _Peer, number: int, kind: int, value: object) -> None:
        """Answer a request; from any thread."""
        try:
            body = pack_error(value) if isinstance(value, BaseException) else pack(value)
        except BaseException as error:
            kind, body = ERROR, pack_error(error)
        self._answered(peer, [wire_values.answer(number, kind, body)])

    def _answered(self, peer: _Peer, bodies: list[bytes]) -> None:
        with peer.counting:
            full = peer.under_way >= MOST_REQUESTS
            peer.under_way -= len(bodies)
        self._send(peer, *bodies)
        if full:
            self._later(lambda: self._take(peer))

    def _send(self, peer: _Peer, *bodies: bytes) -> None:
        """Send frames; from any thread. What the socket does not take is sent as it does."""
        data = b"".join(map(framed, bodies))
        if peer.corked is not None and threading.get_ident() == self._thread.ident:
            peer.corked.append(data)
            return
        self._send_data(peer, data)

    def _send_data(self, peer: _Peer, data: bytes) -> None:
        with peer.lock:
            if peer.closed:
                return
            if not peer.outbox:
                try:
                    data = data[peer.socket.send(data) :]
                except BlockingIOError:
                    pass
                except OSError:
                    data = b""  # it is gone, which reading tells
                if not data:
                    return
                peer.since = time.monotonic()
            peer.outbox.append(data)
            peer.unread += len(data)
        self._later(lambda: self._watch(peer))

    def _flush(self, peer: _Peer) -> None:
        with peer.lock:
            try:
                while peer.outbox:
                    data = peer.outbox[0]
                    taken = peer.socket.send(data)
                    peer.since = time.monotonic()
                    peer.unread -= taken
                    if taken < len(data):
                        peer.outbox[0] = data[taken:]
                        break
                    peer.outbox.popleft()
            except BlockingIOError:
                pass
            except OSError:
                peer.outbox.clear()
                peer.unread = 0
        self._take(peer)

    # -- requests --------------------------------------------------------------------------------------

    def _request(self, peer: _Peer, request: Any) -> None:
        """Begin to do a request. Raises InvalidArgument for what is none."""
        match request:
            case [int(number), str(name), list(target), list(arguments), dict(named)] if 0 < number < 1 << 62:
                pass
            case _:
                expected = "expected [number, operation, target, arguments, named]"
                raise InvalidArgument("request", request, expected)
        with peer.counting:
            peer.under_way += 1
        if self._stopping:
            self._answer(peer, number, ERROR, _closing())
            return
        if peer.admit is not None:
            self._pool.submit(lambda: self._admit(peer, number, name, arguments))
            return
        try:
            if peer.guard is not None:
                peer.guard(*_need(name, target, arguments))
            quick = _QUICK.get(name)
            if quick is not None and quick(self, peer, number, target, arguments, named):
                return
        except BaseException as error:
            self._fail(peer, number, name, error)
            return
        if name == "receive":  # of `Operations`: it may wait for long
            if not self._long.acquire(blocking=False):
                self._answer(peer, number, ERROR, Disconnected("too many wait for messages; try again"))
                return
            work = partial(self._do_long, peer, number, target, arguments, named)
            try:
                threading.Thread(target=work, name="duelog-receive", daemon=True).start()
            except RuntimeError as error:  # none can be started
                self._long.release()
                self._answer(peer, number, ERROR, Disconnected(f"{error}; try again"))
            return
        self._pool.submit(lambda: self._do(peer, number, name, target, arguments, named))

    def _admit(self, peer: _Peer, number: int, name: str, arguments: list[Any]) -> None:
        """Check the credentials of a peer, without which nothing else is done."""
        try:
            match name, arguments:
                case "hello", [str(method), bytes(credentials)] if peer.admit is not None:
                    peer.guard = peer.admit(method, credentials)
                case _:
                    raise NotAllowed("credentials are missing: the first request is hello")
        except BaseException as error:
            self._fail(peer, number, "hello", error)
            return
        peer.frames.most_bytes, peer.admit = self._most_bytes, None
        self._answer(peer, number, RESULT, None)

    def _do_long(self, peer: _Peer, number: int, *request: Any) -> None:
        try:
            self._do(peer, number, "receive", *request)
        finally:
            self._long.release()

    def _do(self, peer: _Peer, number: int, name: str, target: Any, arguments: Any, named: Any) -> None:
        """Do a request and answer it; raises nothing."""
        try:
            row = FACE.get(name)
            if name == "next":
                items = peer.sequences[arguments[0]] if arguments and arguments[0] in peer.sequences else iter(())
                self._page(peer, number, arguments[0], items)
            elif name == "drop":
                peer.sequences.pop(arguments[0], None)
                self._answer(peer, number, RESULT, None)
            elif row is None:
                self._result(peer, number, self._ask(peer, name, named))
            elif name == "DelayedStore.transaction":
                self._answer(peer, number, RESULT, self._transact(peer, arguments))
            elif "numbers" in named:
                self._answer(peer, number, RESULT, self._send_numbered(peer, row, target, arguments, named))
            else:
                self._result(peer, number, self._call(peer, row, target, arguments, named))
        except BaseException as error:
            self._fail(peer, number, name, error)

    def _ask(self, peer: _Peer, name: str, named: dict[str, Any]) -> object:
        """Do an operation of the command line, one at a time: they may wait, and share a consumer."""
        if not peer.asking.acquire(blocking=False):
            raise InvalidArgument("operation", name, "another of this connection is being done")
        try:
            if peer.operations is None:
                peer.operations = self._operations(peer.waiting)
            return peer.operations.ask(name, named)
        finally:
            peer.asking.release()

    def _fail(self, peer: _Peer, number: int, name: str, error: BaseException) -> None:
        if not isinstance(error, (DuelogError, OSError, MemoryError)):
            text = "%s: %s has met an error of duelog itself: %r"
            self._limited.log(logging.ERROR, text, self._path, name, error, error=error)
        if name == "Topic.send" and type(error) is ClosedError:
            error = _closing()  # the outbox has not taken it, as the store is being closed
        self._answer(peer, number, ERROR, error)

    def _result(self, peer: _Peer, number: int, result: Any) -> None:
        if isinstance(result, Iterator):
            if len(peer.sequences) >= MOST_SEQUENCES:
                raise InvalidArgument(
                    "sequences", len(peer.sequences), f"{MOST_SEQUENCES} at most; read them to the end"
                )
            peer.sequences[number] = result
            self._page(peer, number, number, result)
        else:
            self._answer(peer, number, RESULT, columns(result))

    def _page(self, peer: _Peer, number: int, sequence: int, items: Iterator[Any]) -> None:
        try:
            page, more = wire_values.pages(items)
        except BaseException:
            peer.sequences.pop(sequence, None)
            raise
        if not more:
            peer.sequences.pop(sequence, None)
        self._answered(peer, [wire_values.items_answer(number, page, more=more)])

    def _topic(self, peer: _Peer, name: object) -> Topic:
        """A topic by name, the same object each time for some."""
        topic = peer.topics.get(name) if isinstance(name, str) else None
        if topic is None:
            topic = self._store.topic(name)
            if isinstance(name, str):
                peer.topics[name] = topic
                while len(peer.topics) > _TOPICS:
                    with suppress(KeyError):
                        peer.topics.popitem(last=False)
        return topic

    def _consumer(self, peer: _Peer, target: list[Any]) -> _Consumer:
        consumer = peer.consumers.get(target[0]) if target and isinstance(target[0], int) else None
        if consumer is None:
            raise ClosedError("subscription")
        return consumer

    def _call(self, peer: _Peer, row: Row, target: list[Any], arguments: list[Any], named: dict[str, Any]) -> Any:
        owner = self._owner(peer, row, target)
        member = getattr(type(owner), row.method)
        if isinstance(member, property):
            return getattr(owner, row.method)
        self._bind(row, member, [owner, *arguments], named)
        return member(owner, *arguments, **named)

    def _transact(self, peer: _Peer, operations: list[Any]) -> list[Any]:
        """Do operations of a transaction, each [method, arguments, named], together or not at all; their results."""
        results = []
        with self._store.transaction() as transaction:
            for at, each in enumerate(operations):
                match each:
                    case [str(name), list(arguments), dict(named)] if name in TRANSACTED:
                        method = getattr(transaction, name)
                    case _:
                        expected = f"expected [method, arguments, named], of {', '.join(TRANSACTED)}"
                        raise InvalidArgument(f"operations[{at}]", each, expected)
                if (consumer := named.get("consumer")) is not None:
                    named["consumer"] = self._consumer(peer, [consumer]).subscription
                self._bind(FACE["DelayedStore.transaction"], method, arguments, named)
                results.append(method(*arguments, **named))
        return [result and result.value for result in results]

    def _send_numbered(
        self, peer: _Peer, row: Row, target: list[Any], arguments: list[Any], named: dict[str, Any]
    ) -> Any:
        """Send a batch whose messages are numbered: [name of a producer, first number] in `numbers`."""
        encoders = {"Topic.send_batch": "encode", "Topic.send_payloads": "encode_payloads"}
        match named.pop("numbers"), target:
            case [str(producer), int(first)], [name] if first >= 0 and row.name in encoders:
                topic = self._topic(peer, name)
                self._use(peer, topic, [producer])
                encode = getattr(topic.sender, encoders[row.name])
                self._bind(row, encode, arguments, named)
                encoded, now_ms = encode(*arguments, **named)
                ids = topic.producer(producer).send_encoded(encoded, now_ms, first, keep_ids=False)
                return columns(ids) if None not in ids else ids
        raise InvalidArgument("numbers", target, "expected [name of a producer, first number], of a batch")

    def _use(self, peer: _Peer, topic: Topic, numbers: Any) -> None:
        """Note a producer of a connection, whose numbers are forgotten some time after it has ended."""
        is_own = isinstance(numbers, (list, tuple)) and numbers and str(numbers[0]).startswith(CONNECTION)
        if is_own and len(peer.producers) < MOST_CONSUMERS:
            peer.producers.add((topic.name, str(numbers[0])))

    def _forget(self, until: float) -> None:
        """Forget the numbers of connections that ended before, and have not come back."""
        used = {each for peer in self._peers for each in list(peer.producers)}
        names: dict[str, list[str]] = {}
        while self._ended_producers and self._ended_producers[0][0] <= until:
            _, ended = self._ended_producers.popleft()
            for topic, name in ended - used:
                names.setdefault(topic, []).append(name)

        def forget() -> None:
            for topic, producers in names.items():
                try:
                    self._store._forget_numbers(topic, producers)
                except DuelogError as error:  # they stay, some bytes each
                    self._limited.log(logging.WARNING, "%s: numbers of connections stay: %s", self._path, error)

        if names:
            self._pool.submit(forget)

    @staticmethod
    def _bind(row: Row, method: Callable[..., object], arguments: list[Any], named: dict[str, Any]) -> None:
        try:
            _signature(method).bind(*arguments, **named)
        except TypeError as error:
            raise InvalidArgument("arguments", [*arguments, named], f"{row.name}: {error}") from None

    def _owner(self, peer: _Peer, row: Row, target: list[Any]) -> Any:
        match row.owner, target:
            case "DelayedStore", []:
                return self._store
            case "Documents", []:
                return self._store.documents
            case "Topic", [name]:
                return self._topic(peer, name)
            case "Producer", [topic, name]:
                return self._topic(peer, topic).producer(name)
            case "SubscriptionAdmin", [topic, name]:
                return self._topic(peer, topic).subscription(name)
            case "Subscription", [_]:
                return self._consumer(peer, target).subscription
        raise InvalidArgument("target", target, f"{row.name} has another")

    # -- what waits for nothing ------------------------------------------------------------------------

    def _put(self, peer: _Peer, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """Send one message by the outbox: [payload], and by name what `Topic.send` takes, and its numbers."""
        if len(arguments) != 1 or len(target) != 1 or not named.keys() <= _SENT:
            return False
        topic = self._topic(peer, target[0])
        numbers = named.pop("numbers", None)
        self._use(peer, topic, numbers)
        given = {**named, "numbers": None if numbers is None else tuple(numbers)}
        if not topic.put(arguments[0], **given, token=(peer, number), done=self._outcomes, wait=False):
            peer.held = True

            def put() -> None:
                try:
                    topic.put(arguments[0], **given, token=(peer, number), done=self._outcomes)
                except BaseException as error:
                    self._fail(peer, number, "Topic.send", error)
                self._later(release)

            def release() -> None:
                peer.held = False
                self._take(peer)

            self._pool.submit(put)
        return True

    def _outcomes(self, results: list[tuple[tuple[_Peer, int], Any]]) -> None:
        """Answer sends that became durable together: one piece of data a connection."""
        answers: dict[_Peer, list[bytes]] = {}
        for (peer, number), outcome in results:
            kind = ERROR if isinstance(outcome, Exception) else RESULT
            body = pack_error(outcome) if isinstance(outcome, Exception) else _outcome(outcome)
            answers.setdefault(peer, []).append(wire_values.answer(number, kind, body))
        for peer, bodies in answers.items():
            self._answered(peer, bodies)

    def _receive(self, peer: _Peer, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """Take a credit: [most messages, ms until it ends or None]."""
        consumer = self._consumer(peer, target)
        match arguments:
            case [most, None]:
                deadline_ms = None
            case [most, int(timeout_ms)]:
                deadline_ms = consumer.subscription.clock.now_ms() + max(timeout_ms, 0)
            case _:
                raise InvalidArgument("arguments", arguments, "expected [most messages, ms or nil]")
        if len(consumer.credits) >= MOST_REQUESTS:
            raise InvalidArgument("credits", len(consumer.credits), "too many are not answered")
        consumer.credits.append((number, most, deadline_ms))
        self._serve(consumer)
        return True

    def _recall(self, peer: _Peer, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """End credits by the numbers of their requests: they are answered with no messages, unless they were before."""
        consumer = self._consumer(peer, target)

        def recall() -> None:
            with consumer.lock:
                ended = [each for each in consumer.credits if each[0] in arguments]
                for each in ended:
                    consumer.credits.remove(each)
            for each in ended:
                self._answer(peer, each[0], RESULT, None)
            self._answer(peer, number, RESULT, len(ended))

        recall() if consumer.subscription.polls_at_once else self._pool.submit(recall)
        return True

    def _ack(self, peer: _Peer, number: int, target: Any, arguments: Any, named: Any) -> bool:
        """Acknowledge without waiting for the disk."""
        if len(arguments) != 1 or named:
            return False
        self._answer(peer, number, RESULT, self._consumer(peer, target).subscription.ack(arguments[0]))
        return True

    def _serve(self, consumer: _Consumer) -> None:
        """Answer the credits of a consumer with what is due."""
        if not consumer.credits:
            return
        if consumer.subscription.polls_at_once:
            self._answer_credits(consumer)
        else:
            self._pool.submit(lambda: self._answer_credits(consumer))

    def _answer_credits(self, consumer: _Consumer) -> None:
        subscription, peer = consumer.subscription, consumer.peer
        with consumer.lock:
            while consumer.credits:
                number, most, deadline_ms = consumer.credits[0]
                try:
                    batch, again_ms = self._due(subscription, most)
                except BaseException as error:
                    consumer.credits.popleft()
                    self._fail(peer, number, "Subscription.receive", error)
                    continue
                now_ms = subscription.clock.now_ms()
                is_over = deadline_ms is not None and now_ms >= deadline_ms
                if batch is not None or is_over or not subscription.may_wait:
                    consumer.credits.popleft()
                    self._answer(peer, number, RESULT, batch)
                    continue
                again = [ms for ms in (deadline_ms, again_ms) if ms is not None]
                if again:
                    self._look_again(consumer, (min(again) - now_ms) / 1_000)
                return

    def _due(self, subscription: Subscription, most: Any) -> tuple[Any, int | None]:
        """Messages that are due, None: none are; and when to look again."""
        messages, again_ms = subscription.poll_columns(_fewer(most, _AT_ONCE))
        if not messages:
            return None, again_ms
        if len(messages) == _AT_ONCE < most:  # payloads may be large: how many more is told by the first
            size = sum(map(len, messages.payloads)) // _AT_ONCE + 1
            further = min(most - _AT_ONCE, _MOST_RECEIVED_BYTES // size - _AT_ONCE)
            with suppress(
                DuelogError
            ):  # some have been handed out; what stops the store is raised when it is asked again
                messages += subscription.poll_columns(further)[0] if further > 0 else []
        return messages, None

    def _look_again(self, consumer: _Consumer, seconds: float) -> None:
        if not isinstance(consumer.subscription.clock.wrapped, SystemClock):
            seconds = min(seconds, _MANUAL_PAUSE_S)
        at = time.monotonic() + max(seconds, 0)

        def note() -> None:
            if consumer.looks_at is None or at < consumer.looks_at:
                consumer.looks_at = at
                heapq.heappush(self._timers, (at, next(self._timer_numbers), consumer))

        note() if threading.current_thread() is self._thread else self._later(note)

    # -- consumers -------------------------------------------------------------------------------------

    def _subscribe(self, peer: _Peer, number: int, target: Any, arguments: Any, named: Any, *, method: str) -> bool:
        """Attach a consumer, which the client knows by the number that it gives: [number, ...]."""

        def attach() -> None:
            try:
                key, *rest = arguments
                if not isinstance(key, int) or key in peer.consumers or len(peer.consumers) >= MOST_CONSUMERS:
                    raise InvalidArgument("consumer", key, f"expected another number, of {MOST_CONSUMERS} consumers")
                row = FACE[f"Topic.{method}"]
                subscription: Subscription = self._call(peer, row, target, rest, named)
                consumer = _Consumer(peer, subscription)

                def wake() -> None:
                    if not consumer.wakes and consumer.credits:
                        consumer.wakes = True
                        self._ready.append(consumer)
                        self._wake()

                consumer.wake = wake
                subscription.add_waker(wake)
                with peer.lock:
                    if not peer.closed:
                        peer.consumers[key] = consumer
                if peer.closed:
                    subscription.close()
                facts = [subscription.topic, subscription.name, subscription.type, subscription.durable]
                self._answer(peer, number, RESULT, facts)
            except BaseException as error:
                self._fail(peer, number, f"Topic.{method}", error)

        self._pool.submit(attach)
        return True

    def _leave(self, peer: _Peer, number: int, target: Any, arguments: Any, named: Any) -> bool:
        consumer = peer.consumers.pop(target[0], None) if target and isinstance(target[0], int) else None
        failed = named.get("failed", True) is not False

        def leave() -> None:
            try:
                if consumer is not None:
                    while consumer.credits:
                        self._answer(
                            peer,
                            consumer.credits.popleft()[0],
                            ERROR,
                            ClosedError(f"subscription {consumer.subscription.name!r}"),
                        )
                    self._detach(consumer, failed=failed)
                self._answer(peer, number, RESULT, None)
            except BaseException as error:
                self._fail(peer, number, "Subscription.close", error)

        self._pool.submit(leave)
        return True


_QUICK: dict[str, Callable[[WireServer, _Peer, int, Any, Any, Any], bool]] = {
    "Topic.send": WireServer._put,
    "Topic.subscribe": lambda *request: WireServer._subscribe(*request, method="subscribe"),
    "Topic.reader": lambda *request: WireServer._subscribe(*request, method="reader"),
    "Subscription.receive": WireServer._receive,
    "Subscription.recall": WireServer._recall,
    "Subscription.ack": WireServer._ack,
    "Subscription.close": WireServer._leave,
}
"""Requests that are begun in the server's thread; False: it is done as all else is."""


def _need(name: str, target: list[Any], arguments: list[Any]) -> tuple[Right, str | None]:
    """The right that a request needs, and the topic. A consumer's was looked at when it was attached."""
    row = FACE.get(name)
    if name in ("next", "drop", "Subscription.recall") or (row is not None and row.owner == "Subscription"):
        return Right.NONE, None
    if row is None or row.owner in ("DelayedStore", "Documents"):
        if name == "DelayedStore.effective_policies" and arguments:
            return Right.READ, str(arguments[0])
        return Right.ADMIN, None
    return row.right, str(target[0]) if target else None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@cache
def _signature(method: Callable[..., object]) -> Signature:
    return signature(method)


def _fewer(most: Any, limit: int) -> Any:
    """At most so many; what is no number is refused where it is used."""
    return min(most, limit) if isinstance(most, int) and not isinstance(most, bool) else most


def _outcome(outcome: Any) -> bytes:
    return pack(outcome) if isinstance(outcome, tuple) else b"\xc0"  # a duplicate: stored, its id not known


def _closing() -> Refused:
    return Refused(CLOSING, _CLOSING_MESSAGE)


def _is_trusted(connection: socket.socket) -> bool:
    """Return True if a client is of this user, or root; also if the system cannot tell: then the mode must do."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None or connection.family != socket.AF_UNIX:
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return user in (os.geteuid(), 0)


_of_process: WeakSet[WireServer] = WeakSet()


def _forget_all() -> None:
    for each in list(_of_process):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
