"""Telling a full disk from a broken one: LMDB calls both by the same name.

A write that was cut short for want of space is "Input/output error" to LMDB, so the free space itself has to be
looked at: the file system's, and what the process may still add to the file (`ulimit -f`).
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import lmdb

from ..errors import StoreFull
from .directory import occupied_bytes
from .system_errors import explained

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
            os.posix_fallocate(descriptor, 0, _LOCK_BYTES)
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
