"""A new generation against the one it was made from: nothing but what was planned is missing or different."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

import numpy as np
from pyroaring import BitMap

from ..store.codec import format as fmt
from ..store.codec.format import Table
from ..store.codec.run import Run
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.errors import CorruptEntry, DamagedStore
from .compaction_plan import CompactionPlan, can_be_thinned, mask

Buffer = bytes | memoryview
Rows = Iterator[tuple[bytes, Buffer]]
Progress = Callable[[int], object]
"""Told of bytes of the source that have been dealt with since it was last told."""


def other_rows(raw: Reads) -> Rows:
    """Every row but those that say what a generation is."""
    cursor = raw.cursor()
    more = cursor.first()
    while more:
        key = bytes(cursor.key())
        if key not in (fmt.PARTITION_INFO_KEY, fmt.ORIGIN_KEY):
            yield key, cursor.value()
        more = cursor.next()


def verify_generation(
    source: Environment, copy: Environment, plan: CompactionPlan, *, progress: Progress = lambda done: None
) -> None:
    """Compare a copy with its source row by row: nothing but what was planned is missing or different.

    Raises DamagedStore, naming the first row that is not what it should be.
    """
    stays = plan.stays()
    dropped = dropped_bytes = 0
    with source.read() as before, copy.read() as after:
        plan.require_source(source, before)
        for key, fields in plan.described().items():
            if after.get(key) != fields:
                raise DamagedStore(copy.path, f"is not described as generation {plan.generation + 1}")
        for one, other in zip_longest(other_rows(before), other_rows(after)):
            if one is None or other is None or one[0] != other[0]:
                raise DamagedStore(copy.path, f"row {_key_of(other)} where the source has {_key_of(one)}")
            key, value = one
            progress(len(key) + len(value))
            if value == other[1]:
                continue
            stay = stays.get(fmt.split_run_key(key)[0]) if key[0] == Table.RUN else None
            if stay is None:
                raise DamagedStore(copy.path, f"row {key.hex()} differs from the source")
            counts = _compare(source.name, copy, key, value, other[1], stay)
            dropped, dropped_bytes = dropped + counts[0], dropped_bytes + counts[1]
    if (dropped, dropped_bytes) != (plan.dead_entries, plan.dead_bytes):
        raise DamagedStore(
            copy.path, f"lacks {dropped} bodies of {dropped_bytes} bytes, planned were {plan.dead_entries} of "
                       f"{plan.dead_bytes}"
        )  # fmt: skip


def _key_of(row: tuple[bytes, Buffer] | None) -> str:
    return "nothing" if row is None else row[0].hex()


def _compare(name: str, copy: Environment, key: bytes, value: Buffer, other: Buffer, stay: BitMap) -> tuple[int, int]:
    """Two runs that differ: how many bodies, and bytes of them, the second one lacks. Raises DamagedStore."""
    try:
        run, thin = Run(name, key, value), Run(copy.name, key, other)
    except CorruptEntry as error:
        raise DamagedStore(copy.path, str(error)) from error
    if not can_be_thinned(run) or run.fixed() != thin.fixed():
        raise DamagedStore(copy.path, f"run {run.ledger_id}:{run.first_entry} differs in more than its bodies")
    sizes, left, keep = run.body_bytes(), thin.body_bytes(), mask(stay, run)
    right = thin.bodies_fit and np.array_equal(left, np.where(keep, sizes, 0))
    right = right and np.array_equal(run.body_checksums()[keep], thin.body_checksums()[keep])
    right = right and b"".join(run.raw_bodies(keep)) == thin.body_region(0, thin.count)[2]
    damaged = thin.damaged_bodies() if right and left.any() else []
    if damaged:  # then it was so before
        right = damaged == [each for each in run.damaged_bodies() if each[0] in stay]
    if not right:
        raise DamagedStore(copy.path, f"run {run.ledger_id}:{run.first_entry} is not what was to be kept of it")
    gone = ~keep & (sizes > 0)
    return int(gone.sum()), int(sizes[gone].sum())
