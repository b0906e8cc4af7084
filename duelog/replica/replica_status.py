"""Where a copy stands, told from the bucket alone; and what a store's directory has, or had, that is not in it."""

import json
from pathlib import Path
from typing import NamedTuple

from duelog.store.errors import ReplicaDamaged
from duelog.store.wal.wal_reader import WalFollower

from .bucket import FILES, LOG, Bucket
from .identity import REPLICA, copied_identity
from .log_object import Owner, find_object
from .pruning import read_manifests

MESSAGES = "messages.jsonl"
"""File of a tail that was set aside: its messages, a line of JSON each."""


class ReplicaStatus(NamedTuple):
    """A copy. first_ms, last_ms: every moment between them can be restored, but for gaps; None: none can.

    last_place: the last group that is shipped; 0: none is. behind_groups, behind_bytes: groups of the store that are
    not shipped, None where no directory was asked about. damaged: manifests that cannot be read. epoch: of the last
    object; 0: there is none. lease_ms, leader: of its maker, where clients find it; 0: it held no lease.
    """

    url: str
    store_id: str
    manifests: int
    first_ms: int | None
    manifest_ms: int | None
    last_ms: int | None
    last_place: int
    log_objects: int
    log_bytes: int
    files: int
    file_bytes: int
    behind_groups: int | None
    behind_bytes: int | None
    damaged: tuple[str, ...]
    epoch: int
    lease_ms: int
    leader: str


def shipped_to(path: Path) -> str | None:
    """The prefix that the store in `path` ships to; None: to none."""
    try:
        url = json.loads((path / REPLICA).read_bytes())["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(url)


def aside_of(path: Path) -> Path:
    """The directory of the tails of the store in `path`, which are set aside as another leads."""
    return path.with_name(f"{path.name}.diverged")


def tails_of(path: Path) -> dict[int, Path]:
    """The file of each tail of the store in `path` that is there, by epoch, in order."""
    files = aside_of(path).glob(f"*/{MESSAGES}")
    return dict(sorted((int(file.parent.name), file) for file in files if file.parent.name.isdigit()))


def replica_status(bucket: Bucket, store: Path | None = None) -> ReplicaStatus:
    """Look at a copy, and with `store` at the directory that ships to it. Raises ReplicaRefused, ReplicaUnreachable."""
    identity = copied_identity(bucket)
    manifests, damaged = read_manifests(bucket)
    log, files = bucket.listing(LOG), bucket.listing(FILES)
    seq = max((int(each.name.rpartition("/")[2]) for each in log), default=0)
    errors = [str(error) for error in damaged]
    end, last_ms = 0, manifests[-1].taken_ms if manifests else None
    epoch, maker = 0, Owner("")
    try:
        if (last := find_object(bucket, seq) if seq else None) is not None:
            epoch, maker = last.epoch, last.maker
            end, last_ms = last.end, max(last.time_ms, last_ms or 0) if manifests else None
    except ReplicaDamaged as error:
        errors.append(str(error))
    behind = None
    if store is not None:
        groups = WalFollower(store, identity[0]).follow()
        behind = [len(group.content) for group in groups if group.position >= end]
    return ReplicaStatus(
        bucket.url,
        identity[0].hex(),
        len(manifests),
        manifests[0].taken_ms if manifests else None,
        manifests[-1].taken_ms if manifests else None,
        last_ms,
        max(end - 1, 0),
        len(log),
        sum(each.size for each in log),
        len(files),
        sum(each.size for each in files),
        None if behind is None else len(behind),
        None if behind is None else sum(behind),
        tuple(errors),
        epoch,
        maker.lease_ms,
        maker.address,
    )
