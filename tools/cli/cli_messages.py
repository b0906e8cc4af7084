"""The commands on messages that are to come: send, tx, scheduled, cancel, reschedule; and schedules."""

from __future__ import annotations

import base64
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.duration import duration_ms, duration_seconds
from ...store.errors import InvalidArgument, short_names
from .. import output
from ..values import iso_time, properties_of, time_ms, time_range_ms
from .options import Create, Place, Store, TopicName, argument, asked, option

if TYPE_CHECKING:
    from ... import Schedule
    from ...store.position import MessageId
    from ...upkeep.schedule import Due

app = typer.Typer()

AllowPast = Annotated[
    bool, option("--allow-past", "Take due times before 2001 too, as 0; without it they may be seconds.")
]


@app.command()
def send(
    store: Store,
    topic: TopicName,
    payload: Annotated[
        str | None, argument("PAYLOAD", "The message; - or nothing: read it from standard input.")
    ] = None,
    at: Annotated[str | None, option("TIME", "Deliver at this time.")] = None,
    after: Annotated[str | None, option("DURATION", "Deliver this long from now.")] = None,
    key: Annotated[str | None, option("KEY", "The message's key.")] = None,
    property_: Annotated[list[str] | None, option("--property", "NAME=VALUE", "A property; may be repeated.")] = None,
    dedup_key: Annotated[
        str | None, option("KEY", "Send nothing while a message of this key is pending; its id is printed.")
    ] = None,
    dedup_for: Annotated[str | None, option("DURATION", "With --dedup-key: the key holds at least so long.")] = None,
    replace: Annotated[
        bool, option("--replace", "With --dedup-key: cancel the pending message of the key, and send.")
    ] = False,
    ttl: Annotated[str | None, option("DURATION", "Do not deliver it later than this after its due time.")] = None,
    allow_past: AllowPast = False,
    create: Create = False,
) -> None:
    """Send one message, due now or later, and print its id once it is on disk.

    A topic that is not there is refused, unless --create makes it, and the store where the directory is missing or
    empty.

    $ duelog send data reminders "pay the bill" --create --at 2026-12-01T09:00:00+01:00 --key order-17 --property shop=7
    """
    deliver_at = None if at is None else _due_ms(at, allow_past=allow_past)
    deliver_after = None if after is None else duration_seconds("--after", after)
    properties = properties_of(property_ or [])
    message: dict[str, Any] = {
        "payload": content_of(payload),
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
    with asked(store, writes=True, create=create) as opened:
        sent: dict[str, Any] = opened.send(topic, create=create, **message)
    unread = "now" if at is None and after is None else "as asked"  # stored, and could not be read back
    due = unread if sent["due_ms"] is None else iso_time(sent["due_ms"])
    found = "" if sent["stored"] else "  (it was there: nothing is sent)"
    output.answer(sent, f"{sent['message_id']}  due {due}{found}")


@app.command()
def tx(store: Store, file: Annotated[str, argument("FILE", "JSON lines; - is standard input.")] = "-") -> None:
    """Do every operation in a file, or none of them, as one transaction; print the result of each.

    A line has "operation" and its arguments: send (as a line of import, and "ttl"), cancel ("topic", "message_id"),
    cancel_key ("topic", "key"), reschedule ("topic", "message_id", "deliver_at" or "deliver_after"), put_document
    ("key", "value" or "value_base64", "expected": a version, null for none), delete_document ("key", "expected").
    With "required": false one that cannot be is passed over; otherwise the exit status is 2, and nothing is stored.

    ```
    {"operation": "cancel_key", "topic": "order-timeouts", "key": "order-17"}
    {"operation": "send", "topic": "invoices", "payload": "order 17", "deliver_after": "1d"}
    ```

    $ duelog tx data operations.jsonl
    """
    operations = []
    with sys.stdin.buffer if file == "-" else Path(file).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if not line.isspace():
                    operations.append(_operation(line))
            except InvalidArgument as error:
                raise InvalidArgument(f"line {number}: {error.field}", error.value, error.reason) from None
    with asked(store, writes=True) as opened:
        results = opened.transaction(operations)
    for each, result in zip(operations, results, strict=True):
        name = each["operation"]
        output.answer({"operation": name, "result": result}, f"{name}  {output.printable(str(result))}")


def _operation(line: bytes) -> dict[str, Any]:
    """An operation as people write it, with its values in JSON as `Operations.transaction` takes them."""
    from ..transfer.import_lines import payload_of, time_of

    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("line", line.strip(), f"no JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("operation"), str):
        raise InvalidArgument("line", fields, 'expected a JSON object with "operation"')
    content = {"send": "payload", "put_document": "value"}.get(fields["operation"])
    operation = {name: value for name, value in fields.items() if name not in (content, f"{content}_base64")}
    if content is not None:
        operation[content] = base64.b64encode(payload_of(fields, content)).decode()
    if "deliver_at" in fields:
        operation["deliver_at"] = time_of(fields, "deliver_at", time_ms)
    for name in ("deliver_after", "dedup_for", "ttl"):
        if name in fields:
            operation[name] = time_of(fields, name, duration_seconds)
    return operation


def content_of(text: str | None) -> bytes:
    """The payload that an argument gives, or standard input where it is - or there is none."""
    if text is not None and text != "-":
        return os.fsencode(text)
    if text is None and sys.stdin.isatty():
        raise InvalidArgument("PAYLOAD", None, "give a message, or - and type it, ended by Ctrl-D")
    return sys.stdin.buffer.read()


@app.command("scheduled")
def scheduled(
    store: Place,
    topic: TopicName,
    start: Annotated[str | None, option("--from", "--start", "TIME", "Due at this time or later.")] = None,
    end: Annotated[str | None, option("--until", "--end", "TIME", "Due before this time.")] = None,
    limit: Annotated[int, option("At most this many.", min=1)] = 100,
    newest_first: Annotated[bool, option("--newest-first", "The one that is due last comes first.")] = False,
) -> None:
    """List messages of a topic that are not due yet, by due time. Of a server: the first 4,096 bytes of each payload.

    $ duelog scheduled data reminders --from 2026-12-01T00:00Z --until 2026-12-02T00:00Z
    $ duelog scheduled --server http://localhost:8080 reminders
    """
    start_ms, end_ms = time_range_ms(start, end)
    with store.opened() as there:
        found = list(there.scheduled(topic, start_ms, end_ms, limit + 1, newest_first))
    shown = found[:limit]
    columns = ("message id", "due", "key", "dedup key", "payload")
    cells = (
        (str(each.message_id), iso_time(each.due_ms), each.key, each.dedup_key, output.preview(each.payload))
        for each in shown
    )
    output.listing(map(output.message_json, shown), f"scheduled messages: {len(shown):,}", columns, cells)
    if len(found) > limit:
        output.say(f"there are more than {limit:,}; --limit shows more of them")


@app.command("count")
def count(
    store: Store,
    topic: TopicName,
    start: Annotated[str | None, option("--from", "--start", "TIME", "Due at this time or later.")] = None,
    end: Annotated[str | None, option("--until", "--end", "TIME", "Due before this time.")] = None,
    prefix: Annotated[str | None, option("TEXT", "With deduplication keys that begin with this text.")] = None,
) -> None:
    """Count messages of a topic that are not due yet.

    $ duelog count data reminders --until 2026-12-02T00:00Z --prefix order-
    """
    start_ms, end_ms = time_range_ms(start, end)
    with asked(store, writes=False) as opened:
        found = opened.count(topic, start_ms, end_ms, prefix)
    output.answer({"count": found}, f"{found:,}")


@app.command("cancel")
def cancel(
    store: Place,
    topic: TopicName,
    ids: Annotated[list[str] | None, argument("[ID]...", "Ids of the messages, such as 17:3; or --dedup-key.")] = None,
    dedup_key: Annotated[
        list[str] | None, option("KEY", "The pending message of this deduplication key; may be repeated.")
    ] = None,
    prefix: Annotated[str | None, option("TEXT", "Those of all deduplication keys that begin with this text.")] = None,
) -> None:
    """Cancel delayed messages, so that they are never delivered. Exit status 1: one has fired, or is unknown.

    $ duelog cancel --server http://localhost:8080 reminders 17:3 17:4
    $ duelog cancel data reminders --dedup-key order-17
    """
    if bool(ids) + bool(dedup_key) + (prefix is not None) != 1:
        raise InvalidArgument("ID", ids or [], "expected ids, --dedup-key or --prefix; one of the three")
    wanted = [_id(each) for each in ids or []]
    with store.opened(writes=True) as there:
        if not ids:
            found = there.cancel_keys(topic=topic, keys=dedup_key, prefix=prefix)
            named, field = dedup_key or found, "dedup_key"
            outcomes = ["cancelled" if each in found else "unknown" for each in named]
        else:
            named, field = ids or [], "message_id"
            outcomes = there.cancel(topic, wanted)
    for each, outcome in zip(named, outcomes, strict=True):
        output.answer({field: each, "outcome": outcome}, f"{output.printable(each)}  {outcome}")
    if {"fired", "unknown"} & set(outcomes):
        raise typer.Exit(1)


@app.command("reschedule")
def reschedule(
    store: Place,
    topic: TopicName,
    ids: Annotated[list[str], argument("ID...", "Ids of the messages, such as 17:3.")],
    at: Annotated[str | None, option("TIME", "Deliver at this time.")] = None,
    after: Annotated[str | None, option("DURATION", "Deliver this long from now.")] = None,
) -> None:
    """Give delayed messages another due time; each gets a new id. Exit status 1: for one it is too late, or unknown.

    $ duelog reschedule data reminders 17:3 --at 2026-12-24T09:00:00Z
    $ duelog reschedule --server http://localhost:8080 reminders 17:3 --after 0
    """
    if (at is None) == (after is None):
        raise InvalidArgument("--at", at, "expected one of the two, --at or --after")
    deliver_at = None if at is None else _due_ms(at, allow_past=False)
    deliver_after = None if after is None else duration_seconds("--after", after)
    wanted = [_id(each) for each in ids]
    with store.opened(writes=True) as there:
        new_ids = there.reschedule(topic, wanted, deliver_at, deliver_after)
    due = "" if deliver_at is None else f"  due {iso_time(deliver_at)}"
    for old, new in zip(ids, new_ids, strict=True):
        line = f"{old}  {'too late, or unknown' if new is None else f'{new}{due}'}"
        output.answer({"message_id": old, "new_message_id": new and str(new)}, line)
    if None in new_ids:
        raise typer.Exit(1)


def _due_ms(at: str, *, allow_past: bool) -> int:
    from ...store.message import due_at_ms

    return due_at_ms("--at", time_ms("--at", at), allow_past=allow_past)


def _id(text: str) -> MessageId:
    from ...store.position import MessageId

    try:
        return MessageId.parse(text)
    except InvalidArgument as error:
        raise InvalidArgument("ID", text, error.reason) from error


schedules = typer.Typer(
    name="schedules",
    no_args_is_help=True,
    help="Messages that recur: make their schedules, look at them, pause, resume and remove them.",
)

InTopic = Annotated[str, argument("TOPIC", "The schedule's topic.")]
Name = Annotated[str, argument("NAME", "The schedule's name.")]


class OnMisfire(StrEnum):
    """Treatment of occurrences that were missed."""

    first = "first"
    all = "all"
    latest = "latest"
    skip = "skip"


@schedules.command("add")
def add(
    store: Store,
    topic: InTopic,
    name: Name,
    payload: Annotated[str, argument("[PAYLOAD]", "The message; -: read it from standard input.")] = "",
    cron: Annotated[
        str | None,
        option(
            "EXPRESSION",
            "'0 9 * * MON-FRI', with a field of seconds in front if there are six; @hourly, @daily, @weekly, "
            "@monthly, @yearly; '@every 90m'.",
        ),
    ] = None,
    interval: Annotated[str | None, option("DURATION", "Each so long, from now: 90m, 1h30m; 1s at least.")] = None,
    timezone: Annotated[str, option("ZONE", "Of the cron expression: Europe/Rome.")] = "UTC",
    key: Annotated[str | None, option("KEY", "The message's key.")] = None,
    property_: Annotated[list[str] | None, option("--property", "NAME=VALUE", "A property; may be repeated.")] = None,
    until: Annotated[str | None, option("TIME", "The latest time of an occurrence.")] = None,
    count: Annotated[int | None, option("N", "End after so many messages.")] = None,
    jitter: Annotated[str | None, option("DURATION", "Due up to so much later, the same after a restart.")] = None,
    misfires: Annotated[
        OnMisfire,
        option("What comes of those missed in a stop: the one that waited, all of them, the latest of them, none."),
    ] = OnMisfire.first,
    grace: Annotated[
        str | None, option("DURATION", "What is late by no more is no misfire, with latest and skip. [default: 60s]")
    ] = None,
    create: Annotated[bool, option("--create", "Make the topic if it is new.")] = False,
) -> None:
    """Make a schedule, or replace the one of this name and say what it was; the same again changes nothing.

    $ duelog schedules add data reminders daily "wake up" --cron @daily --timezone Europe/Rome --count 30
    """
    from ...operations.json_form import to_json

    wanted: dict[str, Any] = {
        "payload": to_json(content_of(payload)),
        "cron": cron,
        "interval": None if interval is None else _seconds("--interval", interval),
        "timezone": timezone,
        "key": key,
        "properties": properties_of(property_ or []),
        "until": None if until is None else time_ms("--until", until),
        "count": count,
        "jitter": 0 if jitter is None else _seconds("--jitter", jitter),
        "misfires": misfires.value,
        "grace": None if grace is None else _seconds("--grace", grace),
        "create": create,
    }
    with asked(store, writes=True) as opened:
        made = opened.ask("every", {"topic": topic, "name": name, **wanted})
    replaced = made["replaced"]
    line = _state(made) if replaced is None else f"{_state(made)}; it replaces: {_when(replaced)}"
    output.answer(_fields(made), line)


def _seconds(option: str, text: str) -> float:
    seconds = duration_seconds(option, text)
    try:
        duration_ms(option, seconds)
    except InvalidArgument as error:
        raise InvalidArgument(option, text, error.reason) from None
    return seconds


@schedules.command("show")
def show(
    store: Store,
    topic: InTopic,
    name: Name,
    next_: Annotated[int, option("--next", "How many of its next occurrences.", min=1, max=1_000)] = 5,
) -> None:
    """Show a schedule and when its next occurrences are due.

    $ duelog schedules show data reminders daily --next 10
    """
    from ...operations.json_form import to_json

    with asked(store, writes=False) as opened:
        found = [each for each in opened.schedules(topic) if each.name == name]
    if not found:
        raise _unknown(topic, name)
    (shown,) = found
    dues = list(itertools.islice(_upcoming(shown), next_))
    fields = to_json(shown)
    if output.in_json():
        output.write_json({**_fields(fields), "upcoming": [due._asdict() for due in dues]})
        return
    rows: list[tuple[str, object]] = [
        ("recurs", _when(fields)),
        ("state", _state(fields)),
        ("sent", shown.sent if shown.count is None else f"{shown.sent} of {shown.count}"),
        ("misfires", shown.misfires + ("" if shown.grace_ms is None else f", after {_length(shown.grace_ms)}")),
        ("jitter", _length(shown.jitter_ms)),
        ("until", "-" if shown.until_ms is None else iso_time(shown.until_ms)),
        ("payload", output.preview(shown.payload)),
        ("key", "-" if shown.key is None else shown.key),
        *(("property", f"{each}={value}") for each, value in shown.properties.items()),
    ]
    output.write_table(f"{shown.name} of {short_names(shown.topic)}", ["what", "is"], rows)
    output.write_table("next", ["of", "due"], [(iso_time(due.nominal_ms), iso_time(due.due_ms)) for due in dues])


def _upcoming(schedule: Schedule) -> Iterator[Due]:
    """The occurrence that waits, and those after it; none while it is paused."""
    from ...upkeep.schedule import Due

    left = None if schedule.count is None else schedule.count - schedule.sent
    due = None
    if schedule.next_nominal_ms is not None and schedule.next_due_ms is not None:
        due = Due(schedule.next_nominal_ms, schedule.next_due_ms)
    while due is not None:
        yield due
        if left is not None:
            left -= 1
        due = None if left is not None and left < 0 else schedule.recurrence.after(due.nominal_ms)


@schedules.command("list")
def list_(store: Store, topic: Annotated[str | None, option("--topic", "TOPIC", "Of this topic only.")] = None) -> None:
    """List the schedules of the store or of one topic, with the pending occurrence.

    $ duelog schedules list data --topic reminders
    """
    with asked(store, writes=False) as opened:
        found = list(opened.ask("schedules", {"topic": topic}))
    rows = (
        (short_names(each["topic"]), each["name"], _when(each), _state(each), output.preview(output.payload_of(each)))
        for each in found
    )
    output.listing(map(_fields, found), "schedules", ["topic", "name", "recurs", "next", "payload"], rows)


def _when(schedule: Mapping[str, Any]) -> str:
    if schedule["interval_ms"] is not None:
        return f"each {_length(schedule['interval_ms'])}"
    return f"{schedule['cron']} ({schedule['timezone']})"


def _length(ms: int) -> str:
    return f"{ms / 1000:g} s"


def _state(schedule: Mapping[str, Any]) -> str:
    if schedule["ended"]:
        return "ended"
    return "paused" if schedule["next_due_ms"] is None else f"next at {iso_time(schedule['next_due_ms'])}"


def _fields(schedule: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in schedule.items() if name not in ("payload", "next_id", "replaced")}
    return {
        **others,
        **output.payload_fields(output.payload_of(schedule)),
        "next_id": schedule["next_id"],
        "replaced": None if schedule["replaced"] is None else _fields(schedule["replaced"]),
    }


def _unknown(topic: str, name: str) -> InvalidArgument:
    return InvalidArgument("name", name, f"topic {topic} has no such schedule")


def _add(action: str, help_: str) -> None:
    """Add a command that changes a schedule and shows what it is then."""

    def change(store: Store, topic: InTopic, name: Name) -> None:
        with asked(store, writes=True) as opened:
            changed = opened.ask(f"{action}_schedule", {"topic": topic, "name": name})
        if changed is None:
            raise _unknown(topic, name)
        output.answer(_fields(changed), _state(changed))

    schedules.command(action, help=f"{help_}\n\n$ duelog schedules {action} data reminders daily")(change)


_add("pause", "Take a schedule's pending occurrence back, until it is resumed.")
_add("resume", "Go on with the first occurrence after now.")


@schedules.command("remove")
def remove_(store: Store, topic: InTopic, name: Name) -> None:
    """End a schedule and take its pending occurrence back.

    $ duelog schedules remove data reminders daily
    """
    with asked(store, writes=True) as opened:
        removed = opened.remove_schedule(topic=topic, name=name)
    output.answer({"removed": removed}, "removed" if removed else "there is no such schedule")
