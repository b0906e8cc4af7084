"""The control socket of the process that has a store open for writing: one thread that sleeps until a client comes.

A client has a thread for as long as it is connected, MOST_CLIENTS at a time. Only processes of the same user, and root,
are heard: the socket's mode says so, and where the system tells whose a connection is that is looked at too. What a
client asks for is bounded: the length of a line, and how long it may be silent or leave its answers unread.

A store works without it: where no socket can be made (a file system that has none, a path that is too long where there
is no /proc) that is logged, and commands find the store taken. What a killed process left there is replaced by the next
one, which has the store's lock.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeAlias
from weakref import WeakSet

from duelog.store.errors import DuelogError, InvalidArgument

from .control_lines import CLOSING, GREETING, SOCKET, Disconnected, Lines, address_in, decode_line, encode_line

MOST_CLIENTS = 16
IDLE_S = 300.0
"""How long a client may be silent between two requests, or within one."""

STALLED_S = 30.0
"""How long an answer may wait for a client that does not read."""

_LINE_BYTES = 1 << 20
"""Longest request, besides the largest message in base64."""

_LAST_ANSWER_S = 2.0
"""The same, while the store is being closed."""

_PAUSE_S = 1.0

_CLOSING_MESSAGE = "the process that has this store open is closing it, and has not done this"

_log = logging.getLogger("duelog.control")


class ClientOperations(Protocol):
    """The operations of one client: `Operations`, which stands above the engine."""

    def ask(self, name: str, arguments: Mapping[str, object]) -> object: ...
    def close(self, *, failed: bool = True) -> None: ...


MakeOperations: TypeAlias = "Callable[[Waiting], ClientOperations]"
"""Makes the operations of a client, which waits in the given way."""


class ControlServer:
    """The socket, its thread, and those of the clients. `stop` and `join` end them."""

    def __init__(self, path: Path, operations: MakeOperations, max_message_bytes: int) -> None:
        """path: the store's directory, whose lock this process has."""
        self._path = path
        self._operations = operations
        self._line_bytes = _LINE_BYTES + max_message_bytes * 4 // 3
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._stopping = False
        self._sockets: list[socket.socket] = []
        """The listening one, and a pair that wakes the thread."""
        self._thread = threading.Thread(target=self._run, name="duelog-control", daemon=True)
        _of_process.add(self)

    def start(self) -> bool:
        """Listen, and start the thread. False: no socket can be made here, which is logged."""
        try:
            self._sockets += socket.socketpair()
            listener = socket.socket(socket.AF_UNIX)
            self._sockets.insert(0, listener)
            with address_in(self._path) as address:
                with suppress(FileNotFoundError):
                    if not stat.S_ISSOCK(os.lstat(address).st_mode):
                        raise FileExistsError(f"{SOCKET} is no socket")
                    os.unlink(address)  # of a process that was killed
                listener.bind(address)
                os.chmod(address, 0o600)  # before it listens: no client has been let in
            listener.listen(MOST_CLIENTS)
            listener.setblocking(False)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            _log.warning("%s: takes no commands while it is open: %s", self._path, error)
            self._close_sockets()
            return False
        return True

    def stop(self) -> None:
        """Take no more clients and no more requests; those that wait come to an end. Of the process that started it."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            clients = list(self._clients)
        with suppress(OSError), address_in(self._path) as address:
            os.unlink(address)
        self._sockets[-1].send(b"x")
        self._thread.join()
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RD)  # answers that are on their way arrive

    def join(self) -> None:
        """After `stop`: wait until the requests that were being answered are done."""
        with self._lock:
            clients = list(self._clients.items())
        for connection, thread in clients:
            thread.join(_LAST_ANSWER_S)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._close_sockets()

    def forget(self) -> None:
        """In a child after fork: close what is the parent's, so that clients see when the parent ends."""
        for each in list(self._clients):
            each.close()
        self._stopping = True
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        listener, woken, _ = self._sockets
        while not self._stopping:
            _wait_for_input([listener, woken], None)
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # no descriptor left
                _log.warning("%s: a command cannot be taken: %s", self._path, error)
                _wait_for_input([woken], _PAUSE_S)
                continue
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        refusal = None if _is_trusted(connection) else "this user may not"
        thread = threading.Thread(target=self._converse, args=[connection], name="duelog-command", daemon=True)
        with self._lock:
            if self._stopping or len(self._clients) >= MOST_CLIENTS:
                refusal = refusal or f"{MOST_CLIENTS} commands are being answered; try again"
            if refusal is None:
                self._clients[connection] = thread
        try:
            connection.settimeout(STALLED_S)
            if refusal is None:
                thread.start()
                return
            connection.setblocking(False)
            connection.send(encode_line(_error(Disconnected(refusal))))
        except (OSError, RuntimeError) as error:
            _log.warning("%s: a command cannot be taken: %s", self._path, error)
        with self._lock:
            self._clients.pop(connection, None)
        connection.close()

    def _converse(self, connection: socket.socket) -> None:
        """Answer one client's requests, until it goes."""
        try:
            with connection, Waiting(connection) as waiting:
                operations = self._operations(waiting)
                try:
                    connection.sendall(encode_line(GREETING))
                    lines = Lines(connection, self._line_bytes)
                    while not self._stopping:
                        connection.settimeout(IDLE_S)
                        line = lines.read()
                        if line is None:
                            break
                        connection.settimeout(STALLED_S)
                        for answer in _answers(operations, line):
                            connection.sendall(answer)
                    if self._stopping:
                        connection.settimeout(_LAST_ANSWER_S)
                        connection.sendall(encode_line({"error": {"type": CLOSING, "message": _CLOSING_MESSAGE}}))
                except (OSError, Disconnected) as error:  # a client that is gone, stalls, or sends what is no line
                    _log.info("%s: a command's connection ends: %s", self._path, error)
                    with suppress(OSError):
                        connection.sendall(encode_line(_error(error)))
                finally:
                    with suppress(DuelogError):  # of a store that has failed, or is closed
                        operations.close()
        except Exception as error:
            _log.error("%s: a command's thread ends: %r", self._path, error, exc_info=error)
        finally:
            with self._lock:
                self._clients.pop(connection, None)


