"""The commands that look at a store and change nothing in it: stats, partitions, check, dump, audit; and snapshots."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.errors import DuelogError, InvalidArgument, short_names
from ...store.files.directory import DISK_PARTS, refuse_inside
from ...store.position import MAX_ID
from .. import output as out
from ..values import alone, iso_time, refuse_url, require_store, time_ms
from .options import Place, Store, Stores, argument, asked, end_fleet, in_fleet, option

if TYPE_CHECKING:
    from ...operations.operations import Asked
    from ...store.codec.format import Table
    from ..snapshot_tool import FoundSnapshot, RebuildReport

app = typer.Typer()

_MOST_HELD = 20


@app.command("stats")
def stats(
    store: Place,
    topic: Annotated[str | None, argument("TOPIC", "Of this topic; else of the store.")] = None,
    topics: Annotated[int, option("Of the store: show this many of its topics, by name.", min=0)] = 20,
) -> None:
    """Show the figures of a store and its topics, or of one topic and its subscriptions.

    Pending messages are not due yet; a subscription's backlog is due and not acknowledged. What consumers hold, and
    dead letters, are counted by the process that has the store open, since it opened it.

    $ duelog stats data
    $ duelog stats data reminders
    $ duelog stats --server http://localhost:8080 reminders
    """
    with store.opened() as there:
        if topic is None:
            _store_stats(there, store.name, topics)
        else:
            _topic_stats(_chosen(there.topic_figures(topic=topic)))


_STORE_FIGURES = (
    "topics", "partitions", "pending", "set_aside", "disk_bytes", *(f"disk_{part}_bytes" for part in DISK_PARTS)
)  # fmt: skip
"""Figures that a store has when it is opened read-only, too."""

_TOPIC_FIGURES = ("name", "pending", "fired", "entries", "ledgers", "stored_bytes")
_SUBSCRIPTION_FIGURES = ("name", "backlog", "mark_delete", "consumers", "unacknowledged", "redelivering",
                         "dead_lettered", "fetching_ms", "paused")  # fmt: skip


def _chosen(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a topic that are shown."""
    figures: dict[str, Any] = {name: found[name] for name in _TOPIC_FIGURES}
    of_subscriptions = [{name: each[name] for name in _SUBSCRIPTION_FIGURES} for each in found["subscriptions"]]
    return {**figures, "subscriptions": of_subscriptions}


def _store_stats(there: Asked, name: str, topics: int) -> None:
    found = there.figures()
    figures = {name: found[name] for name in _STORE_FIGURES}
    if found.get("replica_lag_ms") is not None:  # it ships to a copy, and the process that does so is asked
        figures |= {name: value for name, value in found.items() if name.startswith("replica_")}
    if found.get("away_partitions"):
        figures |= {name: found[name] for name in ("away_partitions", "away_bytes")}
    shown = list(islice(_figures(there), topics))
    if out.in_json():
        out.write_json({**figures, "shown": shown})
        return
    about = [
        (name.replace("_", " "), round(value, 3) if isinstance(value, float) else value)
        for name, value in figures.items()
        if not name.startswith("disk_")
    ]
    parts = {part: figures[f"disk_{part}_bytes"] for part in DISK_PARTS}
    out.write_table(name, ("", ">"), [*about, *out.disk_rows(parts)])
    out.write_line("")
    columns = ("topic", ">pending", ">main log", ">subscriptions", ">largest backlog")
    out.write_table(
        f"topics: {len(shown):,} of {figures['topics']:,}",
        columns,
        [
            (
                short_names(each["name"]),
                each["pending"],
                out.size_text(each["stored_bytes"]),
                len(each["subscriptions"]),
                max((subscription["backlog"] for subscription in each["subscriptions"]), default=None),
            )
            for each in shown
        ],
    )


def _figures(there: Asked) -> Iterator[dict[str, Any]]:
    for topic in there.topics():
        try:
            yield _chosen(there.topic_figures(topic=topic))
        except DuelogError as error:
            if getattr(error, "status", None) != 404:  # deleted just now
                raise


def _topic_stats(topic: dict[str, Any]) -> None:
    if out.in_json():
        out.write_json(topic)
        return
    about = (("pending", topic["pending"]), ("fired", topic["fired"]), ("entries of the main log", topic["entries"]),
             ("ledgers", topic["ledgers"]), ("size of the main log", out.size_text(topic["stored_bytes"])))  # fmt: skip
    out.write_table(short_names(topic["name"]), ("", ">"), about)
    out.write_line("")
    columns = ("subscription", ">backlog", "mark-delete", ">consumers", ">unacknowledged", ">redelivering",
               ">dead-lettered", "")  # fmt: skip
    cells = [(*list(each.values())[:-2], _state(each)) for each in topic["subscriptions"]]
    out.write_table(f"subscriptions: {len(cells):,}", columns, cells)


