"""Asking a store in a directory: this process opens it, or asks the one that has it open; the answers are the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from ..operations.operations import Ask, Asked, Operations
from ..operations.wire import Disconnected, Refused
from ..operations.wire_client import Connection, is_closing
from ..store.errors import AlreadyOpen, StoreLocked
from .values import alone, open_to_read, open_to_write, require_store

if TYPE_CHECKING:
    from .. import DelayedStore

_PATIENCE_S = 2.0
"""How long a command tries to reach a store that is being opened or closed, or is busy with other commands."""

_PAUSE_S = 0.02


@contextmanager
def asked(path: Path, *, writes: bool, create: bool = False) -> Iterator[Asked]:
    """Ask for operations of the store in a directory while the block runs.

    They are those of the process that has it open, where there is one that listens; else of this one, which opens it.
    create: make the store where there is none. Raises StoreLocked where another process has it open and does not
    listen, and what `Connection.connect` raises, once it has tried for some time: commands that run at once wait for
    each other.
    """
    if not create:
        require_store(path)
    with ExitStack() as stack:
        yield Asked(_Asking(path, writes, create, stack).ask)


class _Asking:
    """Asks a store, and asks again where the process that has it open closes it before anything was done."""

    def __init__(self, path: Path, writes: bool, create: bool, stack: ExitStack) -> None:
        self._path = path
        self._writes = writes
        self._create = create
        self._stack = stack
        self._deadline: float | None = None
        """Set when the store is first found taken: this process has imported the engine by then."""
        self._answered = False
        self._reached = self._reach()

    def ask(self, name: str, arguments: Mapping[str, object]) -> Any:
        while True:
            try:
                found = self._reached(name, arguments)
                self._answered = True
                return found
            except Refused as error:
                if self._answered or not is_closing(error) or self._is_late():
                    raise
            self._reached = self._reach()

    def _reach(self) -> Ask:
        while True:
            try:
                return self._ask_of_one()
            except AlreadyOpen:
                raise
            except (StoreLocked, Refused, Disconnected):
                if self._is_late():
                    raise
            time.sleep(_PAUSE_S)

    def _is_late(self) -> bool:
        now = time.monotonic()
        self._deadline = self._deadline or now + _PATIENCE_S
        return now > self._deadline

    def _ask_of_one(self) -> Ask:
        client = Connection.to(self._path)
        if client is not None:
            return self._stack.enter_context(client).ask
        with alone("it takes no commands (StoreConfig(control=False), or a clock of its own): end it first"):
            store = open_to_write(self._path, create=self._create) if self._writes else open_to_read(self._path)
        self._stack.enter_context(store)
        return self._stack.enter_context(closing(operations_here(store))).ask


def operations_here(store: DelayedStore) -> Operations:
    """The operations of a store that this process has open."""
    return Operations(store, _Here())


class _Here(Event):
    """How this process waits for messages of a store of its own; Ctrl-C ends it."""

    wake = Event.set

    def wait(self, seconds: float | None = None) -> bool:
        super().wait(seconds)
        return True
