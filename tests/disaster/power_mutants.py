"""Wrong engines, patched into the recorded process only, that the power cuts must find out."""

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import lmdb

from duelog import transactions
from duelog.sending.wal_segments import WalSegments
from duelog.sending.wal_writer import WalWriter
from duelog.snapshot import writer
from duelog.store.env import body_file, environment
from duelog.store.env.environment import Environment
from duelog.store.files import directory
from duelog.store.wal.segment import Segment
from tests.disaster.kill_mutants import group_in_parts, released_before_applying, trash_before_record


def _unsynced(wrong: Callable[[Path], bool]) -> None:
    """Open the environments of which `wrong` says so with sync=False."""
    opened = lmdb.open

    def open_(path: str, **settings: Any) -> lmdb.Environment:
        if wrong(Path(path)):
            settings["sync"] = False
        return opened(path, **settings)

    environment.lmdb.open = open_  # type: ignore[attr-defined]


def partition_not_synced() -> None:
    """Partitions are committed with sync=False, while main is synced."""
    _unsynced(lambda path: path.parents[1].name == "partitions")


def main_not_synced() -> None:
    """Main is committed with sync=False, while partitions are synced."""
    _unsynced(lambda path: path.name == "main" and path.parent.name != "staging")


def no_directory_sync() -> None:
    """Directories are not synced after something was made, renamed or removed in them."""
    directory.sync_directory = environment.sync_directory = lambda path: None  # type: ignore[attr-defined]


def bodies_not_flushed() -> None:
    """A group names bodies that are not on disk."""
    body_file.sync_all = lambda descriptors: None  # type: ignore[attr-defined]


def body_file_without_a_name() -> None:
    """A group names a body file whose name is not on disk."""
    body_file.sync_directory = lambda path: None  # type: ignore[attr-defined]


def fires_before_sync() -> None:
    """With durability "relaxed", partitions are not synced before their entries are fired."""
    Environment.sync = lambda self: None  # type: ignore[method-assign]


def metadata_before_parts() -> None:
    """The metadata of a snapshot is committed before its parts."""

    def write_group(env: Any, *rest: Any) -> Any:
        late: list[Any] = []

        class MetadataFirst:
            """The environment as the writer sees it: what is written before the metadata comes after it."""

            read = env.read

            def commit(self, work: Any) -> Any:
                if work.__name__ == "put":
                    late.append(work)
                    return None
                value = env.commit(work)
                while late:
                    env.commit(late.pop(0))
                return value

        yield from original(MetadataFirst(), *rest)

    original: Any = writer._write_group
    writer._write_group = write_group  # type: ignore[assignment]


def wal_not_flushed() -> None:
    """A group is written to the write-ahead log, and the disk is not waited for."""
    Segment.append = partialmethod(_append_flushing_nothing, Segment.append)  # type: ignore[assignment,method-assign]


def _append_flushing_nothing(self: Any, append: Any, rows: Any, *, flush: bool) -> Any:
    return append(self, rows, flush=False)


def released_before_sync() -> None:
    """The record of the oldest segment moves on before the partitions that have its rows are on disk."""

    sync = Environment.sync

    def sync_main_alone(self: Environment) -> None:
        if self.name == "main":
            sync(self)

    Environment.sync = sync_main_alone  # type: ignore[method-assign]


def applies_before_the_log() -> None:
    """With durability "relaxed", a commit of LMDB does not wait for the groups that it applies to be on disk."""
    WalSegments.sync = lambda self: None  # type: ignore[method-assign]


def transaction_in_parts() -> None:
    """Each operation of a transaction is a group of its own."""

    def write_parts(self: WalWriter, work: Any) -> Any:
        units = work if isinstance(work, transactions._Units) else [work]
        return [write(self, unit) for unit in units][-1]

    write: Any = WalWriter.write
    WalWriter.write = write_parts  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    wrong.__name__: wrong
    for wrong in (
        applies_before_the_log, bodies_not_flushed, body_file_without_a_name, fires_before_sync, group_in_parts,
        main_not_synced, metadata_before_parts, no_directory_sync, partition_not_synced, released_before_applying,
        released_before_sync, transaction_in_parts, trash_before_record, wal_not_flushed,
    )
}  # fmt: skip
