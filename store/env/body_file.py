"""Body files: the bodies of large runs, in a file for each ledger beside the LMDB environment that has its runs.

    <environment>/bodies/LEDGER.bodies        appended to, from a page on; what lies between two runs counts for nothing

Bodies are on disk before a group of the log names them, so whatever names them finds them whole. What a crash left
behind the last that is named stays as a gap. A file goes with its ledger, or with the directory of its environment.
"""

import errno
import os
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path

from ..codec.bodies import Buffer
from ..files.directory import children, sync_directory
from ..files.failpoints import reach
from ..files.system_calls import sync_all
from ..files.system_errors import explained

DIRECTORY = "bodies"
_SUFFIX = ".bodies"

_PAGE_BYTES = 4096
"""Bodies begin at a multiple of this: a page that is on disk is never written again."""

_MOST_MAPS = 16
"""Files that a transaction has mapped."""

_MOST_KEPT = 4
"""Files that an environment has mapped between two transactions."""

_MOST_PIECES = 1024
"""Pieces that one call writes (IOV_MAX)."""


def body_file(directory: Path, ledger_id: int) -> Path:
    """The body file of a ledger of the environment in `directory`."""
    return Path(body_path(directory, ledger_id))


def body_path(directory: Path | str, ledger_id: int) -> str:
    """Its path without a path object, which a large run has no time for."""
    return f"{directory}/{DIRECTORY}/{ledger_id}{_SUFFIX}"


def body_files(directory: Path) -> dict[int, Path]:
    """The body files beside the environment in `directory`, by ledger id."""
    found = [path for path in children(directory / DIRECTORY) if path.suffix == _SUFFIX and path.stem.isdecimal()]
    return {int(path.stem): path for path in found}


def length_of(directory: Path) -> int:
    """Bytes of the files of the environment in `directory`. Raises FileNotFoundError."""
    files = (directory / "data.mdb", *body_files(directory).values())
    return sum(os.stat(path).st_size for path in files)


def end_of(path: str) -> int:
    """Where the next bodies of a file begin; 0 where it is not there."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return 0
    return size + -size % _PAGE_BYTES


class StagedBodies:
    """Bodies that are appended to a body file, from byte `at` on, its end."""

    def __init__(self, at: int) -> None:
        self.at = self.end = at
        self.bodies: list[Buffer] = []

    def add(self, bodies: Buffer) -> None:
        """Append bodies."""
        self.bodies.append(bodies)
        self.end += len(bodies)

    def write(self, descriptor: int) -> bool:
        """Write them to the file; False: a part of them, since the disk is full. Raises OSError."""
        position = self.at
        for start in range(0, len(self.bodies), _MOST_PIECES):
            position += os.pwritev(descriptor, self.bodies[start : start + _MOST_PIECES], position)
        return position == self.end


def append_bodies(files: Mapping[str, StagedBodies], named: Collection[str]) -> None:
    """Append to body files, which are made where there are none, and wait until all of them are on disk.

    named: files whose names are on disk; one that a killed process made may not be. Raises OSError; the files have what
    they had before then, and no more.
    """
    opened: list[tuple[int, StagedBodies]] = []
    new = [Path(path) for path in files if path not in named]
    try:
        for path in new:
            path.parent.mkdir(exist_ok=True)
        for name, staged in files.items():
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            opened.append((descriptor, staged))
            if not staged.write(descriptor):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            reach("bodies.written")
        sync_all([descriptor for descriptor, _ in opened])
        for path in new:
            sync_directory(path.parent)
            sync_directory(path.parent.parent)
    except BaseException:
        for descriptor, staged in opened:
            with suppress(OSError):
                os.ftruncate(descriptor, staged.at)
        raise
    finally:
        for descriptor, _ in opened:
            os.close(descriptor)


class BodyMaps:
    """Maps of the body files of an environment, of which the last few outlive a transaction. Thread-safe.

    A transaction delivers some thousand messages. With a map of its own it would take each page fault anew.
    """

    def __init__(self, directory: str, *, is_read_only: bool = False) -> None:
        """is_read_only: another process may remove a file: then none is kept, and a missing one raises DamagedStore."""
        self._directory = directory
        self._is_read_only = is_read_only
        self._changing = threading.Lock()
        self._kept: dict[int, memoryview] = {}

    def map(self, ledger_id: int, end: int) -> memoryview:
        """The body file of a ledger, up to byte `end` or more; less where it ends before, none where it is not there.

        Raises ResourceShortage, NoPermission, StoreUnavailable.
        """
        bodies = self._kept.get(ledger_id)
        if bodies is None or len(bodies) < end:
            with self._changing:  # what `remove` has removed is not kept
                bodies = self._map(ledger_id)
                if not self._is_read_only:
                    self._kept.pop(ledger_id, None)
                    if len(self._kept) >= _MOST_KEPT:
                        del self._kept[next(iter(self._kept))]
                    self._kept[ledger_id] = bodies
        return bodies

    def _map(self, ledger_id: int) -> memoryview:
        """Map a file without path objects, which would take half of the time."""
        try:
            descriptor = os.open(body_path(self._directory, ledger_id), os.O_RDONLY | os.O_CLOEXEC)
            try:
                return memoryview(mmap(descriptor, 0, access=ACCESS_READ) if os.fstat(descriptor).st_size else b"")
            finally:
                os.close(descriptor)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._is_read_only:
                return memoryview(b"")
            with explained(body_file(Path(self._directory), ledger_id)):
                raise

    def remove(self, ledger_id: int) -> None:
        """Remove the body file of a ledger, if there is one. Raises OSError."""
        with self._changing:
            self._kept.pop(ledger_id, None)
            body_file(Path(self._directory), ledger_id).unlink(missing_ok=True)

    def forget(self) -> None:
        """Keep no map any more: each holds a descriptor, and its pages count as memory of this process."""
        with self._changing:
            self._kept.clear()


class BodyReader:
    """Reads the body files of an environment for one transaction, which has those it has read until it ends.

    Delivery asks for some ten bodies of a run at a time; a system call for each took as long as all the rest. What a
    group has named is never cut off, so nothing is read behind the end of a file.
    """

    __slots__ = ("_files", "_maps")

    def __init__(self, files: BodyMaps) -> None:
        self._files = files
        self._maps: dict[int, memoryview] = {}

    def __call__(self, ledger_id: int, at: int, length: int) -> memoryview:
        """Read from the body file of a ledger, as `BodyMaps.map` says."""
        bodies = self._maps.get(ledger_id)
        if bodies is None or len(bodies) < at + length:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            bodies = self._maps[ledger_id] = self._files.map(ledger_id, at + length)
        return bodies[at : at + length]
