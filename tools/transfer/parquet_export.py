"""Exporting sealed partitions to Parquet: an archive by topic and day, and what an audit needs besides.

Everything that comes from the main environment, the choice of generations too, is of one read transaction. The messages
of a slice are written by a plain function (`export_slice`), here in a loop or by Spark's tasks, into files that no
other attempt has; once all are there they get their names, and the manifest is written last. What fails leaves the
destination as it was found: empty.
"""

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...cleanup.log_claims import retention_by_topic
from ...opening import Identity
from ...replica.copied_store import CopiedStore, open_copy
from ...store.codec.format import PartitionState
from ...store.env.memtable import Reads
from ...store.errors import InvalidArgument
from ...store.files.directory import flush_file, make_directory, refuse_inside, remove_tree, sync_directory, write_file
from ..columns.main_tables import CopyTask, View, plan_copy, scan_copy
from ..columns.scan_arrow import logs_now, scan_messages, schema_of
from ..columns.scan_rows import LogRange, Slice, Wanted, plan_in, plan_scan
from ..columns.sealed import Sealed, copied_partitions, copy_url, open_main_to_read, read_sealed, store_name
from ..fleet import Outcome, each_store
from ..values import path_segment
from . import export_layout as layout

STAGING = ".staging"
STORES = "STORES.json"
_DAY_MS = 86_400_000

Task = tuple[Slice | CopyTask, str]
"""A slice, or how a partition of a copy is fetched, and the directory of staged files. Picklable."""

Progress = Callable[[int, int], object]
"""Told the slices that are done, of how many."""


class StagedFile(NamedTuple):
    """A file that one attempt has written, and what it is to be called."""

    staged: str
    file: layout.ExportedFile
    counts: Counter[str]
    """Rows that are dropped, withdrawn or damaged."""


Runner = Callable[[Sequence[Task]], Iterable[list[StagedFile]]]
"""Answers of `export_slice` for each of some tasks, in their order."""


class Exported(NamedTuple):
    """The contents of an export: rows, of them such without a body, such that never fire, such that cannot be read."""

    partitions: int
    files: int
    rows: int
    dropped: int
    withdrawn: int
    damaged: int
    bytes: int


def fleet_row(outcome: Outcome[Exported]) -> dict[str, Any]:
    """The outcome of one store of several: where its export is, or why there is none."""
    head = {"store": outcome.name}
    if outcome.result is None:
        return head | {"reason": outcome.reason}
    return head | {"directory": store_directory(outcome.store)} | outcome.result._asdict()


def store_directory(store: Path) -> str:
    """Where the export of one store of several lies: a column of its own to Hive, Spark and pyarrow."""
    return f"store={path_segment(store_name(store))}"


def export_stores(
    stores: Sequence[Path], dest: Path, export: Callable[[Path, Path], Exported], *, at_once: int = 1
) -> Iterator[Outcome[Exported]]:
    """Export each of several stores into a directory of its own in `dest`, and write STORES.json at the end.

    export: exports one store into a directory that is not there yet. A store of which that fails leaves nothing in
    `dest` but its reason in STORES.json. Raises InvalidArgument.
    """
    for store in stores:
        refuse_inside("DEST", dest, store)
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise InvalidArgument("DEST", str(dest), "is not an empty directory")
    make_directory(dest)
    rows = []
    for outcome in each_store(stores, lambda store: export(store, dest / store_directory(store)), at_once=at_once):
        rows.append(fleet_row(outcome))
        yield outcome
    write_file(dest / STORES, json.dumps({"stores": rows}, indent=1).encode() + b"\n")
    sync_directory(dest)


