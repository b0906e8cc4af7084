"""Looking at the snapshots of a partition without using them: what is there, and whether it verifies."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ..store.codec.format import Table, snapshot_part_key, split_snapshot_key
from ..store.env.environment import Environment
from .snapshot_format import Metadata, Part, Unusable, read_metadata, snapshot_keys


class SnapshotState(Enum):
    """What a snapshot is. Only a COMPLETE one is ever restored from; TORN ones are removed by the next one's writer."""

    COMPLETE = "complete"
    TORN = "torn"
    """Parts without metadata: the process ended while it was written."""
    DAMAGED = "damaged"
    """Metadata or a part does not verify, or is of a version that this library does not know."""


class SnapshotInfo(NamedTuple):
    """A snapshot found in a partition's environment; `metadata` is None where it cannot be read."""

    ledger_id: int
    snapshot_id: int
    state: SnapshotState
    reason: str
    """Why it is not complete; empty if it is."""
    parts: int
    """Parts found."""
    stored_bytes: int
    """Bytes of the parts found and the metadata."""
    metadata: Metadata | None


def inspect_snapshots(
    environment: Environment, ledger_id: int | None = None, *, read_parts: bool = False
) -> Iterator[SnapshotInfo]:
    """Every snapshot of a log, or of all logs of a partition, by log and id.

    `read_parts` reads every part and verifies its checksum (about 3 ms a million entries); else metadata only, and
    that all of its parts are there.
    """
    parts: dict[tuple[int, int], list[int]] = {}
    complete: dict[tuple[int, int], int] = {}
    with environment.read() as raw:
        for key, size in snapshot_keys(raw, Table.SNAPSHOT_PART, ledger_id):
            parts.setdefault(split_snapshot_key(key), []).append(size)
        for key, size in snapshot_keys(raw, Table.SNAPSHOT_META, ledger_id):
            complete[split_snapshot_key(key)] = size
    for of_ledger, snapshot_id in sorted({*parts, *complete}):
        sizes = parts.get((of_ledger, snapshot_id), [])
        stored_bytes = sum(sizes) + complete.get((of_ledger, snapshot_id), 0)
        state, reason, metadata = SnapshotState.COMPLETE, "", None
        if (of_ledger, snapshot_id) not in complete:
            state, reason = SnapshotState.TORN, "it was not finished"
        else:
            try:
                metadata = _verify(environment, of_ledger, snapshot_id, read_parts)
            except Unusable as error:
                state, reason = SnapshotState.DAMAGED, str(error)
        yield SnapshotInfo(of_ledger, snapshot_id, state, reason, len(sizes), stored_bytes, metadata)


def _verify(environment: Environment, ledger_id: int, snapshot_id: int, read_parts: bool) -> Metadata:
    """Raises Unusable."""
    with environment.read() as raw:
        metadata = read_metadata(raw, ledger_id, snapshot_id)
    for number, record in enumerate(metadata.parts):
        key = snapshot_part_key(ledger_id, snapshot_id, number)
        with environment.read() as raw:
            value = raw.get(key)
            if value is None:
                raise Unusable(f"part {number} of {len(metadata.parts)} is missing")
            if read_parts:
                Part(key, value, record)
    return metadata
