"""The commands `duelog schedules add | show | list | pause | resume | remove`: messages that recur."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.duration import duration_ms, duration_seconds
from ...store.errors import InvalidArgument, short_names
from ..output import answer, payload_fields, payload_of, preview, write_json, write_json_lines, write_table
from ..values import iso_time, properties_of, time_ms
from .cli_messages import content_of
from .options import Json, Store
from .place import asked

if TYPE_CHECKING:
    from ... import Schedule
    from ...upkeep.schedule import Due

app = typer.Typer(
    name="schedules",
    no_args_is_help=True,
    help="Messages that recur: make their schedules, look at them, pause, resume and remove them.",
)

InTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="The schedule's topic.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


class OnMisfire(StrEnum):
    """Treatment of occurrences that were missed."""

    first = "first"
    all = "all"
    latest = "latest"
    skip = "skip"


@app.command("add")
def add(
    store: Store,
    topic: InTopic,
    name: Name,
    payload: Annotated[
        str, typer.Argument(metavar="[PAYLOAD]", help="The message; -: read it from standard input.")
    ] = "",
    cron: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="'0 9 * * MON-FRI', with a field of seconds in front if there are six; @hourly, @daily, @weekly, "
            "@monthly, @yearly; '@every 90m'.",
        ),
    ] = None,
    interval: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Each so long, from now: 90m, 1h30m; 1s at least.")
    ] = None,
    timezone: Annotated[str, typer.Option(metavar="ZONE", help="Of the cron expression: Europe/Rome.")] = "UTC",
    key: Annotated[str | None, typer.Option(metavar="KEY", help="The message's key.")] = None,
    property_: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="A property; may be repeated.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="The latest time of an occurrence.")] = None,
    count: Annotated[int | None, typer.Option(metavar="N", help="End after so many messages.")] = None,
    jitter: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Due up to so much later, the same after a restart.")
    ] = None,
    misfires: Annotated[
        OnMisfire,
        typer.Option(
            help="What comes of those missed in a stop: the one that waited, all of them, the latest of them, none."
        ),
    ] = OnMisfire.first,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="What is late by no more is no misfire, with latest and skip. [default: 60s]"
        ),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the topic if it is new.")] = False,
    json_: Json = False,
) -> None:
    """Make a schedule, or replace the one of this name and say what it was; the same again changes nothing.

    ```
    duelog schedules add data reminders daily "wake up" --cron @daily --timezone Europe/Rome --count 30
    ```
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
    answer(_fields(made), line, json_=json_)


def _seconds(option: str, text: str) -> float:
    seconds = duration_seconds(option, text)
    try:
        duration_ms(option, seconds)
    except InvalidArgument as error:
        raise InvalidArgument(option, text, error.reason) from None
    return seconds


@app.command("show")
def show(
    store: Store,
    topic: InTopic,
    name: Name,
    next_: Annotated[int, typer.Option("--next", min=1, max=1_000, help="How many of its next occurrences.")] = 5,
    json_: Json = False,
) -> None:
    """Show a schedule and when its next occurrences are due.

    ```
    duelog schedules show data reminders daily --next 10
    ```
    """
    from ...operations.json_form import to_json

    with asked(store, writes=False) as opened:
        found = [each for each in opened.schedules(topic) if each.name == name]
    if not found:
        raise _unknown(topic, name)
    (shown,) = found
    dues = list(itertools.islice(_upcoming(shown), next_))
    fields = to_json(shown)
    if json_:
        write_json({**_fields(fields), "upcoming": [due._asdict() for due in dues]})
        return
    rows: list[tuple[str, object]] = [
        ("recurs", _when(fields)),
        ("state", _state(fields)),
        ("sent", shown.sent if shown.count is None else f"{shown.sent} of {shown.count}"),
        (
            "misfires",
            shown.misfires + ("" if shown.grace_ms is None else f", after {_length(shown.grace_ms)}"),
        ),
        ("jitter", _length(shown.jitter_ms)),
        ("until", "-" if shown.until_ms is None else iso_time(shown.until_ms)),
        ("payload", preview(shown.payload)),
        ("key", "-" if shown.key is None else shown.key),
        *(("property", f"{each}={value}") for each, value in shown.properties.items()),
    ]
    write_table(f"{shown.name} of {short_names(shown.topic)}", ["what", "is"], rows)
    write_table("next", ["of", "due"], [(iso_time(due.nominal_ms), iso_time(due.due_ms)) for due in dues])


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


@app.command("list")
def list_(
    store: Store,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Of this topic only.")] = None,
    json_: Json = False,
) -> None:
    """List the schedules of the store or of one topic, with the pending occurrence.

    ```
    duelog schedules list data --topic reminders
    ```
    """
    with asked(store, writes=False) as opened:
        found = list(opened.ask("schedules", {"topic": topic}))
    if json_:
        write_json_lines(map(_fields, found))
        return
    rows = [
        (short_names(each["topic"]), each["name"], _when(each), _state(each), preview(payload_of(each)))
        for each in found
    ]
    write_table("schedules", ["topic", "name", "recurs", "next", "payload"], rows)


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
        **payload_fields(payload_of(schedule)),
        "next_id": schedule["next_id"],
        "replaced": None if schedule["replaced"] is None else _fields(schedule["replaced"]),
    }


def _unknown(topic: str, name: str) -> InvalidArgument:
    return InvalidArgument("name", name, f"topic {topic} has no such schedule")


def _add(action: str, help_: str) -> None:
    """Add a command that changes a schedule and shows what it is then."""

    def change(store: Store, topic: InTopic, name: Name, json_: Json = False) -> None:
        with asked(store, writes=True) as opened:
            changed = opened.ask(f"{action}_schedule", {"topic": topic, "name": name})
        if changed is None:
            raise _unknown(topic, name)
        answer(_fields(changed), _state(changed), json_=json_)

    app.command(action, help=f"{help_}\n\n```\nduelog schedules {action} data reminders daily\n```")(change)


_add("pause", "Take a schedule's pending occurrence back, until it is resumed.")
_add("resume", "Go on with the first occurrence after now.")


@app.command("remove")
def remove_(store: Store, topic: InTopic, name: Name, json_: Json = False) -> None:
    """End a schedule and take its pending occurrence back.

    ```
    duelog schedules remove data reminders daily
    ```
    """
    with asked(store, writes=True) as opened:
        removed = opened.remove_schedule(topic, name)
    answer({"removed": removed}, "removed" if removed else "there is no such schedule", json_=json_)
