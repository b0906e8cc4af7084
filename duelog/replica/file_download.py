"""Fetching the files of a manifest into directories of environments."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from duelog.partitions.relocation import applied_rows, join
from duelog.partitions.timespan import directory_name
from duelog.store.codec.checksum import crc32
from duelog.store.env.body_file import body_file
from duelog.store.env.environment import Environment
from duelog.store.errors import ReplicaDamaged
from duelog.store.files.directory import discard_tree, make_directory

from .bucket import Bucket
from .manifest import ReplicaFile


def put_file(
    bucket: Bucket,
    file: ReplicaFile,
    directory: Path,
    told: Callable[[int], object] = lambda size: None,
    *,
    flush: bool = True,
) -> None:
    """Put a file of a manifest into the directory of its environment, or its rows, where the file before it is there.

    Raises as `download`, DamagedStore, StoreFull.
    """
    if file.after is None:
        download(bucket, file, directory, told, flush=flush)
        return
    behind = directory.with_name(f"{directory.name}.behind")
    try:
        download(bucket, file, behind, told, flush=False)
        name = f"partition {directory_name(file.start_ms)}"
        with closing(Environment(behind, name=name, read_only=True, lock=False)) as rest, applied_rows(rest) as raw:
            join(raw, name, directory)
    finally:
        discard_tree(behind)


def download(
    bucket: Bucket,
    file: ReplicaFile,
    directory: Path,
    told: Callable[[int], object] = lambda size: None,
    *,
    flush: bool = True,
) -> Path:
    """Put a file of a manifest into the directory of its environment, on disk if `flush`, and return where it is.

    told: how many bytes were read since it was last told. Raises ReplicaDamaged.
    """
    target = directory / "data.mdb" if file.ledger is None else body_file(directory, file.ledger)
    if flush:
        make_directory(target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    pieces = bucket.download(file.name)
    if pieces is None:
        raise ReplicaDamaged(bucket.url, file.name, "is missing")
    size = crc = 0
    with target.open("wb") as written:
        for piece in pieces:
            written.write(piece)
            size, crc = size + len(piece), crc32(piece, crc)
            told(len(piece))
        if flush:
            written.flush()
            os.fsync(written.fileno())
    if (size, crc) != (file.size, file.crc):
        raise ReplicaDamaged(bucket.url, file.name, "does not match the manifest's checksum")
    return target
