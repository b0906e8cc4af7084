"""An audit written down: as one JSON value, as a Parquet file for each table, as a page for people.

Names and columns of the tables are those of audit_tables.py. Parquet needs pyarrow, which the extra `arrow` brings; the
rest needs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from ...store.files.directory import write_file
from ..fleet import Outcome
from ..values import path_segment
from .audit_page import page
from .audit_tables import TABLES, Audit

PARQUET_MISSING = "Parquet was left out: pyarrow is not installed (pip install 'duelog[arrow]')"


def as_json(audit: Audit) -> dict[str, Any]:
    """The audit as values that `json` takes: times in epoch ms, one list of rows for each table."""
    head: dict[str, Any] = {
        "store": audit.store,
        "source": audit.source,
        "as_of_ms": audit.as_of_ms,
        "taken_ms": audit.taken_ms,
        "disk_bytes": sum(audit.disk.values()),
        **{f"disk_{part}_bytes": size for part, size in audit.disk.items()},
    }
    return head | {name: [row._asdict() for row in getattr(audit, name)] for name in TABLES}


def write_report(audit: Audit, output: Path) -> bool:
    """Write audit.json, audit.html and <table>.parquet into `output`, made if need be; what has these names goes.

    False: Parquet was left out, as pyarrow is not there. Raises OSError.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_file(output / "audit.json", (json.dumps(as_json(audit)) + "\n").encode())
    write_file(output / "audit.html", page(audit).encode())
    try:
        import pyarrow  # noqa: F401 - whether it is there is the question
    except ImportError:
        return False
    for name, kind in TABLES.items():
        write_table(getattr(audit, name), kind, output / f"{name}.parquet")
    return True


def fleet_as_json(outcomes: Sequence[Outcome[Audit]]) -> dict[str, Any]:
    """The audits of several stores, and why others could not be audited."""
    unreadable = [{"store": str(each.store), "reason": each.reason} for each in outcomes if each.result is None]
    return {"stores": [as_json(each.result) for each in outcomes if each.result], "unreadable": unreadable}


def write_fleet_report(outcomes: Sequence[Outcome[Audit]], output: Path) -> bool:
    """Write the report of each store into `output`/store=<its path>, and each table of all of them into `output`.

    Those tables have the column `store` before the others, audit.json also says what could not be audited.
    False: Parquet was left out, as pyarrow is not there. Raises OSError.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_file(output / "audit.json", (json.dumps(fleet_as_json(outcomes)) + "\n").encode())
    found = [(str(each.store), each.result) for each in outcomes if each.result is not None]
    with_parquet = True
    for store, audit in found:
        with_parquet = write_report(audit, output / f"store={path_segment(store)}")
    for name, kind in TABLES.items() if with_parquet and found else ():
        rows = [(store, *row) for store, audit in found for row in getattr(audit, name)]
        write_table(rows, kind, output / f"{name}.parquet", more=("store",))
    return with_parquet


def write_table(
    rows: Sequence[tuple[object, ...]], kind: type[tuple[object, ...]], path: Path, *, more: tuple[str, ...] = ()
) -> None:
    """Rows of one of the tables as a Parquet file, an empty one with its columns too; `more`: texts before them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {int: pa.int64(), str: pa.string(), bool: pa.bool_()}
    hints = dict.fromkeys(more, str) | get_type_hints(kind)
    schema = pa.schema([(name, types[hint]) for name, hint in hints.items()])
    pq.write_table(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema), path)