def _wait_for_input(sockets: list[socket.socket], seconds: float | None) -> set[int]:
    """Wait for so long until some can be read; their descriptors, which may be more than select() takes."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else math.ceil(seconds * 1_000))}


class Waiting:
    """How a client's thread waits for messages: until it is woken, or the client goes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(1 << 12):
                pass

    def wake(self) -> None:
        with suppress(OSError):  # it is full: the thread is woken anyway; or closed
            self._waker.send(b"x")

    def wait(self, seconds: float | None) -> bool:
        """False: the client has gone, or has sent a request before the answer to its last."""
        return self._connection.fileno() not in _wait_for_input([self._connection, self._woken], seconds)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self._woken.close()
        self._waker.close()


def _answers(operations: ClientOperations, line: bytes) -> Iterator[bytes]:
    """The lines that answer a request, whatever it raises."""
    try:
        request = decode_line(line)
        if not isinstance(request, dict) or not isinstance(request.get("ask"), str):
            raise InvalidArgument("request", request, 'expected {"ask": NAME, "with": {...}}')
        arguments = request.get("with", {})
        if not isinstance(arguments, dict):
            raise InvalidArgument("with", arguments, "expected an object")
        result = operations.ask(request["ask"], arguments)
        if isinstance(result, Iterator):
            for each in result:
                yield encode_line({"item": each})
            result = None
        yield encode_line({"result": result})
    except (DuelogError, OSError, MemoryError) as error:
        yield encode_line(_error(error))
    except Exception as error:
        _log.error("a command has met an error of duelog itself: %r", error, exc_info=error)
        yield encode_line(_error(error))


def _error(error: Exception) -> dict[str, dict[str, str]]:
    return {"error": {"type": type(error).__name__, "message": str(error) or type(error).__name__}}


def _is_trusted(connection: socket.socket) -> bool:
    """Return True if a client is of this user, or root; also if the system cannot tell: then the mode must do."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return user in (os.geteuid(), 0)


_of_process: WeakSet[ControlServer] = WeakSet()


def _forget_all() -> None:
    for each in list(_of_process):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
