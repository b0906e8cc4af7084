"""The state of an open store, and the steps that close it, each taken whatever became of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from duelog.store.errors import ClosedError
from duelog.store.files.process import here

_ATTEMPTS = 3
"""How often a step is begun that does not come to its end."""


class Shutdown:
    """Steps in order, each of which may be taken again. What the first raises is a refusal: nothing is done then."""

    def __init__(self, steps: Sequence[Callable[[], None]]) -> None:
        self._steps = list(steps)
        self._taken: set[int] = set()

    def run(self) -> None:
        """Take the steps not taken yet; one that raises, or is interrupted, is tried again.

        Raises the first error once all are done.
        """
        first: BaseException | None = None
        for number, step in enumerate(self._steps):
            for attempt in range(_ATTEMPTS):
                try:
                    if number not in self._taken:
                        step()
                    break
                except BaseException as error:
                    if not number and (isinstance(error, Exception) or attempt + 1 == _ATTEMPTS):
                        raise
                    first = first or error
            self._taken.add(number)
        if first is not None:
            raise first


class OpenState:
    """The state of one store: open in the process that opened it, until `closed` is set."""

    def __init__(self, path: Path) -> None:
        self.closed = False
        self._path = path
        self._process = here.pid

    @property
    def forked(self) -> bool:
        """True in a child process, after fork, of the one that opened the store."""
        return here.pid != self._process

    def check(self) -> None:
        """Raise ClosedError after close, and in a child process after fork."""
        if self.closed:
            raise ClosedError(f"store {self._path}")
        if self.forked:
            raise ClosedError(f"store {self._path} (opened by process {self._process}, used by child {here.pid})")
