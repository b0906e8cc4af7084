"""Readers inside, or one thread alone: LMDB's map may be resized and closed only while no thread reads.

An interrupt (KeyboardInterrupt) leaves no reader inside: to be inside is to have a token among those of the gate, with
the thread that it belongs to, and that is taken out in one step. Where it comes while a block is left, the token may
stay until the interrupt has been handled, when its traceback goes; it does not keep out its own thread, so that this
thread can close what it was reading.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOOK_AGAIN_S = 0.1
"""Longest wait: an interrupt may have come between leaving and notifying the waiters."""


class ReaderGate:
    """Counts the readers of this process. A thread that is inside may enter again, also while another waits."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self.inside: dict[object, int] = {}
        """The threads that are inside, by token; 0: any thread may leave."""
        self.wanted: dict[object, int] = {}
        """The threads that are alone, or wait for it, by token."""

    @property
    def held(self) -> bool:
        """True while the calling thread is inside."""
        return threading.get_ident() in self.inside.values()

    def notify(self) -> None:
        """Have those who are in `wanted` look again: one is not inside any more."""
        with self._mutex:
            self._changed.notify_all()

    def reading(self) -> "Reading":
        """Be inside for a block; waits while another thread is, or wants to be, alone."""
        return Reading(self)

    def _kept_out(self) -> bool:
        own = threading.get_ident()
        return any(thread != own for thread in self.wanted.values())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no reader is inside, and keep readers out for the block. REQUIRES: not to be inside."""
        token = object()
        try:
            with self._mutex:
                self.wanted[token] = threading.get_ident()
                while {*self.inside.values()} - {threading.get_ident()}:
                    self._changed.wait(_LOOK_AGAIN_S)
                yield
        finally:
            self.wanted.pop(token, None)
            with self._mutex:
                self._changed.notify_all()

    @contextmanager
    def alone_at_once(self) -> Iterator[bool]:
        """Be alone for the block without waiting; gives False where a reader is inside, and then none is kept out."""
        with self._mutex:
            yield not self.inside


class Reading:
    """A block inside a gate, which is left, at the latest, when nothing refers to it any more."""

    __slots__ = ("_gate", "_is_of_thread", "_token")

    def __init__(self, gate: ReaderGate, *, is_of_thread: bool = True) -> None:
        """is_of_thread: False for what is held longer than one call: its thread may be alone, and any may leave."""
        self._gate = gate
        self._is_of_thread = is_of_thread
        self._token = object()

    def __enter__(self) -> Any:
        gate = self._gate
        try:
            with gate._mutex:
                while gate.wanted and not gate.held and gate._kept_out():
                    gate._changed.wait(_LOOK_AGAIN_S)
                gate.inside[self._token] = threading.get_ident() if self._is_of_thread else 0
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, kind: object = None, error: BaseException | None = None, traceback: object = None) -> None:
        gate = self._gate
        gate.inside.pop(self._token, None)
        if gate.wanted:
            gate.notify()

    __del__ = __exit__