def _state(subscription: Mapping[str, Any]) -> str | None:
    """Return why a subscription gets nothing; None: nothing keeps it."""
    if subscription["paused"]:
        return "paused"
    if subscription["fetching_ms"] is None:
        return None
    from ...partitions.timespan import directory_name

    return f"fetching {directory_name(subscription['fetching_ms'])}"


@app.command("partitions")
def partitions(store: Place) -> None:
    """List the time partitions of a store: what is due when, and what it takes on disk.

    A partition is future, current (it has begun), closed (all of it has fired) and then deleted, once the
    subscriptions of every topic in it have acknowledged what they received; references: how many have not. What of it
    is in the copy alone is fetched before it begins.

    $ duelog partitions data
    $ duelog partitions --server http://localhost:8080
    """
    from ...partitions.timespan import directory_name

    with store.opened() as there:
        found = there.partitions()
        values = ({"partition": directory_name(each["start_ms"]), **each} for each in found)
        columns = ("partition", "end", "state", ">topics", ">messages", ">pending", ">references", ">disk",
                   ">in the copy alone")  # fmt: skip
        rows = (
            (
                directory_name(each["start_ms"]),
                iso_time(each["end_ms"]),
                each["state"],
                each["topics"],
                each["messages"],
                each["pending"],
                each["holders"] if each["state"] == "closed" else None,
                out.size_text(each["disk_bytes"]),
                out.size_text(each["away_bytes"]) if each["away_bytes"] else None,
            )
            for each in found
        )
        out.listing(values, f"partitions: {len(found):,}", columns, rows)


@app.command()
def check(store: Store, deep: Annotated[bool, option("--deep", "Read and decode every payload too.")] = False) -> None:
    """Look for damage: every page, checksum of headers and records, and whether all fits. Exit status 1: found some.

    Messages that are overdue, or fired late, by more than a minute are warnings, and do not change the exit status.

    Works beside a writing process, and on a store that would kill its reader: what the pages of a file make
    suspicious is read in a child process, whose death is a finding.

    $ duelog check data --deep
    """
    from ..store_check import away_in, check_punctuality, check_store

    require_store(store)
    with out.progress_bar("files", time_left=False) as progress:
        damage = check_store(store, deep=deep, progress=progress)
    findings = damage or check_punctuality(store)
    for finding in findings:
        line = f"{finding.severity}: {finding.code}: {finding.address}: {finding.message}; {finding.advice}"
        out.answer(asdict(finding), line)
    if not out.in_json():
        for url, count in away_in(store).items():
            out.say(f"partitions that are in {url} alone, and were not read there: {count:,}")
        out.say(f"findings: {len(damage):,}")
    if damage:
        raise typer.Exit(1)


@app.command()
def dump(
    store: Store,
    partition: Annotated[str | None, option("NAME", "Of this time partition (as `partitions` names it).")] = None,
    table: Annotated[str | None, option("TABLE", "Only this table: FRONTIER, LEDGER, CURSOR, RUN, ...")] = None,
    ledger: Annotated[int | None, option("Only the runs of this ledger.", min=0, max=MAX_ID)] = None,
    entries: Annotated[bool, option("--entries", "Every message and marker of the runs too.")] = False,
    wal: Annotated[bool, option("--wal", "The groups of the write-ahead log, and nothing else.")] = False,
    limit: Annotated[int | None, option("At most this many rows.", min=1)] = None,
) -> None:
    """Print what lies in the store, key by key: the main environment, one time partition, or the write-ahead log.

    A run is what one commit appended to one ledger; markers point from the main log at messages of partitions. What
    is damaged is printed as such. docs/format.md says what the tables and fields are.

    $ duelog dump data --table FRONTIER
    $ duelog dump data --partition 20261201T000000Z --entries
    $ duelog dump data --wal
    """
    from ..dump import open_environment, partition_directory, rows, wal_rows

    require_store(store)
    wanted = None if table is None else _table(table)
    if wanted is not None and ledger is not None:
        raise InvalidArgument("--ledger", ledger, "not together with --table: a ledger's rows are its runs")
    with ExitStack() as stack:
        if wal:
            if (partition, table, ledger) != (None, None, None):
                raise InvalidArgument("--wal", True, "not together with --partition, --table or --ledger")
            found = wal_rows(store, entries=entries)
        else:
            path = store / "main" if partition is None else partition_directory(store, partition)
            name = "main" if partition is None else f"partition {partition}"
            environment = stack.enter_context(closing(open_environment(path, name)))
            found = rows(environment, table=wanted, ledger_id=ledger, entries=entries)
        for row in islice(found, limit and min(limit, sys.maxsize)):
            if out.in_json():
                out.write_json(row.as_json())
            else:
                out.write_line(row.as_line())
    sys.stdout.flush()


