"""Tables of one point in time: of a store, by one read transaction of main, of its copy, or of an export."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...replica.copied_store import open_copy
from ...store.errors import ClosedError, InvalidArgument
from ...store.files.directory import flush_file, move, refuse_inside
from ..columns import needs_arrow
from ..columns.main_tables import TABLES, View, columns_of, narrowed, plan_copy, scan_copy, table_schema
from ..columns.scan_arrow import logs_now, schema_of
from ..columns.scan_rows import Wanted
from ..columns.sealed import open_main_to_read
from ..transfer.export_layout import PENDING, open_export

Batches = Iterator[pa.RecordBatch]


class Tables:
    """The tables of a store or an export. For one thread at a time, one table at a time, and while the block lasts."""

    names = tuple(TABLES)
    """All of them; docs/arrow.md says what is in each."""

    def __init__(self, path: Path, read: Callable[[str, list[str], Wanted], Batches]) -> None:
        """read: gives the rows of a table that are wanted, with these columns."""
        self.path = path
        self._read = read
        self._closed = False
        self._reading: list[Batches] = []

    def schema(self, table: str) -> pa.Schema:
        """The columns of a table. Raises InvalidArgument."""
        return table_schema(table)

    def batches(
        self,
        table: str,
        columns: Sequence[str] | None = None,
        *,
        topics: str | Collection[str] | None = None,
        partitions: str | Collection[str] | None = None,
        due_from_ms: int | None = None,
        due_until_ms: int | None = None,
    ) -> pa.RecordBatchReader:
        """The rows that are wanted, a record batch at a time: at most about 131,072 rows or 16 MiB of bodies.

        columns: None for all; without those of bodies (`publish_ms`, `key`, `properties`, `payload`, `extra`,
        `reason`) only headers are read. topics: names in any form; partitions: as `duelog partitions` names them;
        due_from_ms is inclusive, due_until_ms exclusive; a table that has no such column is not narrowed by it. Raises
        InvalidArgument; reading on raises DamagedStore, ClosedError after the block.
        """
        names = columns_of(table, columns)
        wanted = Wanted.of(_several(topics), _several(partitions), due_from_ms, due_until_ms)
        schema = pa.schema([table_schema(table).field(name) for name in names])
        return pa.RecordBatchReader.from_batches(schema, self._guarded(self._read(table, names, wanted)))

    def table(self, table: str, columns: Sequence[str] | None = None, **wanted: Any) -> pa.Table:
        """All rows that are wanted (`batches`), in memory."""
        return self.batches(table, columns, **wanted).read_all()

    def pandas(self, table: str, columns: Sequence[str] | None = None, **wanted: Any) -> Any:
        """The same as a pandas DataFrame, whose numbers stay whole numbers where some are null."""
        with needs_arrow("a pandas DataFrame", "pip install pandas"):
            import pandas as pd
        kinds = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(), pa.string(): pd.StringDtype()}
        return self.table(table, columns, **wanted).to_pandas(types_mapper=kinds.get, maps_as_pydicts="strict")

    def polars(self, table: str, columns: Sequence[str] | None = None, **wanted: Any) -> Any:
        """The same as a polars DataFrame."""
        with needs_arrow("a polars DataFrame", "pip install polars"):
            import polars as pl
        return pl.from_arrow(self.table(table, columns, **wanted))

    def write(
        self, table: str, path: str | os.PathLike[str], columns: Sequence[str] | None = None, **wanted: Any
    ) -> int:
        """Write the rows that are wanted to a file, Parquet (.parquet) or Arrow (.arrow), a batch at a time; how many.

        The file is there as a whole, on disk, or as it was before. Raises as `batches`, and OSError.
        """
        target = Path(path)
        if target.suffix not in (".parquet", ".arrow"):
            raise InvalidArgument("path", str(target), "expected a name that ends in .parquet or .arrow")
        refuse_inside("path", target, self.path)
        reader = self.batches(table, columns, **wanted)
        staged, rows = target.with_name(target.name + ".tmp"), 0
        try:
            with _writer(staged, reader.schema) as writer:
                for batch in reader:
                    writer.write_batch(batch)
                    rows += batch.num_rows
            flush_file(staged)
            move(staged, target)
        finally:
            staged.unlink(missing_ok=True)
        return rows

    def _guarded(self, batches: Batches) -> Batches:
        """The batches, none of which is read after the block has ended and LMDB's map is gone."""
        self._reading.append(batches)
        try:
            while True:
                if self._closed:
                    raise ClosedError(f"the view of the tables of {self.path}")
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch
        finally:
            self._reading.remove(batches)

    def _close(self) -> None:
        self._closed = True
        for batches in self._reading:
            batches.close()  # type: ignore[attr-defined]


def _several(names: str | Collection[str] | None) -> Collection[str] | None:
    return [names] if isinstance(names, str) else names


def _writer(path: Path, schema: pa.Schema) -> Any:
    if path.suffixes[-2] == ".parquet":
        return pq.ParquetWriter(path, schema, compression="zstd")
    return pa.ipc.new_file(path, schema)


@contextmanager
def _opened(path: Path, read: Callable[[str, list[str], Wanted], Batches]) -> Iterator[Tables]:
    tables = Tables(path, read)
    try:
        yield tables
    finally:
        tables._close()


@contextmanager
def open_store_tables(path: Path, *, pending: bool, as_of_ms: int | None) -> Iterator[Tables]:
    """Those of a store, as of one read transaction, while the block lasts."""
    known = logs_now(path) if pending else None
    with open_main_to_read(path) as (identity, main), main.read() as raw:
        view = View(path, identity, raw, known)
        with _opened(path, lambda table, columns, wanted: view.batches(table, columns, wanted, as_of_ms)) as tables:
            yield tables


@contextmanager
def open_copy_tables(url: str, *, as_of_ms: int | None) -> Iterator[Tables]:
    """Those of a store's copy in object storage, as of one group of the log, while the block lasts."""
    with open_copy(url) as copy:

        def read(table: str, columns: list[str], wanted: Wanted) -> Batches:
            for task in plan_copy(copy, table, wanted, as_of_ms):
                yield from scan_copy(task, columns)

        with _opened(Path(url), read) as tables:
            yield tables


@contextmanager
def open_export_tables(path: Path) -> Iterator[Tables]:
    """Those of an export, while the block lasts. A table that an earlier version did not write has no rows."""
    export = open_export(path)

    def read(table: str, columns: list[str], wanted: Wanted) -> Batches:
        if table == PENDING and not export.has(table):
            raise InvalidArgument("table", table, "the export was made without it; `duelog export --pending` has it")
        if table != "messages":
            for batch in export.batches(table):
                yield narrowed(batch, table, wanted, columns)
            return
        asked = list(dict.fromkeys([*columns, "due_ms"]))
        for file in export.message_files:
            if not wanted.has_topic(file.topic):
                continue
            if wanted.partitions is not None and file.partition not in wanted.partitions:
                continue
            for batch in export.message_batches(file, [name for name in asked if name != "topic"]):
                topic = pa.repeat(pa.scalar(file.topic, pa.string()), batch.num_rows)
                arrays = [topic if name == "topic" else batch.column(name) for name in asked]
                whole = pa.RecordBatch.from_arrays(arrays, schema=schema_of(asked))
                yield narrowed(whole, table, wanted._replace(topics=None, partitions=None), columns)

    with _opened(path, read) as tables:
        yield tables
