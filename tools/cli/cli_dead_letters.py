"""The commands `duelog dead-letters list | export | requeue | purge`: messages whose deliveries all failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ... import DeadLetter, DelayedStore
from ...store.duration_text import duration_seconds
from ...store.errors import InvalidArgument
from ..output import answer, payload_fields, preview, write_json_lines, write_table
from ..values import iso_time, open_to_read, open_to_write
from .options import Json, Store

app = typer.Typer(
    name="dead-letters",
    no_args_is_help=True,
    help="Messages whose deliveries all failed: list, export, deliver them again, or drop them for good.",
)

OfTopic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="That came from this topic only.")]
OfSubscription = Annotated[
    str | None, typer.Option("--subscription", metavar="SUBSCRIPTION", help="That came from this subscription only.")
]
Reason = Annotated[str | None, typer.Option("--reason", metavar="REASON", help="That died of this only.")]
Key = Annotated[str | None, typer.Option("--key", metavar="KEY", help="That have this key only.")]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="DURATION", help="That have been dead for so long only: 30m, 2d.")
]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of the messages, as `list` shows them, or --all.")
]
All = Annotated[bool, typer.Option("--all", help="All that the other options leave.")]


@app.command("list")
def list_(
    store: Store,
    topic: OfTopic = None,
    subscription: OfSubscription = None,
    reason: Reason = None,
    key: Key = None,
    older_than: OlderThan = None,
    json_: Json = False,
) -> None:
    """List dead letters, oldest first: where they came from, why, and when their first and last delivery failed.

    ```
    duelog dead-letters list data --topic reminders
    ```
    """
    with open_to_read(store) as opened:
        found = list(_held(opened, topic, subscription, reason, key, older_than))
    if json_:
        write_json_lines(_fields(letter) for letter in found)
        return
    rows = [
        (
            str(letter.message_id),
            letter.topic,
            letter.subscription,
            f"{letter.reason} ({letter.attempts} attempts)",
            iso_time(letter.first_ms),
            iso_time(letter.last_ms),
            preview(letter.payload),
        )
        for letter in found
    ]
    write_table("dead letters", ["id", "topic", "subscription", "reason", "first", "last", "payload"], rows)


@app.command()
def export(
    store: Store,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it must not exist.")],
    topic: OfTopic = None,
    subscription: OfSubscription = None,
    reason: Reason = None,
    key: Key = None,
    older_than: OlderThan = None,
    json_: Json = False,
) -> None:
    """Write dead letters to a file, one JSON object a line with all that `list --json` has; they stay where they are.

    ```
    duelog dead-letters export data letters.jsonl --older-than 30d
    ```
    """
    count = 0
    with open_to_read(store) as opened:
        try:
            with file.open("x", encoding="ascii") as lines:
                for letter in _held(opened, topic, subscription, reason, key, older_than):
                    lines.write(json.dumps(_fields(letter)) + "\n")
                    count += 1
        except FileExistsError:
            raise InvalidArgument("FILE", str(file), "there is such a file already") from None
    answer({"exported": count}, f"exported: {count}", json_=json_)


@app.command()
def requeue(
    store: Store,
    ids: Ids = None,
    all_: All = False,
    delay: Annotated[
        str, typer.Option("--after", "--delay", metavar="DURATION", help="Due so long from now: 10m, 1d.")
    ] = "0",
    topic: OfTopic = None,
    subscription: OfSubscription = None,
    reason: Reason = None,
    key: Key = None,
    older_than: OlderThan = None,
    json_: Json = False,
) -> None:
    """Deliver dead letters again, at once or later, to the subscriptions that they came from; all of them or none.

    ```
    duelog dead-letters requeue data --all --topic reminders --after 1h
    ```
    """
    seconds = duration_seconds("--after", delay)
    with open_to_write(store, create=False) as opened:
        letters = _chosen(_held(opened, topic, subscription, reason, key, older_than), ids or [], all_)
        count = opened.requeue_dead_letters(letters, delay=seconds)
    answer({"requeued": count}, f"requeued: {count}", json_=json_)


@app.command()
def purge(
    store: Store,
    ids: Ids = None,
    all_: All = False,
    topic: OfTopic = None,
    subscription: OfSubscription = None,
    reason: Reason = None,
    key: Key = None,
    older_than: OlderThan = None,
    json_: Json = False,
) -> None:
    """Drop dead letters for good; all of those named or none.

    ```
    duelog dead-letters purge data 17:3
    ```
    """
    with open_to_write(store, create=False) as opened:
        letters = _chosen(_held(opened, topic, subscription, reason, key, older_than), ids or [], all_)
        count = opened.purge_dead_letters(letters)
    answer({"purged": count}, f"purged: {count}", json_=json_)


def _held(
    opened: DelayedStore,
    topic: str | None,
    subscription: str | None,
    reason: str | None,
    key: str | None,
    older_than: str | None,
) -> Iterator[DeadLetter]:
    """The letters that the options leave."""
    seconds = None if older_than is None else duration_seconds("--older-than", older_than)
    return opened.dead_letters(topic, subscription, reason=reason, key=key, older_than=seconds)


def _chosen(held: Iterator[DeadLetter], ids: list[str], all_: bool) -> list[DeadLetter]:
    """The letters that a command names. Raises InvalidArgument for an id that none has."""
    if all_ == bool(ids):
        raise InvalidArgument("ID", ids, "expected ids, or --all")
    found = list(held)
    if all_:
        return found
    known = {str(letter.message_id) for letter in found}
    for wanted in ids:
        if wanted not in known:
            raise InvalidArgument("ID", wanted, "no dead letter has this id")
    return [letter for letter in found if str(letter.message_id) in ids]


def _fields(letter: DeadLetter) -> dict[str, object]:
    fields = asdict(letter)
    fields.pop("payload")
    places = {name: str(getattr(letter, name)) for name in ("position", "message_id")}
    return {**fields, **places, **payload_fields(letter.payload)}
