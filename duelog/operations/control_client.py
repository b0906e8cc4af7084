"""Asking the process that has a store open for writing, by the control socket in the store's directory."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from duelog.store.errors import DuelogError

from .control_lines import GREETING, Disconnected, Lines, address_in, decode_line, encode_line
from .operations import OPERATIONS

_GREETED_WITHIN_S = 10.0


class Refused(DuelogError):
    """An error that the other process has raised: its message; `type` is the name of its class."""

    def __init__(self, type_: str, message: str) -> None:
        super().__init__(message)
        self.type = type_


class ControlClient:
    """A connection to the process that has a store open. A context manager; not thread-safe."""

    def __init__(self, path: Path, connection: socket.socket) -> None:
        """Use `connect`."""
        self._path = path
        self._connection = connection
        self._lines = Lines(connection, None)
        self._streamed: deque[object] | None = None
        """Items of the answer that is being streamed, read before its iterator asked for them; None: there is none."""

    @classmethod
    def connect(cls, path: Path) -> Self | None:
        """None: no process listens. Raises Disconnected where one does not answer, or refuses; NoPermission."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_GREETED_WITHIN_S)
            with address_in(path) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            connection.close()
            return None
        except OSError as error:
            connection.close()
            raise Disconnected(f"{path}: the process that has this store open cannot be asked: {error}") from error
        found = cls(path, connection)
        try:
            greeting = found._read()
            if greeting != GREETING:
                raise Disconnected(f"{path}: the process that has this store open speaks another version: {greeting}")
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return found

    def ask(self, name: str, arguments: Mapping[str, object]) -> object:
        """Ask for an operation, as `Operations.ask` does. Raises Refused; Disconnected: it may have been done or not.

        What is left of a streamed answer is read before something else is asked, and kept for its iterator.
        """
        while self._streamed is not None:
            self._read_item(self._streamed)
        try:
            self._connection.sendall(encode_line({"ask": name, "with": dict(arguments)}))
        except OSError as error:
            with suppress(Disconnected):
                self._read()  # raises what the other end said before it closed
            raise self._lost(error) from error
        operation = OPERATIONS.get(name)
        if operation is None or not operation.streamed:
            return self._read()["result"]
        self._streamed = deque()
        return self._items(self._streamed)

    def _items(self, items: deque[object]) -> Iterator[object]:
        while True:
            while items:
                yield items.popleft()
            if self._streamed is not items:
                return
            self._read_item(items)

    def _read_item(self, items: deque[object]) -> None:
        """One more of the answer that is being streamed, or its end."""
        self._streamed = None
        line = self._read()
        if "item" in line:
            items.append(line["item"])
            self._streamed = items

    def _read(self) -> dict[str, Any]:
        try:
            line = self._lines.read()
        except (OSError, Disconnected) as error:
            raise self._lost(error) from error
        if line is None:
            raise self._lost(None)
        found: dict[str, Any] = decode_line(line)
        if "error" in found:
            raise Refused(found["error"]["type"], found["error"]["message"])
        return found

    def _lost(self, error: Exception | None) -> Disconnected:
        reason = "it has ended" if error is None else str(error) or "it does not answer"
        return Disconnected(f"{self._path}: no answer from the process that has this store open: {reason}")

    def close(self) -> None:
        """Disconnect. Messages received and not acknowledged are handed out again."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
