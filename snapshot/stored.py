"""Inspection of the snapshots of a partition without using them: which there are, and whether they verify."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ..store.codec.format import Table, split_snapshot_key, trailing_u32
from ..store.env.environment import Environment
from .snapshot_format import Metadata, Unusable, part_missing, read_metadata, read_part, snapshot_keys


class SnapshotState(Enum):
    """State of a snapshot. Only a COMPLETE one is ever restored from; the next one's writer removes TORN ones."""

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
    """Iterate over every snapshot of a log, or of all logs of a partition, by log and id.

    `read_parts` reads every part and verifies its checksum (about 3 ms a million entries); else metadata only, and
    that all of its parts are there.
    """
    parts: dict[tuple[int, int], dict[int, int]] = {}
    complete: dict[tuple[int, int], int] = {}
    with environment.read() as raw:
        for key, size in snapshot_keys(raw, Table.SNAPSHOT_PART, ledger_id):
            parts.setdefault(split_snapshot_key(key), {})[trailing_u32(key)] = size
        for key, size in snapshot_keys(raw, Table.SNAPSHOT_META, ledger_id):
            complete[split_snapshot_key(key)] = size
    for of_ledger, snapshot_id in sorted({*parts, *complete}):
        sizes = parts.get((of_ledger, snapshot_id), {})
        stored_bytes = sum(sizes.values()) + complete.get((of_ledger, snapshot_id), 0)
        state, reason, metadata = SnapshotState.COMPLETE, "", None
        if (of_ledger, snapshot_id) not in complete:
            state, reason = SnapshotState.TORN, "it was not finished"
        else:
            try:
                with environment.read() as raw:
                    candidate = read_metadata(raw, of_ledger, snapshot_id)
                for number in range(len(candidate.parts)):
                    if read_parts:
                        read_part(environment, of_ledger, snapshot_id, candidate, number)
                    elif number not in sizes:
                        raise part_missing(number, candidate)
                metadata = candidate
            except Unusable as error:
                state, reason = SnapshotState.DAMAGED, str(error)
        yield SnapshotInfo(of_ledger, snapshot_id, state, reason, len(sizes), stored_bytes, metadata)
