"""Audit, export and compaction of several stores: each on its own, in one Spark session or in this process.

On Spark several stores are dealt with at a time, so that the last tasks of one leave no core idle. A store that fails,
its tasks on Spark included, is an outcome with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fleet import AT_ONCE, Outcome, each_store
from .session import session_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..audit.tables import Audit
    from ..compact_store import CompactionReport
    from ..transfer.parquet_export import Exported


@contextmanager
def fleet_session(name: str, spark: bool, master: str | None) -> Iterator[SparkSession | None]:
    """A session for the jobs of several stores, stopped when the block ends; None: without Spark. SparkUnavailable."""
    if not spark:
        yield None
        return
    with session_for(name, None, master) as session:
        yield session


def audit_fleet(stores: Sequence[Path], *, session: SparkSession | None = None, **how: Any) -> Iterator[Outcome[Audit]]:
    """The audit of each store, with `how` for the other keywords of `audit_store`."""
    from ..audit.survey import audit_store
    from .audit import audit_with_spark

    if session is None:
        return each_store(stores, lambda store: audit_store(store, **how))
    return each_store(stores, lambda store: audit_with_spark(store, spark=session, **how), at_once=AT_ONCE)


def export_fleet(
    stores: Sequence[Path], dest: Path, *, session: SparkSession | None = None, **how: Any
) -> Iterator[Outcome[Exported]]:
    """The export of each store into a directory of its own in `dest`, with `how` for `export_store`."""
    from ..transfer.parquet_export import export_store, export_stores
    from .export import export_with_spark

    if session is None:
        return export_stores(stores, dest, lambda store, into: export_store(store, into, **how))
    return export_stores(
        stores, dest, lambda store, into: export_with_spark(store, into, spark=session, **how), at_once=AT_ONCE
    )


def compact_fleet(
    stores: Sequence[Path], *, session: SparkSession | None = None, **how: Any
) -> Iterator[Outcome[CompactionReport]]:
    """The compaction of each store, with `how` for `compact_store`."""
    from ..compact_store import compact_store
    from .compact import compact_with_spark

    if session is None:
        return each_store(stores, lambda store: compact_store(store, **how))

    def work(store: Path) -> CompactionReport:
        return compact_store(store, run=lambda tasks, progress: compact_with_spark(tasks, spark=session), **how)

    return each_store(stores, work, at_once=AT_ONCE)
