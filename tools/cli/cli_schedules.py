"""The commands `duelog schedules list | pause | resume | remove`: messages that recur."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from ... import Schedule, Topic
from ...store.errors import InvalidArgument
from ..output import answer, payload_fields, preview, write_json, write_table
from ..values import iso_time, open_to_read, open_to_write
from .options import Json, Store

app = typer.Typer(
    name="schedules",
    no_args_is_help=True,
    help="Messages that recur: look at their schedules, pause, resume and remove them.",
)

InTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="The schedule's topic.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


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
    with open_to_read(store) as opened:
        topics = opened.topics() if topic is None else [opened.topic(topic)]
        found = [schedule for one in topics for schedule in one.schedules()]
    if json_:
        write_json([_fields(schedule) for schedule in found])
        return
    rows = [
        (
            schedule.topic,
            schedule.name,
            _when(schedule),
            "paused" if schedule.next_due_ms is None else iso_time(schedule.next_due_ms),
            preview(schedule.payload),
        )
        for schedule in found
    ]
    write_table("schedules", ["topic", "name", "recurs", "next", "payload"], rows)


def _when(schedule: Schedule) -> str:
    if schedule.interval_ms is not None:
        return f"each {schedule.interval_ms / 1000:g} s"
    return f"{schedule.cron} ({schedule.timezone})"


def _fields(schedule: Schedule) -> dict[str, object]:
    fields = asdict(schedule)
    fields.pop("payload")
    next_id = fields.pop("next_id")
    return {**fields, **payload_fields(schedule.payload), "next_id": None if next_id is None else str(schedule.next_id)}


def _add(action: str, work: Callable[[Topic, str], Schedule | None], help_: str) -> None:
    """Add a command that changes a schedule and shows what it is then."""

    def change(store: Store, topic: InTopic, name: Name, json_: Json = False) -> None:
        with open_to_write(store, create=False) as opened:
            schedule = work(opened.topic(topic), name)
        if schedule is None:
            raise InvalidArgument("name", name, f"topic {topic} has no such schedule")
        line = "paused" if schedule.next_due_ms is None else f"next at {iso_time(schedule.next_due_ms)}"
        answer(_fields(schedule), line, json_=json_)

    app.command(action, help=f"{help_}\n\n```\nduelog schedules {action} data reminders daily\n```")(change)


_add("pause", Topic.pause_schedule, "Take a schedule's pending occurrence back, until it is resumed.")
_add("resume", Topic.resume_schedule, "Go on with the first occurrence after now.")


@app.command("remove")
def remove_(store: Store, topic: InTopic, name: Name, json_: Json = False) -> None:
    """End a schedule and take its pending occurrence back.

    ```
    duelog schedules remove data reminders daily
    ```
    """
    with open_to_write(store, create=False) as opened:
        removed = opened.topic(topic).remove_schedule(name)
    answer({"removed": removed}, "removed" if removed else "there is no such schedule", json_=json_)
