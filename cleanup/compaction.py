"""Compaction of one closed partition: the next generation of its directory, without the bodies that are not claimed.

Two steps, each a plain function, for a plan (compaction_plan.py). `stage_generation` writes the next generation into a
directory of its own below staging/, and reads it back: counts, entry ids, due times, conditions and checksums of what
is kept, and every other row, against the source. Runs have their bodies in them in the copy, which has no body files.
`hand_over` renames it into staging/ready/, from where the process with the store's lock adopts it (adoption.py).

Unreadable runs are copied as they are, and checksums of bodies are copied, not computed: a copy is no less damaged,
and no more, than its source.

Nothing here touches the main environment but to read it, or the source at all: a step that fails, is repeated, or runs
twice at a time leaves the store as it was. What it leaves in staging/ is removed when the store is next opened.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ..partitions.timespan import directory_name
from ..store.batches import batches
from ..store.codec import format as fmt
from ..store.codec.format import Table
from ..store.codec.run import Run, whole_value
from ..store.env.environment import Environment
from ..store.env.memtable import Reads, read_bodies
from ..store.env.transaction import LmdbTransaction
from ..store.errors import BrokenInvariant, CorruptEntry, DamagedStore
from ..store.files.directory import children, make_directory, remove_tree, sync_directory
from ..store.files.failpoints import reach
from .compaction_plan import CompactionPlan, can_be_thinned, mask

READY = "ready"
"""The directory below staging/ of finished generations."""

_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 4_096


class Staged(NamedTuple):
    """A verified generation in a directory of its own, once it is handed over in staging/ready/. Picklable."""

    directory: str
    start_ms: int
    generation: int
    file_bytes: int
    source_bytes: int
    dead_entries: int
    dead_bytes: int


# -- writing -----------------------------------------------------------------------------------


def stage_generation(
    store: Path, source: Environment, plan: CompactionPlan, *, progress: Progress = lambda done: None
) -> Staged:
    """Write the next generation into a new directory below staging/ of `store`, on disk, and verify it.

    Attempts of one partition do not meet. Raises DamagedStore (the source is not what was planned, or the copy is not
    what it should be), StoreFull, OSError; then nothing is left.
    """
    staging = store / "staging"
    directory = staging / f"compact-{plan.partition}-{uuid.uuid4().hex}"
    make_directory(staging)
    try:
        copy_generation(source, plan, directory, progress=progress)
        with closing(Environment(directory, name=f"{source.name}, generation {plan.generation + 1}",
                                 read_only=True, lock=False)) as copy:  # fmt: skip
            verify_generation(source, copy, plan, progress=progress)
    except BaseException:
        remove_tree(directory)
        raise
    size = (directory / "data.mdb").stat().st_size
    return Staged(
        os.fspath(directory), plan.start_ms, plan.generation + 1, size, plan.file_bytes, plan.dead_entries,
        plan.dead_bytes,
    )  # fmt: skip


def hand_over(store: Path, staged: Staged) -> Staged:
    """Put a staged generation where the store looks for finished ones; it may be adopted at any instant after.

    Raises FileNotFoundError where it is no longer there: the store was opened meanwhile, which clears staging/.
    """
    source = Path(staged.directory)
    ready = store / "staging" / READY
    unique = source.name.rpartition("-")[2]
    target = ready / f"{directory_name(staged.start_ms)}-g{staged.generation:06d}-{unique}"
    while True:
        make_directory(ready)
        try:
            os.rename(source, target)
        except FileNotFoundError:
            if not source.exists():
                raise
            continue  # the store has just emptied and removed `ready`
        break
    with suppress(FileNotFoundError):  # adopted already, which made it durable where it lies now
        sync_directory(ready)
    reach("compact.copied")
    return staged._replace(directory=os.fspath(target))


def copy_generation(
    source: Environment, plan: CompactionPlan, dest: Path, *, progress: Progress = lambda done: None
) -> None:
    """Write the generation after `source` into `dest`, a directory to be made: in order of key, synced at the end.

    Raises DamagedStore when `source` is not the generation that was planned.
    """
    environment = Environment(dest, name=f"staging {plan.partition}", durability="none", create=True)
    with closing(environment), source.read() as raw:
        plan.require_source(source, raw)
        rows = _compacted(source.name, raw, plan, progress)
        for batch in batches(rows, lambda row: len(row[1]), _BATCH_BYTES, _BATCH_ROWS):
            _append(environment, batch)
        environment.sync()
    with (dest / "data.mdb").open("rb") as file:
        os.fsync(file.fileno())
    sync_directory(dest)


def _append(environment: Environment, batch: list[tuple[bytes, Buffer]]) -> None:
    def work(transaction: LmdbTransaction) -> None:
        for key, value in batch:
            if not transaction.raw.put(key, value, append=True):
                raise BrokenInvariant(f"key {key.hex()} is out of order")

    environment.commit(work)


def _compacted(name: str, raw: Reads, plan: CompactionPlan, progress: Progress) -> Rows:
    new = sorted(plan.described().items())
    stays = plan.stays()
    for key, value in other_rows(raw):
        while new and new[0][0] < key:
            yield new.pop(0)
        progress(len(key) + len(value))
        if key[0] != Table.RUN:
            yield key, value
            continue
        stay = stays.get(fmt.split_run_key(key)[0])
        yield key, value if stay is None else _thinned(name, key, value, stay)
    yield from new


def _thinned(name: str, key: bytes, value: Buffer, stay: BitMap) -> Buffer:
    """A run without the bodies of the entries that are not in `stay`; one that cannot be read, as it is."""
    try:
        run = Run(name, key, value)
    except CorruptEntry:
        return value
    if not can_be_thinned(run):
        return value
    kept = stay.range_cardinality(run.first_entry, run.limit)
    if kept == run.count:
        return value
    return run.keeping(mask(stay, run) if kept else np.zeros(run.count, dtype=np.bool_))


def ready_generations(store: Path) -> list[Path]:
    """Finished generations that are to be adopted."""
    return children(store / "staging" / READY)


Buffer = bytes | memoryview
Rows = Iterator[tuple[bytes, Buffer]]
Progress = Callable[[int], object]
"""Told of bytes of the source that have been dealt with since it was last told."""


def other_rows(raw: Reads) -> Rows:
    """Yield every row but those that describe the generation; runs with their bodies in them."""
    cursor, read = raw.cursor(), read_bodies(raw)
    more = cursor.first()
    while more:
        key = bytes(cursor.key())
        if key not in (fmt.PARTITION_INFO_KEY, fmt.ORIGIN_KEY):
            value = cursor.value()
            yield key, whole_value(key, value, read) if key[0] == Table.RUN else value
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
