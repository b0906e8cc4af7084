"""Telling a full disk from a broken one: LMDB calls both by the same name.

A write that was cut short for want of room is "Input/output error" to LMDB, so the room itself has to be
looked at: the file system's, and what the process may still add to the file (`ulimit -f`).
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import lmdb

from .errors import StoreFull

_LOW_SPACE_BYTES = 1 << 20


def no_room(path: Path, error: lmdb.Error) -> StoreFull | None:
    """StoreFull if a commit to the environment in `path` failed with `error` for want of room, else None.

    LMDB writes data pages first and its root page, which lies inside the file, last: a write that found
    no room left the old root in place, so nothing is in doubt.
    """
    text = str(error)
    space = os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        free = min(free, max(0, limit - (path / "data.mdb").stat().st_size))
    if "No space left" in text or "File too large" in text or "quota" in text or free < _LOW_SPACE_BYTES:
        return StoreFull(path, f"no room to write ({text}); {free} bytes free", free)
    return None
