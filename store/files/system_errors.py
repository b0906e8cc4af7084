"""Errors of the operating system and of LMDB as errors of a store: a shortage, no space, no permission, or damage.

The one place that decides this. A shortage (of descriptors, memory, disk) is never damage: nothing is quarantined for
it, and the same call may be made again. LMDB passes most errors on as the system's text, so the number is found by it.

LMDB calls a full disk and a broken one by the same name: a write that was cut short for want of space is "Input/output
error" to it. So the free space itself is looked at: the file system's, and what the process may still add to the file
(`ulimit -f`).
"""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from ..errors import AlreadyOpen, DamagedStore, DuelogError, NoPermission, ResourceShortage, StoreFull, StoreUnavailable
from .directory import occupied_bytes
from .process import here
from .system_calls import reserve

_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_SHORTAGE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS))
_NOT_PERMITTED = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))

_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PageFullError,
    lmdb.CursorFullError,
    lmdb.InvalidError,
    lmdb.InvalidParameterError,
    lmdb.BadValsizeError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)
"""Errors by which LMDB refuses damaged pages."""

_NUMBERS = {os.strerror(number): number for number in sorted(errno.errorcode)}


def errno_of(error: BaseException) -> int | None:
    """The system's number of an error; None: it has none."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, (MemoryError, lmdb.MemoryError)):
        return errno.ENOMEM
    if isinstance(error, lmdb.ReadersFullError):
        return errno.EAGAIN
    if isinstance(error, lmdb.Error):
        return _NUMBERS.get(str(error).rpartition(": ")[2])
    return None


def explain(path: Path, error: BaseException) -> DuelogError:
    """Translate `error` into duelog's error for `path`, with `error` as its cause; duelog's own stay as they are."""
    if isinstance(error, DuelogError):
        return error
    explained_error = _explain(path, error)
    explained_error.__cause__ = error
    return explained_error


def _explain(path: Path, error: BaseException) -> DuelogError:
    number = errno_of(error)
    if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)):
        path = Path(os.fsdecode(error.filename))
    reason = (os.strerror(number) if number else str(error)) or type(error).__name__
    if isinstance(error, lmdb.Error) and "already open in this process" in str(error):
        return AlreadyOpen(path, is_fork=here.is_fork)
    if isinstance(error, _DAMAGE) or (isinstance(error, lmdb.Error) and "data format" in str(error)):
        return DamagedStore(path, f"cannot be read: {error}")
    if number in _NO_ROOM:
        return StoreFull(path, f"no space to write ({reason})")
    if number in _SHORTAGE:
        return ResourceShortage(path, reason, number)
    if number in _NOT_PERMITTED:
        return NoPermission(path, reason, number)
    if number == errno.ENOENT:
        return DamagedStore(path, "is missing")
    return StoreUnavailable(path, reason, number)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise errors of the system and of LMDB inside the block as duelog's, for `path` (`explain`)."""
    try:
        yield
    except (OSError, lmdb.Error, MemoryError) as error:
        raise explain(path, error) from error


_LOW_SPACE_BYTES = 1 << 20


_LOCK_BYTES = 8192
"""Bytes reserved of lock.mdb: its header and some 120 readers at once."""


def reserve_lock_file(path: Path) -> None:
    """See that lock.mdb of the environment in `path` has space on disk. Raises StoreFull.

    LMDB makes it sparse and writes to it through a map: on a full disk the first touch of a page that is not there
    kills the process (SIGBUS). REQUIRES: not open in this process, or reserved already, since closing the descriptor
    would drop the locks that are held on it.
    """
    lock = f"{path}/lock.mdb"
    with explained(path):
        if occupied_bytes(lock) >= _LOCK_BYTES:
            return
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            reserve(descriptor, _LOCK_BYTES)
        finally:
            os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Return the bytes that the file system of `path` has left for this process. Raises OSError."""
    with explained(path):
        space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def require_space(path: Path, needed: int, purpose: str) -> None:
    """Raise StoreFull where the file system of `path` has less than `needed` bytes for what `purpose` says."""
    free = free_bytes(path)
    if free < needed:
        raise StoreFull(path, f"no space {purpose}: {needed} bytes needed, {free} free", free)


def out_of_space(path: Path, error: Exception) -> StoreFull | None:
    """StoreFull if a commit to the environment in `path` failed with `error` for want of space, else None.

    LMDB writes data pages first and its root page, which lies inside the file, last: a write that found
    no space left the old root in place, so nothing is in doubt.
    """
    text = str(error)
    try:
        space = os.statvfs(path)
    except OSError:  # the directory is gone
        return None
    free = space.f_bavail * space.f_frsize
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        data = path / "data.mdb"
        free = min(free, max(0, limit - (data.stat().st_size if data.exists() else 0)))
    if "No space left" in text or "File too large" in text or "quota" in text or free < _LOW_SPACE_BYTES:
        return StoreFull(path, f"no space to write ({text}); {free} bytes free", free)
    return None


def in_doubt(environment: lmdb.Environment) -> bool:
    """True where a commit could not write the root page: it is in doubt then, for whatever reason."""
    try:
        environment.begin().abort()
    except lmdb.PanicError:
        return True
    return False
