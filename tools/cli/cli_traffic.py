"""The commands that put messages into a store: send, import."""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument
from ...store.message import due_at_ms
from ..asking import asked
from ..output import answer, say, write_json, write_line
from ..transfer.import_lines import Import
from ..values import iso_time, properties_of, time_ms
from .cli_export import import_parquet
from .options import Create, Json, Store, TopicName

AllowPast = Annotated[
    bool, typer.Option("--allow-past", help="Take due times before 2001 too, as 0; without it they may be seconds.")
]


def send(
    store: Store,
    topic: TopicName,
    payload: Annotated[
        str | None,
        typer.Argument(metavar="PAYLOAD", help="The message; - or nothing: read it from standard input."),
    ] = None,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Deliver at this time.")] = None,
    after: Annotated[str | None, typer.Option(metavar="DURATION", help="Deliver this long from now.")] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="The message's key.")] = None,
    property_: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="A property; may be repeated.")
    ] = None,
    dedup_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Send nothing while a message of this key is pending; its id is printed."),
    ] = None,
    dedup_for: Annotated[
        str | None, typer.Option(metavar="DURATION", help="With --dedup-key: the key holds at least so long.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --dedup-key: cancel the pending message of the key, and send.")
    ] = False,
    ttl: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Do not deliver it later than this after its due time.")
    ] = None,
    allow_past: AllowPast = False,
    create: Create = False,
    json_: Json = False,
) -> None:
    """Send one message, due now or later, and print its id once it is on disk.

    A topic that is not there is refused, unless --create makes it, and the store where the directory is missing or
    empty.

    ```
    duelog send data reminders "pay the bill" --create --at 2026-12-01T09:00:00+01:00 --key order-17 --property shop=7
    ```
    """
    deliver_at = None if at is None else due_at_ms("--at", time_ms("--at", at), allow_past=allow_past)
    deliver_after = None if after is None else duration_seconds("--after", after)
    properties = properties_of(property_ or [])
    content = content_of(payload)
    message = {
        "payload": base64.b64encode(content).decode(),
        "deliver_at": deliver_at,
        "deliver_after": deliver_after,
        "key": key,
        "properties": properties,
        "allow_past": allow_past,
        "ttl": None if ttl is None else duration_seconds("--ttl", ttl),
        "dedup_key": dedup_key,
        "dedup_for": None if dedup_for is None else duration_seconds("--dedup-for", dedup_for),
        "replace": replace,
    }
    with asked(store, writes=True, create=create) as ask:
        sent = ask("send", {"topic": topic, "create": create, **message})
    unread = "now" if at is None and after is None else "as asked"  # stored, and could not be read back
    due = unread if sent["due_ms"] is None else iso_time(sent["due_ms"])
    answer(sent, f"{sent['message_id']}  due {due}", json_=json_)


def content_of(text: str | None) -> bytes:
    """The payload that an argument gives, or standard input where it is - or there is none."""
    if text is not None and text != "-":
        return os.fsencode(text)
    if text is None and sys.stdin.isatty():
        raise InvalidArgument("PAYLOAD", None, "give a message, or - and type it, ended by Ctrl-D")
    return sys.stdin.buffer.read()


def import_(
    store: Store,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="JSON lines; - is standard input.", show_default=False)
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Messages that are checked and written together.")
    ] = 5_000,
    ics: Annotated[
        bool, typer.Option("--ics", help="The file is a calendar: schedule its reminders. Needs duelog[calendar].")
    ] = False,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="With --ics: where the reminders go.")] = "reminders",
    timezone: Annotated[str, typer.Option(metavar="ZONE", help="With --ics: zone of times that have none.")] = "UTC",
    days: Annotated[int, typer.Option(min=1, max=36_500, help="With --ics: how far into the future.")] = 366,
    parquet: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An export of `duelog export`, instead of a file.")
    ] = None,
    subscription: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUBSCRIPTION", help="With --parquet: subscribe every topic; else as it was. May be repeated."
        ),
    ] = None,
    once: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Store what no import of the same lines under this name has stored."),
    ] = None,
    allow_past: AllowPast = False,
    json_: Json = False,
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

    ```
    duelog import data messages.jsonl
    duelog import data --ics calendar.ics --timezone Europe/Rome
    duelog import copy --parquet archive
    ```

    The reminders of a calendar are checked before any is written, too. An archive goes into an empty store, and is read
    to its end before anything is written; what ends it later leaves a part, to be removed with the store. Its messages
    have all been due: they are due at once again, in their old order and with their old times, for subscriptions that
    have acknowledged nothing.
    """
    if file is None or parquet is not None:
        if file is not None or parquet is None:
            raise InvalidArgument("FILE", file, "expected a file, or --parquet with an export; one of the two")
        _refuse_of_others("--parquet", once, allow_past)
        import_parquet(store, parquet, subscription, json_)
        return
    if ics:
        _refuse_of_others("--ics", once, allow_past)
        _import_calendar(store, file, topic, timezone, days, json_)
        return
    with _input(file) as lines, asked(store, writes=True, create=True) as ask:
        started = time.monotonic()
        work = Import(ask, batch_messages=batch, allow_past=allow_past, once=once)
        try:
            _import(work, lines, store)
        except BaseException:
            rest = f"; of the lines up to {work.began_to:,} some may be" if work.began_to else ""
            say(f"{work.messages:,} messages, up to line {work.lines:,}, are in the store{rest}")
            raise
        seconds = time.monotonic() - started
    if json_:
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


def _import_calendar(store: Path, file: str, topic: str, timezone: str, days: int, json_: bool) -> None:
    from ..transfer.import_ics import import_ics

    try:
        with _input(file) as calendar, asked(store, writes=True, create=True) as ask:
            done = import_ics(ask, calendar, topic, timezone=timezone, horizon=timedelta(days=days))
    except ImportError as error:
        raise InvalidArgument("--ics", file, f"{error}; pip install 'duelog[calendar]'") from None
    text = f"{done.messages:,} reminders to {topic}; {done.past:,} are past"
    if done.updated or done.unchanged or done.cancelled:
        text += f"; {done.updated:,} updated, {done.cancelled:,} cancelled, {done.unchanged:,} there already"
    answer(asdict(done), text, json_=json_)


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
