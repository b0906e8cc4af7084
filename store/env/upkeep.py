"""What follows from commits to one environment besides their data: the care for its file and its readers.

Now and then, so that a commit of one message does not pay for it. For the one thread that commits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb

from .eviction import Eviction

COMMITS_A_LOOK = 16
"""Commits from one look at the length of the file to the next."""

_COMMITS_A_READER_CHECK = 1_000
"""Commits between two looks for readers that were killed inside a transaction: they would hold pages for ever."""


class Upkeep:
    """The upkeep of one environment that is open for writing."""

    def __init__(
        self,
        path: Path,
        environment: lmdb.Environment,
        map_anew: Callable[[], bool],
        *,
        synced: bool,
        evicts: bool,
    ) -> None:
        """`path` is its directory; `synced`: commits wait for the disk; `map_anew`, `evicts`: see Eviction."""
        self._environment = environment
        self._page_bytes: int = environment.stat()["psize"]
        self._commits = 0
        self._eviction = Eviction(path, 2 * self._page_bytes, map_anew) if synced and evicts else None

    def committed(self) -> None:
        """Count a commit, and do what is to be done after it."""
        self._commits += 1
        if self._eviction is not None and not self._commits % COMMITS_A_LOOK:
            used: int = (self._environment.info()["last_pgno"] + 1) * self._page_bytes
            self._eviction.look(used)
        if not self._commits % _COMMITS_A_READER_CHECK:
            with suppress(lmdb.Error):  # what is committed stays committed, whatever becomes of this
                self._environment.reader_check()

    def stop_evicting(self) -> None:
        """Drop nothing of the file from the page cache any more."""
        if self._eviction is not None:
            self._eviction.stop()
