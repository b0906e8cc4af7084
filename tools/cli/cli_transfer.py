"""The commands that bring messages into a store and out of it: import, export, table, drain."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from ...store.errors import InvalidArgument
from ..output import answer, in_json, printable, progress_bar, say, size_text, write_json, write_json_lines, write_line
from ..values import (
    alone,
    extra,
    iso_time,
    open_to_write,
    refuse_url,
    require_store,
    settings_of,
    time_ms,
    time_range_ms,
)
from .cli_messages import AllowPast
from .options import TOKEN, Master, Store, Stores, argument, asked, end_fleet, in_fleet, option

if TYPE_CHECKING:
    from ..transfer.draining import Drained
    from ..transfer.import_lines import Import

app = typer.Typer()


@app.command("import")
def import_(
    store: Store,
    file: Annotated[str | None, argument("FILE", "JSON lines; - is standard input.", show_default=False)] = None,
    batch: Annotated[int, option("Messages that are checked and written together.", min=1, max=1_000_000)] = 5_000,
    ics: Annotated[
        bool, option("--ics", "The file is a calendar: schedule its reminders. Needs duelog[calendar].")
    ] = False,
    topic: Annotated[str, option("TOPIC", "With --ics: where the reminders go.")] = "reminders",
    timezone: Annotated[str, option("ZONE", "With --ics: zone of times that have none.")] = "UTC",
    days: Annotated[int, option("With --ics: how far into the future.", min=1, max=36_500)] = 366,
    parquet: Annotated[Path | None, option("DIR", "An export of `duelog export`, instead of a file.")] = None,
    subscription: Annotated[
        list[str] | None,
        option("SUBSCRIPTION", "With --parquet: subscribe every topic; else as it was. May be repeated."),
    ] = None,
    once: Annotated[
        str | None, option("NAME", "Store what no import of the same lines under this name has stored.")
    ] = None,
    allow_past: AllowPast = False,
) -> None:
    """Send messages from a file of JSON lines, in batches; or the reminders of a calendar; or an archive.

    A line has "topic", "payload" (text) or "payload_base64", and if wanted "deliver_at" (a time) or "deliver_after"
    (a duration), "key", "properties" (text by name), "dedup_key", "dedup_for", "replace" (as the options of send):

    ```
    {"topic": "reminders", "payload": "pay", "deliver_at": "2026-12-01T09:00:00Z", "key": "order-17"}
    ```

    A line that cannot be taken, by a delay policy too, ends it with exit status 2 and the line's number, field and
    value on standard error. Every line of a file is checked before anything is written, so nothing is; from a pipe
    every line of a batch (--batch), and it is said which lines before it are stored. Where a full disk or the like ends
    it, that is said too; with --once it is run again with the same lines and stores what is missing, as the messages of
    each topic are numbered by a producer of that name.

    $ duelog import data messages.jsonl
    $ duelog import data --ics calendar.ics --timezone Europe/Rome
    $ duelog import copy --parquet archive

    The reminders of a calendar are checked before any is written, too. An archive goes into an empty store, and is read
    to its end before anything is written; what ends it later leaves a part, to be removed with the store. Its messages
    have all been due: they are due at once again, in their old order and with their old times, for subscriptions that
    have acknowledged nothing.
    """
    if file is None or parquet is not None:
        if file is not None or parquet is None:
            raise InvalidArgument("FILE", file, "expected a file, or --parquet with an export; one of the two")
        _refuse_of_others("--parquet", once, allow_past)
        import_parquet(store, parquet, subscription)
        return
    if ics:
        _refuse_of_others("--ics", once, allow_past)
        _import_calendar(store, file, topic, timezone, days)
        return
    from ..transfer.import_lines import Import

    with _input(file) as lines, asked(store, writes=True, create=True) as opened:
        started = time.monotonic()
        work = Import(opened, batch_messages=batch, allow_past=allow_past, once=once)
        try:
            _import(work, lines, store)
        except BaseException:
            rest = f"; of the lines up to {work.began_to:,} some may be" if work.began_to else ""
            say(f"{work.messages:,} messages, up to line {work.lines:,}, are in the store{rest}")
            raise
        seconds = time.monotonic() - started
    if in_json():
        counts = {"messages": work.messages, "topics": work.topics, "seconds": round(seconds, 3)}
        write_json(counts if once is None else {**counts, "stored_before": work.stored_before})
    else:
        write_line(f"{work.messages:,} messages to {work.topics:,} topics in {seconds:.1f} s")
        if work.stored_before:
            say(f"{work.stored_before:,} of them were in the store already")


def _refuse_of_others(option: str, once: str | None, allow_past: bool) -> None:
    for name, value in (("--once", once), ("--allow-past", allow_past or None)):
        if value is not None:
            raise InvalidArgument(name, value, f"is for JSON lines; {option} is given too")


def _import_calendar(store: Path, file: str, topic: str, timezone: str, days: int) -> None:
    from ..transfer.import_ics import import_ics

    try:
        with _input(file) as calendar, asked(store, writes=True, create=True) as opened:
            done = import_ics(opened, calendar, topic, timezone=timezone, horizon=timedelta(days=days))
    except ImportError as error:
        raise InvalidArgument("--ics", file, f"{error}; pip install 'duelog[calendar]'") from None
    text = f"{done.messages:,} reminders to {topic}; {done.past:,} are past"
    if done.updated or done.unchanged or done.cancelled:
        text += f"; {done.updated:,} updated, {done.cancelled:,} cancelled, {done.unchanged:,} there already"
    answer(asdict(done), text)


@contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 - closed below, where its errors are the reader's
    except OSError as error:
        raise InvalidArgument("FILE", name, error.strerror or str(error)) from None
    with file:
        yield file


def _import(work: Import, lines: IO[bytes], store: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    size = os.fstat(lines.fileno()).st_size if lines is not sys.stdin.buffer else 0
    bar = Progress(
        TextColumn(f"into {store.absolute().name}"),
        BarColumn(),
        TextColumn("{task.fields[messages]:,} messages, {task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    started = time.monotonic()
    with bar:
        task = bar.add_task("import", total=size or None, messages=0, rate=0.0)

        def show() -> None:
            rate = work.messages / max(time.monotonic() - started, 1e-3)
            bar.update(task, completed=lines.tell() if size else 0, messages=work.messages, rate=rate)

        work.run(lines, show)


@app.command()
def export(
    stores: Stores,
    dest: Annotated[Path, argument("DEST", "Where to: an empty directory, or a new one.", show_default=False)],
    topic: Annotated[list[str] | None, option("--topic", "TOPIC", "Only this topic; may be repeated.")] = None,
    partition: Annotated[list[str] | None, option("NAME", "Only this partition; may be repeated.")] = None,
    from_: Annotated[str | None, option("--from", "TIME", "Only partitions that end after this time.")] = None,
    until: Annotated[str | None, option("TIME", "Only partitions that begin before it.")] = None,
    pending: Annotated[
        bool, option("--pending", "Also messages that are still to come, in a table of their own.")
    ] = False,
    spark: Annotated[bool, option("--spark", "Write the files by Spark's tasks.")] = False,
    master: Master = None,
) -> None:
    """Write the messages of closed partitions to Parquet files, by topic and day. Needs duelog[arrow].

    Beside them go the markers, subscriptions and what else an audit reads, all as of one point in time; `duelog audit
    --from-parquet` and `duelog import --parquet` take the directory. Works beside a process that has the store open,
    and changes nothing in it. Of several stores each is an export of its own below DEST, and one that cannot be
    exported (exit status 2) keeps no other from it.

    $ duelog export data archive --until 2026-12-01T00:00:00Z
    $ duelog export "stores/*" archives
    """
    from ..columns import needs_arrow
    from ..fleet import is_fleet, stores_of

    with needs_arrow("duelog export"):
        from ..columns.scan_rows import Wanted
        from ..transfer.parquet_export import export_store, fleet_row
    wanted = Wanted.of(topic or None, partition or None, *time_range_ms(from_, until))
    if not stores:
        raise InvalidArgument("STORE", None, "expected the directory of a store")
    refuse_url("DEST", dest)
    if is_fleet(stores):
        from ..spark.spark_jobs import export_fleet

        outcomes = in_fleet(export_fleet, stores_of(stores), spark, master, dest=dest, wanted=wanted, pending=pending)
        if in_json():
            write_json_lines(fleet_row(each) for each in outcomes)
        end_fleet(outcomes, None if in_json() else _show_named, lambda done: False)
        return
    (store,) = stores
    if spark:
        from ..spark.spark_jobs import export_with_spark

        done = export_with_spark(store, dest, master=master, wanted=wanted, pending=pending)
    else:
        with progress_bar("slices", time_left=False) as progress:
            done = export_store(store, dest, wanted=wanted, pending=pending, progress=progress)
    if in_json():
        write_json(done._asdict())
    else:
        _show_export(done)


def _show_named(store: Path, done: Any) -> None:
    write_line(printable(f"{store}:"))
    _show_export(done)


def _show_export(done: Any) -> None:
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


def import_parquet(store: Path, directory: Path, subscriptions: list[str] | None) -> None:
    """`duelog import --parquet`: send the messages of an export to an empty store, which is made if need be."""
    from ..columns import needs_arrow

    with needs_arrow("duelog import --parquet"):
        from ..transfer.export_layout import PENDING, open_export
        from ..transfer.parquet_import import import_export
    export = open_export(directory)
    total = sum(file.rows for file in export.message_files) + export.rows_of(PENDING)
    with (
        alone("an archive goes into an empty store that nothing else is sent to: name another directory"),
        open_to_write(store, create=True, span_ms=export.manifest["partition_ms"]) as opened,
        progress_bar("messages", time_left=False) as progress,
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
    if in_json():
        write_json({**asdict(done), "topics": len(done.topics)})
        return
    later = f", but for {done.pending:,} that are due when they were" if done.pending else ""
    write_line(f"{done.messages:,} messages to {len(done.topics):,} topics, due at once{later}")
    for name, count in left_out.items():
        if count:
            say(f"{count:,} were left out: {name.replace('_', ' ')}")


@app.command()
def drain(
    store: Store,
    to: Annotated[
        str,
        option(
            "PLACE",
            "The other broker: pulsar:// or pulsar+ssl://host:port; another store that is served: its directory, "
            "duelog:// or duelog+ssl://host:port.",
        ),
    ],
    topic: Annotated[list[str] | None, option("--topic", "TOPIC", "Only this topic; may be repeated.")] = None,
    keep: Annotated[
        bool, option("--keep", "Copy: cancel nothing here, and work beside a process that has it open.")
    ] = False,
    dry_run: Annotated[bool, option("--dry-run", "Only count what would be sent, and what is left.")] = False,
    subscriptions: Annotated[
        bool, option("--subscriptions/--no-subscriptions", "Make the topics' subscriptions there first.")
    ] = True,
    token: Annotated[
        str | None, option("TOKEN", "A token for the other broker.", envvar=TOKEN, show_envvar=True)
    ] = None,
    trust: Annotated[Path | None, option("--tls-trust", "FILE", "Certificates that are trusted, in PEM.")] = None,
) -> None:
    """Send what is pending to a Pulsar cluster or another duelog store, with its due times, and cancel it here.

    Needs `pip install 'duelog[drain]'`, and the store for itself: stop its broker first. A message is cancelled here
    once it is confirmed there. Run it again after whatever ended it: nothing is lost, and at most 512 entries come
    twice, none in a duelog store, or where the other broker deduplicates. A duelog store gets entries as they are. For
    a broker key, ordering key, properties, event time and null values are carried; batches become single messages,
    payloads are sent uncompressed. What cannot be carried is counted, stays here and makes exit status 1. What has
    fired is not pending: let its subscriptions receive it here.

    $ duelog drain data --to pulsar://cluster.example:6650 --dry-run
    $ duelog drain data --to pulsar+ssl://cluster.example:6651 --token "$TOKEN"
    $ duelog drain data --to duelog://other.example:6700
    """
    from ... import DelayedStore, SystemClock
    from ...engine import open_engine
    from ...operations.wire_address import is_address
    from ...store.names import TopicName

    with extra("drain", "drain"):
        from ..transfer.draining import Drain, DrainTarget, PulsarTarget, StoreTarget
    require_store(store)
    topics = [TopicName.parse(each) for each in topic] if topic else None
    to_store = is_address(to) or "://" not in to
    if not to or (":" in to and "://" not in to and not Path(to).exists()):
        raise InvalidArgument("--to", to, "expected pulsar://host:port, duelog://host:port or the directory of a store")
    if to_store and Path(to).absolute() == store.absolute():
        raise InvalidArgument("--to", to, "expected another store")
    target: DrainTarget = (StoreTarget if to_store else PulsarTarget)(to, token=token, trust=trust)
    config = settings_of(store, background=False)
    with alone("draining cancels here what is there: end it first, or copy with --keep"):
        engine = open_engine(store.absolute(), config, SystemClock(), read_only=keep or dry_run, records_defaults=False)
    with closing(target), DelayedStore(engine) as opened:
        total = opened.stats().pending
        with progress_bar("messages") as progress:
            work = Drain(
                engine,
                None if dry_run else target,
                to_store=to_store,
                topics=topics,
                keep=keep,
                subscriptions=subscriptions,
                progress=lambda done: progress(done.entries, total),
            )
            try:
                work.run()
            except BaseException:
                say(f"{work.done.entries:,} entries were sent; the same command goes on with the others")
                raise
    _show_drained(work.done, dry_run)
    if work.done.left:
        raise typer.Exit(1)


def _show_drained(done: Drained, dry_run: bool) -> None:
    if in_json():
        write_json(asdict(done))
        return
    due = (
        "" if done.first_due_ms is None else f", due {iso_time(done.first_due_ms)} to {iso_time(done.last_due_ms or 0)}"
    )
    what = "would be sent" if dry_run else "are there"
    write_line(f"{done.messages:,} messages in {done.entries:,} entries of {done.topics:,} topics {what}{due}")
    if done.before:
        say(f"{done.before:,} entries had been sent before")
    for reason, count in sorted(done.left.items()):
        say(f"{count:,} entries are left: {reason}")


@app.command()
def table(
    store: Annotated[Path, argument("STORE", "Directory of a store or an export.")],
    name: Annotated[
        str,
        argument(
            "TABLE",
            "messages, pending, markers, partitions, subscriptions, frontiers, ledgers, acknowledgements, "
            "attempts, dead_letters or keys.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, option("--output", "-o", "FILE", "Where to: a name in .parquet or .arrow.")],
    column: Annotated[
        list[str] | None, option("NAME", "Only this column; may be repeated.", show_default=False)
    ] = None,
    topic: Annotated[list[str] | None, option("TOPIC", "Only this topic; may be repeated.", show_default=False)] = None,
    partition: Annotated[
        list[str] | None, option("NAME", "Only this partition; may be repeated.", show_default=False)
    ] = None,
    from_: Annotated[str | None, option("--from", "TIME", "Only what is due from then on.")] = None,
    until: Annotated[str | None, option("TIME", "Only what is due before.")] = None,
) -> None:
    """Write one table to a Parquet or Arrow file, as of one point in time. Needs duelog[arrow].

    The tables are those of Spark's data source (docs/arrow.md): messages of closed partitions, those still to come
    (pending), and what the store knows of them. Works beside a process that has the store open, and changes nothing.

    $ duelog table data pending -o pending.parquet --topic reminders --until 2026-12-01T00:00:00Z
    """
    from ..arrow import open_tables

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
