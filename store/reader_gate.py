"""Readers inside, or somebody alone: LMDB's map may be resized, and closed, only while nobody reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    """How often the calling thread is inside."""

    value = 0


class ReaderGate:
    """Counts the readers of this process. A thread that is inside may enter again, also while somebody waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._readers = 0
        self._wanted = 0
        self._depth = _Depth()

    @property
    def held(self) -> bool:
        """Whether the calling thread is inside."""
        return self._depth.value > 0

    def enter(self) -> None:
        """Be inside until `leave`, which any thread may call: for what is held longer than one call.

        Waits while somebody wants to be alone, also in a thread that is inside.
        """
        with self._condition:
            while self._wanted:
                self._condition.wait()
            self._readers += 1

    def leave(self) -> None:
        """Undo an `enter`."""
        with self._condition:
            self._readers -= 1
            if self._wanted:
                self._condition.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Be inside for the block; waits while somebody is, or wants to be, alone."""
        depth = self._depth.value
        with self._condition:
            while self._wanted and not depth:
                self._condition.wait()
            self._readers += 1
        self._depth.value = depth + 1
        try:
            yield
        finally:
            self._depth.value = depth
            with self._condition:
                self._readers -= 1
                if self._wanted:
                    self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody is inside, and keep everybody out for the block. REQUIRES: not to be inside."""
        with self._condition:
            self._wanted += 1
            try:
                while self._readers:
                    self._condition.wait()
                yield
            finally:
                self._wanted -= 1
                self._condition.notify_all()

    @contextmanager
    def alone_at_once(self) -> Iterator[bool]:
        """The same without waiting: False when somebody is inside, and then nobody is kept out."""
        with self._condition:
            yield not self._readers
