"""A look at an LMDB data file before it is opened: is it there, is it whole?

LMDB opened for writing turns a missing or empty file into an empty database silently, and a truncated
one kills the process (SIGBUS) at the first page that is not there. So the two meta pages are read from
the file first. Never call this on a file that this process has open: closing the descriptor is harmless
for data.mdb, but the habit is fatal for lock.mdb (fcntl locks go with any descriptor).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from ..errors import DamagedStore
from .lmdb_layout import meta_in_force, open_file
from .pages import find_problems


class DataFile(NamedTuple):
    """The facts in the newer of the two meta pages."""

    page_bytes: int
    map_bytes: int
    last_page: int
    transaction: int
    file_bytes: int

    @property
    def short(self) -> bool:
        """True where pages that were once allocated lie past the end of the file.

        Such a page may be free (allocated and freed by one commit, never written) or lost.
        """
        return (self.last_page + 1) * self.page_bytes > self.file_bytes


def inspect(directory: Path) -> DataFile:
    """Read the meta pages of `directory`/data.mdb. Raises DamagedStore when no valid one is there."""
    path = directory / "data.mdb"
    try:
        with open_file(directory) as descriptor:
            file_bytes = os.fstat(descriptor).st_size
            page_bytes, metas = meta_in_force(descriptor)
    except FileNotFoundError as error:
        raise DamagedStore(path, "is missing") from error
    if not metas:
        raise DamagedStore(path, f"no LMDB data file ({file_bytes} bytes)")
    newest = metas[-1]
    return DataFile(page_bytes, newest.map_bytes, newest.last_page, newest.transaction, file_bytes)


def verify(directory: Path) -> DataFile:
    """Refuse what would be opened as empty or kill the process. Raises DamagedStore.

    Of a short file every page that is in use is looked for, O(file); beside a writing process what is missing counts
    only if nothing was committed meanwhile.
    """
    data = inspect(directory)
    while data.short and (problems := find_problems(directory)):
        before, data = data, inspect(directory)
        if data == before:
            raise DamagedStore(directory / "data.mdb", f"is {data.file_bytes} bytes, truncated: {problems[0]}")
    return data


LOOK_NS = 10_000_000
"""Time between two looks whether a file is still in its place.

Each look lets go of the interpreter lock: one in every group of sixteen threads' sends cost 12 to 25 % of their
processor time (on one processor).
"""


class InPlace:
    """Tells whether an open file is still where it was opened: one that was removed takes writes, and keeps none.

    The system goes on taking writes to a file whose directory was removed, and what they hold is gone with the process.
    """

    def __init__(self, file: Path | str) -> None:
        """Take the file that is there now for the right one."""
        self._path = os.fspath(file)
        self._look_at_ns = 0
        self._identity: tuple[int, int] | None = None
        try:
            self._identity = self._look()
        except OSError:  # another process has just removed it: it is only read
            return

    def _look(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino

    def verify(self, now_ns: int | None = None) -> None:
        """Raise FileNotFoundError when the file was removed, moved, or replaced by another.

        now_ns: time.perf_counter_ns(); nothing is looked at within LOOK_NS of the last look. None: always look.
        """
        if now_ns is not None:
            if now_ns < self._look_at_ns:
                return
            self._look_at_ns = now_ns + LOOK_NS
        try:
            in_place = self._identity in (None, self._look())
        except (FileNotFoundError, NotADirectoryError):
            in_place = False
        except OSError:  # it cannot be told: no permission any more, say
            return
        if not in_place:
            raise FileNotFoundError(errno.ENOENT, "the file was removed or moved while the store was open", self._path)
