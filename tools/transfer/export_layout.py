"""The layout of an export on disk: written by parquet_export.py, read by imports and audits.

    DIR/messages/topic=<quoted>/day=2026-09-22/<partition>-g000001-l<ledger>-e<first entry>.parquet
    DIR/<table>.parquet     markers, partitions, subscriptions, frontiers, ledgers, acknowledgements, attempts,
                            dead_letters, keys; and pending, where it was asked for
    DIR/MANIFEST.json       written last: without it the directory is no export, or not yet one

Topic and day (UTC, of the due time) stand in the path as Hive, Spark and pyarrow read them, the topic's full name
percent-encoded; the other columns are those of scan_arrow.MESSAGES. A row that cannot be read has the day that its
partition starts on. A topic that was deleted has no name: the path says __HIVE_DEFAULT_PARTITION__. One whose name no
file system takes is cut short there, with a hash after it. The manifest has every name as it is, and says whether
something that is sealed was left out (`filtered`).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ...store.errors import DamagedStore, FormatMismatch, InvalidArgument
from ...store.files.directory import sync_directory, write_file
from ..columns.main_tables import MARKERS, SMALL
from ..columns.scan_arrow import MESSAGES
from ..values import path_segment

FORMAT = "duelog-export"
VERSION = 1
MANIFEST = "MANIFEST.json"
NO_TOPIC = "__HIVE_DEFAULT_PARTITION__"

MESSAGE_COLUMNS = [name for name in MESSAGES.names if name != "topic"]
"""Columns of the files below messages/."""

TABLE_SCHEMAS: dict[str, pa.Schema] = {"markers": MARKERS} | {name: schema for name, (schema, _) in SMALL.items()}
"""The tables of every export; one of an earlier version lacks the last of them."""

PENDING = "pending"


_BATCH_ROWS = 1 << 16


def schema_named(name: str) -> pa.Schema:
    """The columns of a table other than messages."""
    return MESSAGES if name == PENDING else TABLE_SCHEMAS[name]


class ExportedFile(NamedTuple):
    """One file of messages: of one topic (None: deleted), one day, one range of one partition log."""

    path: str
    topic: str | None
    day: str
    partition: str
    rows: int
    bytes: int


def message_path(topic: str | None, day: str, name: str) -> str:
    """Where a file of messages lies in an export.

    >>> message_path("persistent://a/b/c d", "2026-09-22", "x.parquet")
    'messages/topic=persistent%3A%2F%2Fa%2Fb%2Fc%20d/day=2026-09-22/x.parquet'
    """
    return f"messages/topic={NO_TOPIC if topic is None else path_segment(topic)}/day={day}/{name}"


def day_of(ms: int) -> str:
    """The day of an instant, UTC.

    >>> day_of(1_790_035_200_000)
    '2026-09-22'
    """
    return f"{datetime.fromtimestamp(ms // 1000, UTC):%Y-%m-%d}"


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Make the directory an export, durably. REQUIRES: everything else in it is on disk."""
    content = json.dumps({"format": FORMAT, "version": VERSION, **manifest}, indent=1).encode()
    write_file(directory / MANIFEST, content + b"\n")
    sync_directory(directory)


class Export:
    """An export that is read."""

    def __init__(self, directory: Path, manifest: dict[str, Any], files: list[ExportedFile]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.message_files = files

    def has(self, name: str) -> bool:
        """True where the export has a table other than messages: earlier versions had fewer, `pending` is asked for."""
        return name in self.manifest["tables"]

    def table(self, name: str) -> pa.Table:
        """A whole table other than messages; no rows where the export lacks it. Raises DamagedStore."""
        schema = schema_named(name)
        return pa.Table.from_batches(self.batches(name), schema)

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """The same, some rows at a time."""
        if self.has(name):
            yield from self._batches(self.directory / self.manifest["tables"][name], schema_named(name).names)

    def rows_of(self, name: str) -> int:
        """How many rows a table other than messages has. Raises DamagedStore."""
        if not self.has(name):
            return 0
        path = self.directory / self.manifest["tables"][name]
        with _reading(path):
            return int(pq.read_metadata(path).num_rows)

    def message_batches(self, file: ExportedFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of one file of messages, some at a time; without the topic, which is the file's."""
        yield from self._batches(self.directory / file.path, columns)

    def _batches(self, path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with _reading(path), pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=list(columns))

    def messages(self, file: ExportedFile, columns: list[str] | None = None) -> pa.Table:
        """The rows of one file; the topic is the file's. Raises DamagedStore."""
        path = self.directory / file.path
        with _reading(path):
            return pq.ParquetFile(path).read(columns=columns)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DamagedStore(path, f"cannot be read: {error}") from error


def open_export(directory: Path) -> Export:
    """An export, with all its files there and of their sizes.

    Raises InvalidArgument for a directory that is none, FormatMismatch for one of a later version, DamagedStore.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        found, version = manifest["format"], manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no export of `duelog export`: {MANIFEST} is not there, or cannot be read"
        raise InvalidArgument("DIR", str(directory), reason) from error
    if found != FORMAT or version != VERSION:
        raise FormatMismatch(path, "format", f"{found} {version}", f"{FORMAT} {VERSION}")
    files = [ExportedFile(**each) for each in manifest["files"]]
    for file in files:
        try:
            size = (directory / file.path).stat().st_size
        except FileNotFoundError:
            size = -1
        if size != file.bytes:
            missing = "is missing" if size < 0 else f"is {size} bytes, the manifest says {file.bytes}"
            raise DamagedStore(directory / file.path, missing)
    return Export(directory, manifest, files)
