"""Body files: the bodies of large runs, in a file for each ledger beside the LMDB environment that has its runs.

    <environment>/bodies/LEDGER.bodies        appended to, from a page on; what lies between two runs counts for nothing

Bodies are on disk before a group of the log names them, so whatever names them finds them whole. What a crash left
behind the last that is named stays as a gap. A file goes with its ledger, or with the directory of its environment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..codec.bodies import Buffer
from ..files.directory import children, sync_directory
from ..files.failpoints import reach
from ..files.system_calls import sync_data
from ..files.system_errors import explained

DIRECTORY = "bodies"
_SUFFIX = ".bodies"

_PAGE_BYTES = 4096
"""Bodies begin at a multiple of this: a page that is on disk is never written again."""

_MOST_PIECES = 1024
"""Pieces that one call writes (IOV_MAX)."""


def body_file(directory: Path, ledger_id: int) -> Path:
    """The body file of a ledger of the environment in `directory`."""
    return directory / DIRECTORY / f"{ledger_id}{_SUFFIX}"


def body_files(directory: Path) -> dict[int, Path]:
    """The body files beside the environment in `directory`, by ledger id."""
    found = [path for path in children(directory / DIRECTORY) if path.suffix == _SUFFIX and path.stem.isdecimal()]
    return {int(path.stem): path for path in found}


def length_of(directory: Path) -> int:
    """Bytes of the files of the environment in `directory`. Raises FileNotFoundError."""
    files = (directory / "data.mdb", *body_files(directory).values())
    return sum(os.stat(path).st_size for path in files)


def end_of(path: Path) -> int:
    """Where the next bodies of a file begin; 0 where it is not there."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return 0
    return size + -size % _PAGE_BYTES


def append_bodies(path: Path, at: int, bodies: Sequence[Buffer], *, is_named: bool) -> None:
    """Write bodies one behind the other from byte `at` on, the end of the file, and wait until they are on disk.

    The file is made where there is none. is_named: its name is on disk; one that a killed process made may not be.
    Raises OSError; the file has what it had before then, and no more.
    """
    if not is_named:
        path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        position = at
        for start in range(0, len(bodies), _MOST_PIECES):
            pieces = bodies[start : start + _MOST_PIECES]
            size = sum(map(len, pieces))
            if os.pwritev(descriptor, pieces, position) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            position += size
        sync_data(descriptor)
        if not is_named:
            sync_directory(path.parent)
            sync_directory(path.parent.parent)
    except BaseException:
        with suppress(OSError):
            os.ftruncate(descriptor, at)
        raise
    finally:
        os.close(descriptor)
    reach("bodies.written")


def read_bodies(directory: str, ledger_id: int, at: int, length: int, *, is_needed: bool = False) -> bytes:
    """Read from the body file of a ledger; fewer bytes where it ends before, none where it is not there.

    Without path objects, which took half of its time. is_needed: a file that is not there, as another process may have
    removed it, raises DamagedStore. Raises ResourceShortage, NoPermission, StoreUnavailable.
    """
    try:
        descriptor = os.open(f"{directory}/{DIRECTORY}/{ledger_id}{_SUFFIX}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, length, at)
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not is_needed:
            return b""
        with explained(body_file(Path(directory), ledger_id)):
            raise
