"""Pruning: removes from a replica's prefix what no restore needs any more.

Every moment of the retention can be restored: the newest manifest before it stays, those after it, the log objects from
the first of them on, and their files. The newest manifest always stays. A file that no manifest names may belong to one
that is being made: only the leader that makes it removes those of less than a day, which have its epoch in their names.
While a manifest cannot be read no file goes: it may name the only copy of a day that is away.
A compacted generation that no store has fetched goes after the retention.
The log object that the newest manifest stands at stays: an old leader that has stood still finds there who leads.
"""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from duelog.store.errors import ReplicaDamaged

from .bucket import COMPACTED, FILES, Bucket, log_name, manifest_name
from .manifest import Manifest, read_manifest


class Pruned(NamedTuple):
    """How many objects were removed."""

    manifests: int
    log_objects: int
    files: int


def read_manifests(bucket: Bucket) -> tuple[list[Manifest], list[ReplicaDamaged]]:
    """The manifests that can be read, by number, and what is wrong with the others. Raises ReplicaUnreachable."""
    manifests: list[Manifest] = []
    damaged: list[ReplicaDamaged] = []
    for seq in bucket.manifests():
        try:
            manifests.append(read_manifest(bucket, seq))
        except ReplicaDamaged as error:
            damaged.append(error)
    return manifests, damaged


def made_by(epoch: int) -> str:
    """End the name of a file that the leader of an epoch has made."""
    return f".{epoch}.mdb"


def prune(bucket: Bucket, now_ms: int, retention_ms: int, *, making: int | None = None) -> Pruned:
    """Remove what lies before the retention. `making`: the epoch of a caller that makes manifests, and none just now.

    Raises ReplicaUnreachable.
    """
    young, listed = datetime.now(UTC) - timedelta(days=1), bucket.listing(FILES)
    manifests, damaged = read_manifests(bucket)  # behind the list: it has nothing of who leads while this stands still
    if not manifests:
        return Pruned(0, 0, 0)
    old = [each for each in manifests if each.taken_ms <= now_ms - retention_ms]
    begins = old[-1] if old else manifests[0]
    kept = [each for each in manifests if each.seq >= begins.seq]
    gone = [each for each in manifests if each.seq < begins.seq]
    bucket.delete([manifest_name(each.seq) for each in gone])
    needed = min([each.first for each in kept] + [each.seq for each in kept])
    numbers = [seq for seq in bucket.numbers() if seq < needed]
    bucket.delete([log_name(seq) for seq in numbers])
    named = {file.name for each in kept for file in each.files}
    files = [
        each.name
        for each in listed
        if each.name.endswith(".mdb") and each.name not in named and not damaged
        if each.modified <= young or (making is not None and each.name.endswith(made_by(making)))
    ]
    bucket.delete(files)
    left = datetime.fromtimestamp((now_ms - retention_ms) / 1000, UTC)
    bucket.delete([each.name for each in bucket.listing(COMPACTED) if each.modified <= left])
    return Pruned(len(gone), len(numbers), len(files))
