"""The commands `duelog snapshot list`, `verify`, `save` and `rebuild`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ...store.errors import short_names
from ..output import answer, printable, progress_bar, say, size_text, write_json, write_table
from ..values import alone, iso_time
from .options import Json, Store
from .place import asked

if TYPE_CHECKING:
    from ..snapshot_tool import FoundSnapshot, RebuildReport

app = typer.Typer(
    name="snapshot",
    help="List, verify, save and rebuild the saved delay indexes of a store.",
    no_args_is_help=True,
)

Partition = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only this time partition (as `partitions` names it).")
]
Topic = Annotated[str | None, typer.Option(metavar="TOPIC", help="Only this topic.")]


@app.command("list")
def list_(store: Store, partition: Partition = None, topic: Topic = None, json_: Json = False) -> None:
    """List the snapshots of a store by what their metadata says; works beside a writing process.

    ```
    duelog snapshot list data
    ```
    """
    from ..snapshot_tool import list_snapshots

    _show(list_snapshots(store, partition=partition, topic=topic), json_)


@app.command()
def verify(store: Store, partition: Partition = None, topic: Topic = None, json_: Json = False) -> None:
    """Read every part of every snapshot. Exit status 1: one of them cannot be used.

    Refused while a process has the store open, which replaces them meanwhile: verify a backup. A snapshot that cannot
    be used costs nothing but the time of the next start.

    ```
    duelog snapshot verify data
    ```
    """
    from ..snapshot_tool import verify_snapshots

    with alone("it replaces snapshots while they are read: end it first, or verify a backup"):
        found = verify_snapshots(store, partition=partition, topic=topic)
    _show(found, json_)
    if not all(each.usable for each in found):
        raise typer.Exit(1)


@app.command()
def save(store: Store, json_: Json = False) -> None:
    """Have the process that has the store open save its delay indexes now, so that its next start is quick.

    Those that a start would soon have read anyway are not saved; a store that no process has open has none in memory.

    ```
    duelog snapshot save data
    ```
    """
    with asked(store, writes=True) as opened:
        count = opened.save_snapshots()
    answer({"saved": count}, f"saved: {count:,}", json_=json_)


@app.command()
def rebuild(
    store: Store,
    partition: Partition = None,
    topic: Topic = None,
    bucket_ms: Annotated[
        int | None, typer.Option(min=1, help="bucket_ms of the configuration that the store is used with, if changed.")
    ] = None,
    json_: Json = False,
) -> None:
    """Read every entry of the partitions that have not closed, verify it, and make their snapshots anew.

    Refused while a process has the store open. Exit status 1: an entry cannot be read (it is quarantined, and `check`
    lists it).

    ```
    duelog snapshot rebuild data --partition 20261201T000000Z
    ```
    """
    from ..snapshot_tool import rebuild_snapshots

    with (
        alone("rebuild writes what it would write too: end it first"),
        progress_bar("entries") as progress,
    ):
        report = rebuild_snapshots(store, partition=partition, topic=topic, bucket_ms=bucket_ms, progress=progress)
    _show_report(report, json_)
    if report.damaged:
        raise typer.Exit(1)


def _show(found: list[FoundSnapshot], json_: bool) -> None:
    if json_:
        for each in found:
            write_json(asdict(each))
        return
    columns = ("partition", "topic", ">id", "state", ">entries", ">covers", ">log", ">parts", ">size", "written", "")
    write_table(
        f"snapshots: {len(found):,}",
        columns,
        [
            (
                each.partition,
                short_names(each.topic or "(deleted)"),
                each.snapshot_id,
                each.state,
                each.entries,
                each.tail,
                each.log_entries,
                each.parts,
                size_text(each.stored_bytes),
                None if each.created_ms is None else iso_time(each.created_ms),
                each.reason,
            )
            for each in found
        ],
    )


def _show_report(report: RebuildReport, json_: bool) -> None:
    for log in report.logs:
        for error in log.found.damaged:
            address = {"ledger_id": error.ledger_id, "entry_id": error.entry_id, "reason": error.reason}
            damaged = {"partition": log.partition, "topic": log.topic, **address}
            answer({"damaged": damaged}, f"damaged: {printable(str(error))}", json_=json_)
    if json_:
        for log in report.logs:
            figures = {"ledger_id": log.found.ledger_id, "entries": log.found.entries, "pending": log.found.pending}
            written = None if log.found.written is None else log.found.written._asdict()
            write_json({"partition": log.partition, "topic": log.topic, **figures, "written": written})
        return
    columns = ("partition", "topic", ">entries", ">pending", ">damaged", ">parts", ">size")
    write_table(
        f"rebuilt: {sum(log.found.written is not None for log in report.logs):,}",
        columns,
        [
            (
                log.partition,
                short_names(log.topic),
                log.found.entries,
                log.found.pending,
                len(log.found.damaged),
                None if log.found.written is None else log.found.written.parts,
                None if log.found.written is None else size_text(log.found.written.stored_bytes),
            )
            for log in report.logs
        ],
    )
    if report.removed:
        say(f"removed from closed partitions: {report.removed:,} records")
