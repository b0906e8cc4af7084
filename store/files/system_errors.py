"""Errors of the operating system and of LMDB as errors of a store: a shortage, no space, no permission, or damage.

The one place that decides this. A shortage (of descriptors, memory, disk) is never damage: nothing is quarantined for
it, and the same call may be made again. LMDB passes most errors on as the system's text, so the number is found by it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from ..errors import (
    AlreadyOpen,
    DamagedStore,
    DuelogError,
    NoPermission,
    ResourceShortage,
    StoreFull,
    StoreUnavailable,
)

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
        return AlreadyOpen(path)
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
