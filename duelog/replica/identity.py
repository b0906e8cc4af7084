"""Whose copy lies under a prefix: its object STORE, the file REPLICA of a store's directory, and the probe of a bucket.

STORE is created if absent: one store has the prefix for ever. REPLICA names the openings of this directory that ship
there. The log's last object is of one of them; else another directory has shipped, and this one is refused: it may be a
copy, or was restored, or lies behind.
"""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from duelog.partitions.away import Away, directory_in_use, rests
from duelog.store.codec.sealed_json import pack_json, unpack_json
from duelog.store.errors import ForkFound, ReplicaRefused, ReplicaUnreachable
from duelog.store.files.directory import children, write_file

from .bucket import AlreadyThere, Bucket

FORMAT = 1
STORE = "STORE"
REPLICA = "REPLICA"
ROUNDS, CREATORS = 50, 32
"""The probe: rounds, and how many threads create one object in each."""


class Shipped(NamedTuple):
    """The content of REPLICA. url: the prefix. owners: the last openings of this directory that ship there.

    epoch: in which they lead. new_line: the directory was restored, and its ids are still to be set apart from those
    that the leader before has given out. gap: groups were never shipped, and no manifest is behind them yet.
    inode: `inode_of` the directory as it shipped; 0: it has not, or by a version that did not write this.
    """

    url: str
    owners: tuple[str, ...] = ()
    epoch: int = 1
    new_line: bool = False
    gap: bool = False
    inode: int = 0

    def write(self, path: Path) -> None:
        """Write the file of the store in `path`, durably."""
        write_file(path / REPLICA, json.dumps(self._asdict()).encode() + b"\n")


def read_shipped(path: Path, url: str) -> Shipped | None:
    """Read REPLICA of the store in `path`; None: it is not there, or of another prefix. Raises ReplicaRefused."""
    try:
        fields: dict[str, Any] = json.loads((path / REPLICA).read_bytes())
        marks = {name: bool(fields.get(name, False)) for name in ("new_line", "gap")}
        epoch, inode = int(fields.get("epoch", 1)), int(fields.get("inode", 0))
        shipped = Shipped(str(fields["url"]), tuple(fields["owners"]), epoch, **marks, inode=inode)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ReplicaRefused(
            url, f"{path / REPLICA} cannot be read: `duelog replica init` with a new prefix"
        ) from error
    return shipped if shipped.url == url else None


def inode_of(path: Path) -> int:
    """The number of the store's file STORE in its file system: a copy of the directory seldom has the same.

    Nothing writes that file again. It keeps its number where the directory is renamed, or given to another user.
    """
    return (path / STORE).stat().st_ino


def store_object(bucket: Bucket) -> tuple[bytes, int] | None:
    """(store id, partition_ms) that STORE says; None: there is none. Raises ReplicaRefused, ReplicaUnreachable."""
    content = bucket.get(STORE)
    if content is None:
        return None
    try:
        fields, is_whole = unpack_json(content)
        if not is_whole:
            raise ReplicaRefused(bucket.url, "STORE does not match its checksum")
        if fields["format"] != FORMAT:
            raise ReplicaRefused(bucket.url, f"is of format {fields['format']}, expected {FORMAT}")
        return bytes.fromhex(fields["store_id"]), int(fields["partition_ms"])
    except (ValueError, KeyError, TypeError) as error:
        raise ReplicaRefused(bucket.url, "STORE cannot be read: this is no copy of a store") from error


def copied_identity(bucket: Bucket) -> tuple[bytes, int]:
    """The id and `partition_ms` of the store whose copy it is. Raises ReplicaRefused, also where there is no STORE."""
    found = store_object(bucket)
    if found is None:
        raise ReplicaRefused(bucket.url, "holds no copy of a store: there is no STORE")
    return found


def claim(bucket: Bucket, path: Path, store_id: bytes, partition_ms: int) -> Shipped:
    """Make the prefix the copy of the store in `path`, which it may be already; its REPLICA.

    Raises ReplicaRefused where it is the copy of another store, or of this one shipped from elsewhere, or where days
    of the store are in another copy alone; ReplicaUnreachable.
    """
    for rest in [each for directory in children(path / "partitions") for each in rests(directory)]:
        url = Away.read(rest).url
        if url != bucket.url and directory_in_use(rest.with_name("g000001")) == rest:
            raise ReplicaRefused(
                bucket.url,
                f"days of this store are in {url} alone: open it with that `replica`, and without `max_local_bytes`, "
                "until `duelog stats` says of none that it is away",
            )
    content = pack_json({"format": FORMAT, "store_id": store_id.hex(), "partition_ms": partition_ms})
    with suppress(AlreadyThere):
        bucket.create(STORE, content)
    found = store_object(bucket)
    if found is None:
        raise ReplicaRefused(bucket.url, "STORE is not there once it was created")
    if found[0] != store_id:
        raise ReplicaRefused(bucket.url, f"is the copy of store {found[0].hex()}, not of {store_id.hex()} in {path}")
    try:
        bucket.create(STORE, content + b" ")
    except AlreadyThere:
        pass
    else:
        raise ReplicaRefused(
            bucket.url, "lets a second writer create an object that is there: no copy can be kept there"
        )
    shipped = read_shipped(path, bucket.url)
    if shipped is None:
        if bucket.span() or bucket.manifests():
            raise ForkFound(
                bucket.url,
                f"has a log that was not shipped from {path}: that is a copy of the store, was restored, or was "
                "repaired. `duelog replica init` gives it a new prefix",
            )
        shipped = Shipped(bucket.url)
        shipped.write(path)
    return shipped


def probe(bucket: Bucket, rounds: int = ROUNDS, creators: int = CREATORS) -> None:
    """Have many threads create one object, again and again. Raises ReplicaRefused where not one of them does.

    Raises ReplicaUnreachable where a creator got no answer.
    """
    folder = f"probe/{uuid.uuid4().hex}"
    names = [f"{folder}/{number:04d}" for number in range(rounds)]
    try:
        for name in names:
            created = _race(bucket, name, creators)
            if len(created) != 1 or bucket.get(name) != created[0]:
                raise ReplicaRefused(
                    bucket.url,
                    f"lies about conditions: {len(created)} of {creators} writers created one object. No copy can be "
                    "kept there",
                )
    finally:
        bucket.delete(names)


def _race(bucket: Bucket, name: str, creators: int) -> list[bytes]:
    created: list[bytes] = []
    unanswered: list[ReplicaUnreachable] = []
    together = threading.Barrier(creators)

    def create(number: int) -> None:
        content = f"creator {number}".encode()
        together.wait()
        try:
            bucket.create(name, content)
            created.append(content)
        except AlreadyThere:
            pass
        except ReplicaUnreachable as error:
            unanswered.append(error)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(creators)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if unanswered:
        raise unanswered[0]
    return created
