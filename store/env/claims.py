"""Claims on logs: either a group of the write-ahead log or a commit of an environment may append to a log.

Both give a log's entries their ids before the entries are durable, so a log has one of them at a time. A commit waits
for a group, which is one flush; a group never waits while it holds a claim: it gives all back and starts over. So no
two wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType

from ..errors import DuelogError, StoreFailed

_LOOK_AGAIN_S = 0.1
"""Longest wait: an interrupt may have come between a release and its notification."""


class Conflict(DuelogError):
    """A group wants a log that a commit appends to. Never leaves the write-ahead log's writer."""

    def __init__(self, owner: object) -> None:
        super().__init__("a commit appends to the log")
        self.owner = owner


class Claims:
    """The logs that are being appended to, of one store. Thread-safe."""

    def __init__(self) -> None:
        self.publishing = threading.Lock()
        """Held while a group's rows are added to memtables and memory hears of them, or a memtable's are taken."""
        self.torn = False
        """True where memtables may have a part of a group: while its rows are added, for good where that broke off."""
        self.failed: StoreFailed | None = None
        """Why no claim is given any more: a group broke off, and memory may not have what is on disk."""
        self._mutex = threading.Lock()
        self._released = threading.Condition(self._mutex)
        self._by_owner: dict[object, object] = {}
        """The claimant; or the StoreFailed of a commit that is in doubt, for good."""
        self._waiting = 0
        """Threads that wait for a claim; counted before they look, so that who gives one back sees them."""

    def take(self, owner: object, claimant: object) -> None:
        """Claim the log `owner` for a commit, and wait for that; nothing happens where `claimant` has the claim.

        Raises StoreFailed.
        """
        if not self.is_taken(owner, claimant):
            with self._mutex, self._counted():
                while not self.is_taken(owner, claimant):
                    if self.failed is not None:
                        raise self.failed
                    self._refuse_broken_off(owner)
                    self._released.wait(_LOOK_AGAIN_S)

    def refuse_torn(self) -> None:
        """Raise StoreFailed where memtables may have a part of a group. REQUIRES: `publishing` is held."""
        if self.torn:
            raise self.failed or StoreFailed(Path("wal"), "a group was broken off while memory was told of it")

    def is_taken(self, owner: object, claimant: object) -> bool:
        """Claim the log without waiting; False where another has it."""
        return self._by_owner.setdefault(owner, claimant) is claimant  # one step, without the mutex

    def try_take(self, owner: object, claimant: object) -> None:
        """Claim the log for a group of the write-ahead log. Raises Conflict where a commit has it, StoreFailed."""
        if not self.is_taken(owner, claimant):
            self._refuse_broken_off(owner)
            raise Conflict(owner)

    def _refuse_broken_off(self, owner: object) -> None:
        held = self._by_owner.get(owner)
        if isinstance(held, StoreFailed):
            raise held

    def wait(self, owner: object) -> None:
        """Wait until no claim on the log is held, or none is given any more. REQUIRES: this thread holds none."""
        with self._mutex, self._counted():
            while not isinstance(self._by_owner.get(owner), (StoreFailed, NoneType)):
                self._released.wait(_LOOK_AGAIN_S)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def release(self, claimant: object, owners: Sequence[object], failed: StoreFailed | None = None) -> None:
        """Give the claims of `claimant` on `owners` back; one that it does not hold is left. Never raises.

        failed: why its commit is in doubt. The ids that it gave may be on disk, so who wants the logs gets this.
        """
        for owner in owners:
            if self._by_owner.get(owner) is claimant:
                if failed is None:
                    del self._by_owner[owner]
                else:
                    self._by_owner[owner] = failed
        if self._waiting:
            with self._mutex:
                self._released.notify_all()
