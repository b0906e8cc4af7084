"""The command `duelog audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from ...store.errors import InvalidArgument
from ...store.files.directory import refuse_inside
from ..audit.audit_tables import is_faulty
from ..fleet import is_fleet, stores_of
from ..output import disk_rows, printable, progress_bar, say, write_json, write_line, write_table
from ..values import time_ms
from .options import Json, Stores, end_fleet, store_progress

_MOST_HELD = 20


def audit(
    stores: Stores = None,
    spark: Annotated[bool, typer.Option("--spark", help="Spread the partitions over Spark's tasks.")] = False,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="With --spark: where Spark runs; else all cores here.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write audit.html, audit.json and Parquet files there.")
    ] = None,
    as_of: Annotated[str | None, typer.Option(metavar="TIME", help="Judge as if it were that time.")] = None,
    headers: Annotated[bool, typer.Option("--headers", help="Do not read payloads and pages: quicker.")] = False,
    from_parquet: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Audit what `duelog export` wrote, in place of a store.")
    ] = None,
    json_: Json = False,
) -> None:
    """Look for what is lost, doubled, left over or held too long, and show what is kept. Exit status 1: findings.

    `overdue` and `late` are shown, and do not change the exit status.

    Works beside a process that has the store open, and changes nothing. Closed partitions are read whole, open ones by
    their headers, as of the moment they are read. A partition that a slow subscription holds is no finding; it is
    listed with what holds it. docs/audit.md says what each finding means. Of several stores each is audited on its own;
    exit status 2: one of them could not be.

    ```
    duelog audit data --output report
    duelog audit data --as-of 2026-12-24T00:00Z --json
    duelog audit "stores/*" --output report
    ```
    """
    from ..audit.audit_report import PARQUET_MISSING, as_json, fleet_as_json, write_fleet_report, write_report
    from ..audit.audit_tables import Audit

    as_of_ms = None if as_of is None else time_ms("--as-of", as_of)
    result: Audit
    if bool(stores) == (from_parquet is not None):
        given = " ".join(map(str, stores or ())) or None
        raise InvalidArgument("STORE", given, "expected a store, or --from-parquet with an export")
    if stores and is_fleet(stores):
        from ..spark.spark_jobs import audit_fleet, fleet_session

        found = stores_of(stores)
        for each in found:
            if output is not None:
                refuse_inside("--output", output, each)
        with fleet_session("duelog audit", spark, master) as session, store_progress(found) as counted:
            outcomes = counted(audit_fleet(found, session=session, verify=not headers, as_of_ms=as_of_ms))
        if output is not None and not write_fleet_report(outcomes, output):
            say(PARQUET_MISSING)
        if json_:
            write_json(fleet_as_json(outcomes))
        for outcome in outcomes if not json_ else ():
            if outcome.result is not None:
                _show(outcome.result)
        end_fleet(outcomes, worse=any(each.result and is_faulty(each.result) for each in outcomes))
        return
    store = stores[0] if stores else None
    if output is not None and store is not None:
        refuse_inside("--output", output, store)
    if from_parquet is not None:
        from ..audit.exported import audit_export

        result = audit_export(from_parquet, as_of_ms=as_of_ms)
    elif spark and store is not None:
        from ..spark.spark_jobs import audit_with_spark

        result = audit_with_spark(store, master=master, verify=not headers, as_of_ms=as_of_ms)
    elif store is not None:
        from ..audit import audit_store

        with progress_bar("partitions", MofNCompleteColumn(), TimeRemainingColumn()) as progress:
            result = audit_store(store, verify=not headers, as_of_ms=as_of_ms, progress=progress)
    if output is not None and not write_report(result, output):
        say(PARQUET_MISSING)
    if json_:
        write_json(as_json(result))
    else:
        _show(result)
        if output is not None:
            say(f"the report is in {output / 'audit.html'}")
    if is_faulty(result):
        raise typer.Exit(1)


def _show(result: Any) -> None:
    for found in result.findings:
        line = f"{found.severity}: {found.code}: {found.address}: {found.message}; {found.advice}"
        write_line(printable(line))
    messages, pending, fired, acknowledged = (
        sum(getattr(row, name) for row in result.retention) for name in ("messages", "pending", "fired", "acknowledged")
    )
    disk = result.disk or {"partitions": sum(row.file_bytes for row in result.partitions)}
    figures = (("topics", len(result.topics)), ("subscriptions", len(result.subscriptions)),
               ("partitions", len(result.partitions)), ("messages in them", messages), ("pending", pending),
               ("fired", fired), ("acknowledged by all", acknowledged), *disk_rows(disk))  # fmt: skip
    write_table(str(result.store), ("", ">"), figures)
    if result.held:
        write_line("")
        columns = ("partition", "topic", "held by", "subscription", ">behind")
        rows = [(row.partition, row.topic, row.reason, row.subscription, row.behind) for row in result.held]
        write_table(f"held partitions: {len({row[0] for row in rows}):,}", columns, rows[:_MOST_HELD])
        if len(rows) > _MOST_HELD:
            say(f"{len(rows) - _MOST_HELD:,} more reasons; --output has them all")
    say(f"findings: {len(result.findings):,}")
