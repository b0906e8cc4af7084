"""Leases, locks and places that a unit of work needs until it is decided."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class Held:
    """A block within which units of work are made and written; at its end it gives back what they need, the last first.

    As contextlib's ExitStack, without the generators that it enters and the exits that it looks up and binds.
    """

    __slots__ = ("_raised", "ends", "stored")

    def __init__(self) -> None:
        self.ends: list[Callable[[], object]] = []
        """Functions that are called at the end, the last first."""
        self.stored: list[Callable[[], object]] = []
        """Functions that are called behind the end of a block that did not raise."""
        self._raised: tuple[type[BaseException] | None, BaseException | None, TracebackType | None] = None, None, None

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context manager until the end."""
        value = manager.__enter__()
        self.ends.append(lambda: manager.__exit__(*self._raised))
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._raised, ends = (kind, error, traceback), self.ends
        try:
            while ends:
                ends.pop()()
        finally:
            if ends:  # one of them raised
                self.__exit__(kind, error, traceback)
        if error is None:
            for call in self.stored:
                call()
