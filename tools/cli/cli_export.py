"""The commands `duelog export` and `duelog table`, and importing what an export wrote."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from ...store.errors import InvalidArgument
from ..arrow import NeedsArrow, open_tables
from ..fleet import is_fleet, stores_of
from ..output import printable, progress_bar, say, size_text, write_json, write_json_lines, write_line
from ..values import alone, open_to_write, time_ms, time_range_ms
from .options import Json, Master, Stores, end_fleet, store_progress


def export(
    stores: Stores,
    dest: Annotated[
        Path, typer.Argument(metavar="DEST", help="Where to: an empty directory, or a new one.", show_default=False)
    ],
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic; may be repeated.")
    ] = None,
    partition: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this partition; may be repeated.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Only partitions that end after this time.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only partitions that begin before it.")] = None,
    pending: Annotated[
        bool, typer.Option("--pending", help="Also messages that are still to come, in a table of their own.")
    ] = False,
    spark: Annotated[bool, typer.Option("--spark", help="Write the files by Spark's tasks.")] = False,
    master: Master = None,
    json_: Json = False,
) -> None:
    """Write the messages of closed partitions to Parquet files, by topic and day. Needs duelog[arrow].

    Beside them go the markers, subscriptions and what else an audit reads, all as of one point in time; `duelog audit
    --from-parquet` and `duelog import --parquet` take the directory. Works beside a process that has the store open,
    and changes nothing in it. Of several stores each is an export of its own below DEST, and one that cannot be
    exported (exit status 2) keeps no other from it.

    ```
    duelog export data archive --until 2026-12-01T00:00:00Z
    duelog export "stores/*" archives
    ```
    """
    try:
        from ..columns.scan_plan import Wanted
        from ..transfer.parquet_export import export_store, fleet_row
    except ImportError as error:
        raise NeedsArrow("duelog export", error) from None
    wanted = Wanted.of(topic or None, partition or None, *time_range_ms("--from", from_, "--until", until))
    if not stores:
        raise InvalidArgument("STORE", None, "expected the directory of a store")
    if is_fleet(stores):
        from ..spark.spark_jobs import export_fleet, fleet_session

        found = stores_of(stores)
        with fleet_session("duelog export", spark, master) as session, store_progress(found) as counted:
            outcomes = counted(export_fleet(found, dest, session=session, wanted=wanted, pending=pending))
        if json_:
            write_json_lines(fleet_row(each) for each in outcomes)
        for outcome in outcomes if not json_ else ():
            if outcome.result is not None:
                write_line(printable(f"{outcome.store}:"))
                _show(outcome.result)
        end_fleet(outcomes, worse=False)
        return
    (store,) = stores
    if spark:
        from ..spark.spark_jobs import export_with_spark

        done = export_with_spark(store, dest, master=master, wanted=wanted, pending=pending)
    else:
        with progress_bar("slices", MofNCompleteColumn(), TimeElapsedColumn()) as progress:
            done = export_store(store, dest, wanted=wanted, pending=pending, progress=progress)
    if json_:
        write_json(done._asdict())
    else:
        _show(done)


def _show(done: Any) -> None:
    write_line(
        f"{done.rows:,} messages of {done.partitions:,} partitions in {done.files:,} files, {size_text(done.bytes)}"
    )
    for count, what in (
        (done.withdrawn, "never fire (cancelled or replaced)"),
        (done.dropped, "have no body any more (compaction)"),
        (done.damaged, "cannot be read"),
    ):
        if count:
            say(f"{count:,} of them {what}")


def table(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Directory of a store or an export.")],
    name: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="messages, pending, markers, partitions, subscriptions, frontiers, ledgers, acknowledgements, "
            "attempts or dead_letters.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to: a name in .parquet or .arrow.")
    ],
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this column; may be repeated.", show_default=False)
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC", help="Only this topic; may be repeated.", show_default=False)
    ] = None,
    partition: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this partition; may be repeated.", show_default=False)
    ] = None,
    from_: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Only what is due from then on.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only what is due before.")] = None,
) -> None:
    """Write one table to a Parquet or Arrow file, as of one point in time. Needs duelog[arrow].

    The tables are those of Spark's data source (docs/arrow.md): messages of closed partitions, those still to come
    (pending), and what the store knows of them. Works beside a process that has the store open, and changes nothing.

    ```
    duelog table data pending -o pending.parquet --topic reminders --until 2026-12-01T00:00:00Z
    ```
    """
    with open_tables(store, pending=name == "pending") as tables:
        rows = tables.write(
            name,
            output,
            column or None,
            topics=topic or None,
            partitions=partition or None,
            due_from_ms=None if from_ is None else time_ms("--from", from_),
            due_until_ms=None if until is None else time_ms("--until", until),
        )
    say(f"{rows:,} rows of {name} in {output}")


def import_parquet(store: Path, directory: Path, subscriptions: list[str] | None, json_: bool) -> None:
    """`duelog import --parquet`: send the messages of an export to an empty store, which is made if need be."""
    try:
        from ..transfer.export_layout import PENDING, open_export
        from ..transfer.parquet_import import import_export
    except ImportError as error:
        raise NeedsArrow("duelog import --parquet", error) from None
    export = open_export(directory)
    total = sum(file.rows for file in export.message_files) + export.rows_of(PENDING)
    with (
        alone("an archive goes into an empty store that nothing else is sent to: name another directory"),
        open_to_write(store, create=True, span_ms=export.manifest["partition_ms"]) as opened,
        progress_bar("messages", MofNCompleteColumn(), TimeElapsedColumn()) as progress,
    ):
        progress(0, total)
        empty = next(iter(opened.topics()), None) is None
        try:
            done = import_export(
                opened,
                export,
                subscriptions=subscriptions or None,
                progress=lambda done: progress(done.messages, total),
            )
        except BaseException:
            if empty and next(iter(opened.topics()), None) is not None:
                say("a part of the archive is in the store; remove the store before importing again")
            raise
    left_out = {name: getattr(done, name) for name in ("withdrawn", "dropped", "damaged", "deleted_topics")}
    if json_:
        write_json({**asdict(done), "topics": len(done.topics)})
        return
    later = f", but for {done.pending:,} that are due when they were" if done.pending else ""
    write_line(f"{done.messages:,} messages to {len(done.topics):,} topics, due at once{later}")
    for name, count in left_out.items():
        if count:
            say(f"{count:,} were left out: {name.replace('_', ' ')}")
