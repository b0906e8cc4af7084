"""How an LMDB environment is opened: the flags, what is looked at before, and what its errors mean."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from ..config import Durability
from ..errors import AlreadyOpen
from ..files import datafile
from ..files.directory import make_directory, sync_directory
from ..files.free_space import out_of_space, reserve_lock_file
from ..files.system_errors import explained


def open_lmdb(
    path: Path, *, map_bytes: int, durability: Durability, read_only: bool, create: bool, lock: bool
) -> tuple[lmdb.Environment, bytes, int]:
    """Open the directory `path`, made if `create`; the environment, its last key, and the size of its map.

    The arguments are those of Environment. Raises DamagedStore, StoreUnavailable, StoreFull, AlreadyOpen.
    """
    with explained(path):
        return _open(path, map_bytes, durability, read_only=read_only, create=create, lock=lock)


def _open(
    path: Path, map_bytes: int, durability: Durability, *, read_only: bool, create: bool, lock: bool
) -> tuple[lmdb.Environment, bytes, int]:
    if create:
        make_directory(path)
    else:
        map_bytes = max(map_bytes, datafile.verify(path).file_bytes * 2)
    if not read_only:
        reserve_lock_file(path)
    try:
        environment = lmdb.open(
            os.fspath(path),
            map_size=map_bytes,
            max_dbs=0,
            readonly=read_only,
            create=create,
            lock=lock,
            sync=durability != "none",
            metasync=durability == "commit",
            meminit=False,
            readahead=False,
            max_readers=1024,
            max_spare_txns=4,
            lib_version=0,
        )
    except lmdb.Error as error:  # no permission, no address space, or another process has just removed it
        if "already open in this process" in str(error):
            raise AlreadyOpen(path) from error
        full = out_of_space(path, error) if create else None
        if full is not None:
            raise full from error
        raise
    if create:
        sync_directory(path)
    try:
        with environment.begin() as raw:
            cursor = raw.cursor()
            last = cursor.key() if cursor.last() else b""
    except BaseException:
        environment.close()
        raise
    return environment, bytes(last), map_bytes
