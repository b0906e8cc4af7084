"""How an LMDB environment is opened: the flags, what is looked at before, and what its errors mean."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from .config import Durability
from .directory import sync_directory
from .errors import DamagedStore, InvalidArgument
from .room import no_room, reserve_lock_file


def open_lmdb(
    path: Path, *, map_bytes: int, durability: Durability, read_only: bool, create: bool, lock: bool
) -> tuple[lmdb.Environment, bytes]:
    """Open the directory `path`, which exists; the environment, and its last key.

    The arguments are those of Environment. Raises DamagedStore, StoreFull, InvalidArgument.
    """
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
            raise InvalidArgument("path", str(path), "this process has it open already") from error
        full = no_room(path, error) if create else None
        raise full or DamagedStore(path, f"cannot be opened: {error}") from error
    if create:
        sync_directory(path)
    try:
        with environment.begin() as raw:
            cursor = raw.cursor()
            last = cursor.key() if cursor.last() else b""
    except lmdb.Error as error:
        environment.close()
        raise DamagedStore(path, f"cannot be read: {error}") from error
    return environment, bytes(last)