def _table(name: str) -> Table:
    from ...store.codec.format import Table

    try:
        return Table[name.upper()]
    except KeyError:
        known = ", ".join(table.name for table in Table)
        raise InvalidArgument("--table", name, f"expected one of {known}") from None


@app.command()
def audit(
    stores: Stores = None,
    spark: Annotated[bool, option("--spark", "Spread the partitions over Spark's tasks.")] = False,
    master: Annotated[str | None, option("URL", "With --spark: where Spark runs; else all cores here.")] = None,
    output: Annotated[Path | None, option("DIR", "Write audit.html, audit.json and Parquet files there.")] = None,
    as_of: Annotated[str | None, option("TIME", "Judge as if it were that time.")] = None,
    headers: Annotated[bool, option("--headers", "Do not read payloads and pages: quicker.")] = False,
    from_parquet: Annotated[
        Path | None, option("DIR", "Audit what `duelog export` wrote, in place of a store.")
    ] = None,
    html: Annotated[bool, option("--html", "Print the page in place of tables.")] = False,
) -> None:
    """Look for what is lost, doubled, left over or held too long, and show what is kept. Exit status 1: findings.

    `overdue` and `late` are shown, and do not change the exit status.

    Works beside a process that has the store open, and changes nothing. Closed partitions are read whole, open ones by
    their headers, as of the moment they are read. A partition that a slow subscription holds is no finding; it is
    listed with what holds it. docs/audit.md says what each finding means. Of several stores each is audited on its own;
    exit status 2: one of them could not be.

    $ duelog audit data --output report
    $ duelog audit data --as-of 2026-12-24T00:00Z --json
    $ duelog audit "stores/*" --output report
    """
    from ..audit.audit_report import PARQUET_MISSING, as_json, fleet_as_json, page, write_fleet_report, write_report
    from ..audit.audit_tables import Audit, is_faulty
    from ..fleet import is_fleet, stores_of

    as_of_ms = None if as_of is None else time_ms("--as-of", as_of)
    result: Audit
    if bool(stores) == (from_parquet is not None):
        given = " ".join(map(str, stores or ())) or None
        raise InvalidArgument("STORE", given, "expected a store, or --from-parquet with an export")
    if html and (out.in_json() or is_fleet(stores or [])):
        raise InvalidArgument("--html", html, "expected one store, and no --json")
    if output is not None:
        refuse_url("--output", output)
    if stores and is_fleet(stores):
        from ..spark.spark_jobs import audit_fleet

        found = stores_of(stores)
        for each in found:
            if output is not None:
                refuse_inside("--output", output, each)
        outcomes = in_fleet(audit_fleet, found, spark, master, verify=not headers, as_of_ms=as_of_ms)
        if output is not None and not write_fleet_report(outcomes, output):
            out.say(PARQUET_MISSING)
        if out.in_json():
            out.write_json(fleet_as_json(outcomes))
        end_fleet(outcomes, None if out.in_json() else lambda store, result: _show_audit(result), is_faulty)
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

        with out.progress_bar("partitions") as progress:
            result = audit_store(store, verify=not headers, as_of_ms=as_of_ms, progress=progress)
    if output is not None and not write_report(result, output):
        out.say(PARQUET_MISSING)
    if out.in_json():
        out.write_json(as_json(result))
    elif html:
        out.write_line(page(result))
    else:
        _show_audit(result)
        if output is not None:
            out.say(f"the report is in {output / 'audit.html'}")
    if is_faulty(result):
        raise typer.Exit(1)


def _show_audit(result: Any) -> None:
    from ..audit.audit_report import of_group

    for found in result.findings:
        line = f"{found.severity}: {found.code}: {found.address}: {found.message}; {found.advice}"
        out.write_line(out.printable(line))
    messages, pending, fired, acknowledged = (
        sum(getattr(row, name) for row in result.retention) for name in ("messages", "pending", "fired", "acknowledged")
    )
    disk = result.disk or {"partitions": sum(row.file_bytes for row in result.partitions)}
    figures = (("topics", len(result.topics)), ("subscriptions", len(result.subscriptions)),
               ("partitions", len(result.partitions)), ("messages in them", messages), ("pending", pending),
               ("fired", fired), ("acknowledged by all", acknowledged), *out.disk_rows(disk))  # fmt: skip
    out.write_table(f"{result.store}{of_group(result)}", ("", ">"), figures)
    if result.held:
        out.write_line("")
        columns = ("partition", "topic", "held by", "subscription", ">behind")
        rows = [
            (row.partition, short_names(row.topic), row.reason, row.subscription, row.behind) for row in result.held
        ]
        out.write_table(f"held partitions: {len({row[0] for row in rows}):,}", columns, rows[:_MOST_HELD])
        if len(rows) > _MOST_HELD:
            out.say(f"{len(rows) - _MOST_HELD:,} more reasons; --output has them all")
    out.say(f"findings: {len(result.findings):,}")


