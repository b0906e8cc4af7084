"""The control socket's protocol, for both ends: where the socket is, lines of JSON, what they may be.

A client connects and is greeted with `{"duelog": 1}`. A request is a line `{"ask": NAME, "with": {...}}`; its answer is
a line `{"result": ...}` or `{"error": {"type": ..., "message": ...}}`, before which operations that are streamed send
`{"item": ...}` for each element. Requests of a connection are answered one after the other.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duelog.store.errors import DuelogError, InvalidArgument

SOCKET = "CONTROL"
"""Name of the socket in the store's directory."""

VERSION = 1
GREETING = {"duelog": VERSION}

CLOSING = "Closing"
"""Type of the error by which a process that closes its store answers what it has not begun to do."""

_MOST_ADDRESS_BYTES = 100
"""Longest path of a socket that is used as it is: Linux takes 107 bytes, others 103."""

_CHUNK = 1 << 16


class Disconnected(DuelogError):
    """The other end has gone, or does not keep to the protocol."""


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


def encode_line(value: object) -> bytes:
    """One JSON value on a line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode_line(line: bytes) -> Any:
    """The JSON value of a line. Raises InvalidArgument."""
    try:
        return json.loads(line.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("line", line[:200], f"no JSON: {error}") from None


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")


class Lines:
    """The lines that come from a socket, none longer than a limit."""

    def __init__(self, connection: socket.socket, most_bytes: int | None) -> None:
        """most_bytes None: any length. The socket's timeout is that of each piece."""
        self._connection = connection
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._looked = 0

    def read(self) -> bytes | None:
        """The next line; None: the other end has closed. Raises Disconnected, TimeoutError, OSError."""
        while (end := self._rest.find(b"\n", self._looked)) < 0:
            self._looked = len(self._rest)
            if self._most_bytes is not None and self._looked > self._most_bytes:
                raise Disconnected(f"a line is longer than {self._most_bytes} bytes")
            piece = self._connection.recv(_CHUNK)
            if not piece:
                if self._rest:
                    raise Disconnected("it ended in the middle of a line")
                return None
            self._rest += piece
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        self._looked = 0
        return line
