"""The tables of a store or an export in Python, as Arrow, pandas and polars have them, and as files: `duelog[arrow]`.

    from duelog.tools.arrow import open_tables

    with open_tables("data") as tables:
        due = tables.pandas("pending", ["topic", "due_ms"])
        tables.write("messages", "messages.parquet", topics="reminders")

Owns the public face of what tools/columns reads: the same tables, columns and rows as Spark's data source, in this
process, a record batch at a time. Neither Java nor Spark is needed; importing this package does not import pyarrow.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ..columns import NeedsArrow, needs_arrow
from ..columns.sealed import copy_url

if TYPE_CHECKING:
    from .tables_view import Tables

__all__ = ["NeedsArrow", "open_tables"]


def open_tables(
    path: str | os.PathLike[str], *, pending: bool = True, as_of_ms: int | None = None
) -> AbstractContextManager[Tables]:
    """The tables of the store or the export in `path`, all as of one point in time, while the block lasts.

    path: also the URL of a store's copy in object storage, of which each table fetches what it reads.

    Of a store nothing is changed, nor locked, beside a process that has it open; that process itself cannot. Main's
    read transaction lasts as long as the block: what main frees meanwhile stays on disk, so do not keep it for days.
    pending: whether the table of that name is asked for: it has every open partition looked at first. as_of_ms: the
    time by which what waits inline is pending; None: now, or the store's clock where that is later.

    Raises NeedsArrow, InvalidArgument, FormatMismatch, DamagedStore; of a copy what `open_copy` raises.
    """
    with needs_arrow("open_tables"):
        from .tables_view import open_copy_tables, open_export_tables, open_store_tables
    if (url := copy_url(os.fspath(path))) is not None:
        return open_copy_tables(url, as_of_ms=as_of_ms)
    path = Path(path)
    if (path / "MANIFEST.json").exists() and not (path / "STORE").exists():
        return open_export_tables(path)
    return open_store_tables(path, pending=pending, as_of_ms=as_of_ms)
