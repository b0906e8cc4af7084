"""Readers inside, or one thread alone: LMDB's map may be resized and closed only while no thread reads.

An interrupt (KeyboardInterrupt) leaves nobody inside, or alone: to be so is to have a token among those of the gate,
with the thread that it belongs to, and that is taken out in one step. Where it comes while a block is left, the token
may stay until the interrupt has been handled, when its traceback goes; it does not keep out its own thread, so that
this thread can close what it was reading.

The mutex is held for a look, never for a block, and the garbage collection never takes it: that may come in any thread,
also in one that the thread which is alone waits for.
"""

import gc
import threading
from collections.abc import Callable
from typing import Any

_LOOK_AGAIN_S = 0.1
"""Longest wait: an interrupt may have come between leaving and notifying the waiters."""

_LOOKS_TO_COLLECT = 20
"""After so many a traceback that still has a token is looked for among the garbage."""


class ReaderGate:
    """Counts the readers of this process. A thread that is inside may enter again, also while another waits."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self._changed = threading.Condition(self.mutex)
        self.inside: dict[object, int] = {}
        """The threads that are inside, by token; 0: any thread may leave."""
        self.wanted: dict[object, int] = {}
        """The threads that are alone, or wait for it, by token; who came first is alone first."""

    @property
    def held(self) -> bool:
        """True while the calling thread is inside."""
        return threading.get_ident() in self.inside.values()

    def notify(self) -> None:
        """Have those who wait look again: one is not inside, or alone, any more."""
        with self.mutex:
            self._changed.notify_all()

    def wait_for(self, enters: Callable[[], bool]) -> None:
        """Try to enter until it is done. `enters` is called with the mutex."""
        looks = 0
        while True:
            with self.mutex:
                if enters():
                    return
                self._changed.wait(_LOOK_AGAIN_S)
            looks += 1
            if looks == _LOOKS_TO_COLLECT:
                gc.collect()

    def reading(self) -> "Reading":
        """Be inside for a block; waits while another thread is, or wants to be, alone."""
        return Reading(self)

    def alone(self) -> "Alone":
        """Wait until no reader is inside, and keep readers out for the block. REQUIRES: not to be inside."""
        return Alone(self)

    def alone_at_once(self) -> "Alone":
        """Be alone for the block without waiting; gives False where a reader is inside, and then none is kept out."""
        return Alone(self, waits=False)


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
            with gate.mutex:
                entered = not gate.wanted and self._enters()
            if not entered:
                gate.wait_for(self._enters)
        except BaseException:
            self.__exit__()
            raise

    def _enters(self) -> bool:
        gate, own = self._gate, threading.get_ident()
        wanted = list(gate.wanted.values())
        if wanted and own not in wanted and not gate.held:
            return False
        gate.inside[self._token] = own if self._is_of_thread else 0
        return True

    def __exit__(self, kind: object = None, error: BaseException | None = None, traceback: object = None) -> None:
        try:
            gate = self._gate
        finally:  # an interrupt may come as this begins
            self._gate.inside.pop(self._token, None)
        if gate.wanted:
            gate.notify()

    def __del__(self) -> None:
        self._gate.inside.pop(self._token, None)


class Alone:
    """A block in which nobody else is inside a gate, which is left as that of a reader is."""

    __slots__ = ("_gate", "_token", "_waits")

    def __init__(self, gate: ReaderGate, *, waits: bool = True) -> None:
        """waits: False gives up at once where another is inside, or alone."""
        self._gate = gate
        self._waits = waits
        self._token = object()

    def __enter__(self) -> bool:
        gate, own = self._gate, threading.get_ident()
        try:
            with gate.mutex:
                if not self._waits and (gate.inside or {*gate.wanted.values()} - {own}):
                    return False
                gate.wanted[self._token] = own
            gate.wait_for(self._enters)
        except BaseException:
            self.__exit__()
            raise
        return True

    def _enters(self) -> bool:
        gate, own = self._gate, threading.get_ident()
        wanted = list(gate.wanted)
        before = wanted[: wanted.index(self._token)]
        return not {*gate.inside.values(), *(gate.wanted.get(each, own) for each in before)} - {own}

    def __exit__(self, kind: object = None, error: BaseException | None = None, traceback: object = None) -> None:
        try:
            gate = self._gate
        finally:
            self._gate.wanted.pop(self._token, None)
        gate.notify()

    def __del__(self) -> None:
        self._gate.wanted.pop(self._token, None)
