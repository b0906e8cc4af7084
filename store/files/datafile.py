"""A look at an LMDB data file before it is opened: is it there, is it whole?

LMDB opened for writing turns a missing or empty file into an empty database silently, and a truncated
one kills the process (SIGBUS) at the first page that is not there. So the two meta pages are read from
the file first. Never call this on a file that this process has open: closing the descriptor is harmless
for data.mdb, but the habit is fatal for lock.mdb (fcntl locks go with any descriptor).
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from ..errors import DamagedStore
from .lmdb_layout import meta_in_force, open_file
from .system_errors import shortage_in


class DataFile(NamedTuple):
    """What the newer of the two meta pages says."""

    page_bytes: int
    map_bytes: int
    last_page: int
    transaction: int
    file_bytes: int

    @property
    def short(self) -> bool:
        """Whether pages that were once allocated lie past the end of the file.

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


_WALK = """
import sys, lmdb, zlib
env = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=0, map_size=int(sys.argv[2]))
with env.begin(buffers=True) as txn:
    for key, value in txn.cursor():
        zlib.crc32(value, zlib.crc32(key))
with open("/dev/null", "wb") as null:
    try:
        env.copyfd(null.fileno(), compact=True)  # reads the list of free pages, which nothing else shows
    except lmdb.Error:
        pass  # whatever else it finds wrong
env.close()
"""


def walk_in_subprocess(directory: Path, data: DataFile) -> str | None:
    """Read every page in a child process; None when it lived, else how it died. Raises OSError for a shortage.

    For files of which this process cannot be sure; O(file). The file must not be open for writing.
    """
    command = [sys.executable, "-c", _WALK, str(directory), str(max(data.map_bytes, data.file_bytes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"reading it kills a process (signal {-done.returncode})"
    lines = done.stderr.strip().splitlines()
    if lines and (number := shortage_in(lines[-1])):
        raise OSError(number, os.strerror(number), str(directory))
    return lines[-1] if lines else f"reading it exits with {done.returncode}"


def verify(directory: Path) -> DataFile:
    """Refuse what would be opened as empty or kill the process. Raises DamagedStore."""
    data = inspect(directory)
    if data.short:
        death = walk_in_subprocess(directory, data)
        if death is not None:
            raise DamagedStore(directory / "data.mdb", f"is {data.file_bytes} bytes, truncated: {death}")
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

    def __init__(self, file: Path) -> None:
        """Of the file that is there now."""
        self._path = os.fspath(file)
        self._look_at_ns = 0
        self._identity: tuple[int, int] | None = None
        try:
            self._identity = self._look()
        except OSError:  # another process has just removed it: it is only read
            return

    def _look(self) -> tuple[int, int]:
        found = os.stat(self._path)
        return found.st_dev, found.st_ino

    def verify(self, now_ns: int | None = None) -> None:
        """Raise FileNotFoundError when the file was removed, moved, or replaced by another.

        now_ns: time.perf_counter_ns(); nothing is looked at within LOOK_NS of the last look. None: always look.
        """
        if now_ns is not None:
            if now_ns < self._look_at_ns:
                return
            self._look_at_ns = now_ns + LOOK_NS
        try:
            there = self._identity in (None, self._look())
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:  # it cannot be told: no permission any more, say
            return
        if not there:
            raise FileNotFoundError(errno.ENOENT, "the file was removed or moved while the store was open", self._path)