def export_store(
    store: Path,
    dest: Path,
    *,
    wanted: Wanted | None = None,
    pending: bool = False,
    run: Runner = lambda tasks: map(export_slice, tasks),
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Export what is sealed, or what of it is `wanted`, into `dest`, which is empty or not there yet.

    store: or the URL of its copy in object storage, of which each task fetches the partition that it reads. pending:
    also the messages that are still to come, into a table of their own, in this process.
    Beside a process that has the store open; nothing in it is changed. On disk when it returns.
    Raises InvalidArgument, DamagedStore (also where a generation goes meanwhile), what `run` raises, and of a copy what
    `open_copy` raises.
    """
    dest = dest.absolute()
    refuse_inside("DEST", dest, store)
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise InvalidArgument("DEST", str(dest), "is not an empty directory")
    made = not dest.exists()
    try:
        make_directory(dest)
        url = copy_url(store)
        with nullcontext() if url is None else open_copy(url) as copy:
            return _export(store, copy, dest, wanted or Wanted(), pending, run, progress)
    except BaseException:
        _remove_staging(dest)
        for child in list(dest.iterdir()) if dest.is_dir() else []:
            remove_tree(child) if child.is_dir() else child.unlink()
        if made and dest.is_dir():
            dest.rmdir()
        raise


def _export(
    store: Path, copy: CopiedStore | None, dest: Path, wanted: Wanted, pending: bool, run: Runner, progress: Progress
) -> Exported:
    def read_main(raw: Reads, identity: Identity, generations: list[Sealed]) -> Any:
        view = View(store, identity, raw, known)
        for name in tables if copy is None else layout.TABLE_SCHEMAS:
            schema = layout.schema_named(name)
            rows = view.batches(name, schema.names, wanted if name == layout.PENDING else Wanted())
            _write(dest / f"{name}.parquet", rows, schema)
        plan = [] if copy is not None else plan_in(raw, identity.store_id, generations, wanted, claims=True)
        return identity, generations, plan, retention_by_topic(raw)

    tables = [*layout.TABLE_SCHEMAS, *([layout.PENDING] if pending else [])]
    known = logs_now(store) if pending and copy is None else None
    exported_ms = time.time_ns() // 1_000_000
    if copy is None:
        identity, generations, plan, retention = read_sealed(store, read_main)
    else:
        closed = [each for each, state, _ in copied_partitions(copy) if state is PartitionState.CLOSED]
        store, plan = copy.path, plan_copy(copy, "messages", wanted)
        with open_main_to_read(store) as (found_there, main), main.read() as raw:
            identity, generations, _, retention = read_main(raw, found_there, closed)
        if pending:
            schema = layout.schema_named(layout.PENDING)
            rows = (each for task in plan_copy(copy, layout.PENDING, wanted) for each in scan_copy(task, schema.names))
            _write(dest / f"{layout.PENDING}.parquet", rows, schema)
    staging = dest / STAGING
    make_directory(staging)
    tasks = [(part, str(staging)) for part in plan]
    found: list[StagedFile] = []
    for done, answer in enumerate(run(tasks), 1):
        found += answer
        progress(done, len(tasks))
    _publish(dest, found)
    rows_of = dict.fromkeys((sealed.partition for sealed in generations if wanted.has_partition(sealed)), 0)
    for each in found:
        rows_of[each.file.partition] += each.file.rows
    partitions = [
        {"start_ms": sealed.start_ms, "end_ms": sealed.end_ms, "generation": sealed.generation,
         "file_bytes": sealed.file_bytes, "partition": sealed.partition, "rows": rows_of[sealed.partition]}
        for sealed in generations
        if sealed.partition in rows_of
    ]  # fmt: skip
    layout.write_manifest(
        dest,
        {
            "store_id": identity.store_id.hex(),
            "partition_ms": identity.partition_ms,
            "exported_ms": exported_ms,
            "filtered": wanted != Wanted(),
            "retention": retention,
            "tables": {name: f"{name}.parquet" for name in tables},
            "partitions": partitions,
            "files": [each.file._asdict() for each in sorted(found, key=lambda each: each.file.path)],
        },
    )
    counts = Counter(rows=sum(rows_of.values()), dropped=0, withdrawn=0, damaged=0, bytes=0)
    for each in found:
        counts.update(each.counts, bytes=each.file.bytes)
    return Exported(len(partitions), len(found), **counts)


def _write(path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
    flush_file(path)


def _publish(dest: Path, found: list[StagedFile]) -> None:
    """Give the files of the attempts that count their names, and remove the others."""
    parents = set()
    for each in found:
        target = dest / each.file.path
        make_directory(target.parent)
        os.rename(each.staged, target)
        parents.add(target.parent)
    for parent in parents:
        sync_directory(parent)
    _remove_staging(dest)


def _remove_staging(dest: Path) -> None:
    """Remove what attempts have left, beside attempts that were abandoned and go on: they find no place any more."""
    staging = dest / STAGING
    if staging.is_dir():
        moved = dest / f"{STAGING}-{uuid.uuid4().hex}"
        os.rename(staging, moved)
        remove_tree(moved)


# -- one slice -----------------------------------------------------------------------------------


def export_slice(task: Task) -> list[StagedFile]:
    """Write the messages of a slice into a directory among the staged ones that no other attempt has, on disk."""
    part, staging = task
    if isinstance(part, CopyTask):
        with part.excerpt.fetched() as path:
            plan = plan_scan(path, part.wanted, claims=True)
            return [file for each in plan for file in export_slice((each, staging))]
    directory = Path(staging) / uuid.uuid4().hex
    directory.mkdir()
    try:
        found = [file for each in part.ranges for file in _export_log(part, each, directory)]
        sync_directory(directory)
    except BaseException:
        remove_tree(directory)
        raise
    return found


class _DayFile:
    """A file of one topic and day while it is written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.writer = pq.ParquetWriter(path, schema, compression="zstd")
        self.rows = 0
        self.counts: Counter[str] = Counter()

    def write(self, batch: pa.RecordBatch) -> None:
        self.writer.write_batch(batch)
        self.rows += batch.num_rows
        of = {name: batch.column(name).true_count for name in ("dropped", "withdrawn")}
        self.counts.update(**of, damaged=batch.num_rows - batch.column("reason").null_count)


def _export_log(part: Slice, log: LogRange, directory: Path) -> list[StagedFile]:
    schema = schema_of(layout.MESSAGE_COLUMNS)
    days: dict[int, _DayFile] = {}
    with ExitStack() as stack:
        for batch in scan_messages(part._replace(ranges=(log,)), layout.MESSAGE_COLUMNS):
            dues = batch.column("due_ms").fill_null(part.sealed.start_ms).to_numpy()
            numbers = dues // _DAY_MS
            for day in np.unique(numbers).tolist():
                if day not in days:
                    days[day] = _DayFile(directory / f"{log.ledger_id}-{day}.parquet", schema)
                    stack.callback(days[day].writer.close)
                mask = numbers == day
                days[day].write(batch if mask.all() else batch.filter(pa.array(mask)))
    sealed = part.sealed
    name = f"{sealed.partition}-g{sealed.generation:06d}-l{log.ledger_id}-e{log.start}.parquet"
    found = []
    for day, written in sorted(days.items()):
        flush_file(written.path)
        text = layout.day_of(day * _DAY_MS)
        size = written.path.stat().st_size
        path = layout.message_path(log.topic, text, name)
        file = layout.ExportedFile(path, log.topic, text, sealed.partition, written.rows, size)
        found.append(StagedFile(os.fspath(written.path), file, written.counts))
    return found
