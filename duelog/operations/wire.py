"""The protocol by which other processes ask an open store, for both ends: the socket, the greeting, frames.

A frame is the length of its body, four bytes big-endian, and the body, one value of msgpack (wire_values.py). The
server speaks first: `["duelog", VERSION, facts]`. A request is `[number, operation, target, arguments, named]`; the
numbers are the client's, from 1 on, different for as long as they are not answered. Answers come in any order:
`[number, kind, value]`. docs/protocol.md has all of it, enough to write a client.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duelog.store.errors import DuelogError, InvalidArgument

SOCKET = "CONTROL"
"""Name of the socket in the store's directory."""

VERSION = 2
GREETED = "duelog"

RESULT, ERROR, MORE, LAST = range(4)
"""Kinds of answers: a result; an error; items of a sequence, of which there are more; its last items."""

CLOSING = "Closing"
"""Name of the error by which a process that closes its store answers what it has not begun to do."""

CONNECTION = "connection-"
"""Beginning of the names of producers under which connections number what they send."""

LONGEST_RECONNECT_S = 300
"""For so long a client may try to connect again."""

HEAD = struct.Struct(">I")
MOST_GREETING_BYTES = 1 << 16
CHUNK = 1 << 18

_MOST_ADDRESS_BYTES = 100
"""Longest path of a socket that is used as it is: Linux takes 107 bytes, others 103."""


class Disconnected(DuelogError):
    """The other end has gone, or does not keep to the protocol.

    in_doubt: the call that may have been done or not, as text; None: nothing was begun. stored: True where a send is
    known to be stored, and only its id is not known any more.
    """

    def __init__(self, reason: str, in_doubt: str | None = None, *, stored: bool = False) -> None:
        super().__init__(reason)
        self.in_doubt = in_doubt
        self.stored = stored


class Refused(DuelogError):
    """An error that the other process has raised and that this one does not know; `type` is the name of its class."""

    def __init__(self, type_: str, message: str) -> None:
        super().__init__(message)
        self.type = type_


class OnlyInProcess(DuelogError):
    """A call that another process cannot make; nothing was done. name: of what was called."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: only the process that has the store open has it")
        self.name = name


class NotAllowed(DuelogError):
    """The server refuses a client's credentials, or the role that they prove may not do this; nothing was done."""


@contextmanager
def address_in(directory: Path) -> Iterator[str]:
    """The socket's address, while the block runs: its path, or a shorter one where that is too long for a socket.

    The shorter one needs /proc, as Linux has it; elsewhere it leads nowhere, and using it raises FileNotFoundError.
    """
    whole = directory / SOCKET
    if len(os.fsencode(whole)) <= _MOST_ADDRESS_BYTES:
        yield str(whole)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class Frames:
    """Cuts what comes from a peer into the bodies of frames, none longer than a limit.

    A long frame is received where it stays; short ones share a buffer of who receives, and cost an idle peer nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._head = b""
        """A frame's beginning, shorter than its head."""
        self._frame: memoryview | None = None
        """A frame that has come in part."""
        self._filled = 0

    @property
    def begun(self) -> bool:
        """True if a frame has come in part."""
        return bool(self._head) or self._frame is not None

    def receive(self, connection: Any, buffer: memoryview) -> list[memoryview] | None:
        """Receive once; the bodies of the frames that are whole, which stand until the next call; None: the end.

        Raises OSError, InvalidArgument for a frame that is too long.
        """
        if self._frame is not None:
            count = connection.recv_into(self._frame[self._filled :])
            self._filled += count
            if self._filled < len(self._frame):
                return [] if count else None
            whole, self._frame = self._frame, None
            return [whole]
        count = connection.recv_into(buffer)
        if not count:
            return None
        if self._head:
            buffer, self._head = memoryview(self._head + bytes(buffer[:count])), b""
            count = len(buffer)
        bodies: list[memoryview] = []
        end = 0
        while (begin := end + HEAD.size) <= count:
            (size,) = HEAD.unpack_from(buffer, end)
            if size > self.most_bytes:
                raise InvalidArgument("frame", size, f"a frame has at most {self.most_bytes} bytes")
            end = begin + size
            if end > count:
                self._frame, self._filled = memoryview(bytearray(size)), count - begin
                self._frame[: self._filled] = buffer[begin:count]
                return bodies
            bodies.append(buffer[begin:end])
        self._head = bytes(buffer[end:count])
        return bodies


def buffer() -> memoryview:
    """A buffer for `Frames.receive`."""
    return memoryview(bytearray(CHUNK))


def framed(*pieces: bytes) -> bytes:
    """A frame of a body, given in pieces."""
    if len(pieces) == 1:
        return HEAD.pack(len(pieces[0])) + pieces[0]
    return b"".join((HEAD.pack(sum(map(len, pieces))), *pieces))


def checked_greeting(greeting: Any, place: str) -> dict[str, Any]:
    """The facts of a greeting. Raises Disconnected for another version, or what is none."""
    match greeting:
        case [str(name), int(version), dict(facts)] if (name, version) == (GREETED, VERSION):
            return facts
    shown = str(greeting)[:200]
    raise Disconnected(f"{place}: the process that has the store open speaks another version: {shown}")