snapshots = typer.Typer(
    name="snapshot", help="List, verify, save and rebuild the saved delay indexes of a store.", no_args_is_help=True
)

Partition = Annotated[str | None, option("NAME", "Only this time partition (as `partitions` names it).")]
Topic = Annotated[str | None, option("TOPIC", "Only this topic.")]


@snapshots.command("list")
def list_(store: Store, partition: Partition = None, topic: Topic = None) -> None:
    """List the snapshots of a store by what their metadata says; works beside a writing process.

    $ duelog snapshot list data
    """
    from ..snapshot_tool import list_snapshots

    _show(list_snapshots(store, partition=partition, topic=topic))


@snapshots.command()
def verify(store: Store, partition: Partition = None, topic: Topic = None) -> None:
    """Read every part of every snapshot. Exit status 1: one of them cannot be used.

    Refused while a process has the store open, which replaces them meanwhile: verify a backup. A snapshot that cannot
    be used costs nothing but the time of the next start.

    $ duelog snapshot verify data
    """
    from ..snapshot_tool import list_snapshots

    with alone("it replaces snapshots while they are read: end it first, or verify a backup"):
        found = list_snapshots(store, partition=partition, topic=topic, verify=True)
    _show(found)
    if not all(each.usable for each in found):
        raise typer.Exit(1)


@snapshots.command()
def save(store: Store) -> None:
    """Have the process that has the store open save its delay indexes now, so that its next start is quick.

    Those that a start would soon have read anyway are not saved; a store that no process has open has none in memory.

    $ duelog snapshot save data
    """
    with asked(store, writes=True) as opened:
        count = opened.save_snapshots()
    out.answer({"saved": count}, f"saved: {count:,}")


@snapshots.command()
def rebuild(
    store: Store,
    partition: Partition = None,
    topic: Topic = None,
    bucket_ms: Annotated[
        int | None, option("bucket_ms of the configuration that the store is used with, if changed.", min=1)
    ] = None,
) -> None:
    """Read every entry of the partitions that have not closed, verify it, and make their snapshots anew.

    Refused while a process has the store open. Exit status 1: an entry cannot be read (it is quarantined, and `check`
    lists it).

    $ duelog snapshot rebuild data --partition 20261201T000000Z
    """
    from ..snapshot_tool import rebuild_snapshots

    with alone("rebuild writes what it would write too: end it first"), out.progress_bar("entries") as progress:
        report = rebuild_snapshots(store, partition=partition, topic=topic, bucket_ms=bucket_ms, progress=progress)
    _show_report(report)
    if report.damaged:
        raise typer.Exit(1)


def _show(found: list[FoundSnapshot]) -> None:
    columns = ("partition", "topic", ">id", "state", ">entries", ">covers", ">log", ">parts", ">size", "written", "")
    rows = (
        (
            each.partition,
            short_names(each.topic or "(deleted)"),
            each.snapshot_id,
            each.state,
            each.entries,
            each.tail,
            each.log_entries,
            each.parts,
            out.size_text(each.stored_bytes),
            None if each.created_ms is None else iso_time(each.created_ms),
            each.reason,
        )
        for each in found
    )
    out.listing((each._asdict() for each in found), f"snapshots: {len(found):,}", columns, rows)


def _show_report(report: RebuildReport) -> None:
    for log in report.logs:
        for error in log.found.damaged:
            address = {"ledger_id": error.ledger_id, "entry_id": error.entry_id, "reason": error.reason}
            damaged = {"partition": log.partition, "topic": log.topic, **address}
            out.answer({"damaged": damaged}, f"damaged: {out.printable(str(error))}")
    values = (
        {
            "partition": log.partition,
            "topic": log.topic,
            **{name: getattr(log.found, name) for name in ("ledger_id", "entries", "pending")},
            "written": None if log.found.written is None else log.found.written._asdict(),
        }
        for log in report.logs
    )
    columns = ("partition", "topic", ">entries", ">pending", ">damaged", ">parts", ">size")
    rows = (
        (
            log.partition,
            short_names(log.topic),
            log.found.entries,
            log.found.pending,
            len(log.found.damaged),
            None if log.found.written is None else log.found.written.parts,
            None if log.found.written is None else out.size_text(log.found.written.stored_bytes),
        )
        for log in report.logs
    )
    out.listing(values, f"rebuilt: {sum(log.found.written is not None for log in report.logs):,}", columns, rows)
    if report.removed and not out.in_json():
        out.say(f"removed from closed partitions: {report.removed:,} records")
