"""The commands `duelog dead-letters list | requeue | purge`: messages whose deliveries all failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from ... import DeadLetter, DelayedStore
from ...store.errors import InvalidArgument
from ..output import answer, payload_fields, preview, write_json, write_table
from ..values import iso_time, open_to_read, open_to_write
from .options import Json, Store

app = typer.Typer(
    name="dead-letters",
    no_args_is_help=True,
    help="Messages whose deliveries all failed: list them, deliver them again, or drop them for good.",
)

OfTopic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="That came from this topic only.")]
OfSubscription = Annotated[
    str | None, typer.Option("--subscription", metavar="SUBSCRIPTION", help="That came from this subscription only.")
]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of the messages, as `list` shows them, or --all.")
]
All = Annotated[bool, typer.Option("--all", help="All that --topic and --subscription leave.")]


@app.command("list")
def list_(store: Store, topic: OfTopic = None, subscription: OfSubscription = None, json_: Json = False) -> None:
    """List dead letters, oldest first: where they came from, why, and when their first and last delivery failed.

    ```
    duelog dead-letters list data --topic reminders
    ```
    """
    with open_to_read(store) as opened:
        found = list(opened.dead_letters(topic, subscription))
    if json_:
        write_json([_fields(letter) for letter in found])
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


def _add(action: str, done: str, work: Callable[[DelayedStore, list[DeadLetter]], int], help_: str) -> None:
    """Add a command that takes letters away and says how many."""

    def take(
        store: Store,
        ids: Ids = None,
        all_: All = False,
        topic: OfTopic = None,
        subscription: OfSubscription = None,
        json_: Json = False,
    ) -> None:
        with open_to_write(store, create=False) as opened:
            count = work(opened, _chosen(opened, ids or [], all_, topic, subscription))
        answer({done: count}, f"{done}: {count}", json_=json_)

    app.command(action, help=help_)(take)


_add(
    "requeue",
    "requeued",
    DelayedStore.requeue_dead_letters,
    """Deliver dead letters again, at once, to the subscriptions that they came from; all of them or none.

    ```
    duelog dead-letters requeue data --all --topic reminders
    ```
    """,
)
_add(
    "purge",
    "purged",
    DelayedStore.purge_dead_letters,
    """Drop dead letters for good; all of those named or none.

    ```
    duelog dead-letters purge data 17:3
    ```
    """,
)


def _chosen(
    opened: DelayedStore, ids: list[str], all_: bool, topic: str | None, subscription: str | None
) -> list[DeadLetter]:
    """The letters that a command names. Raises InvalidArgument for an id that none has."""
    if all_ == bool(ids):
        raise InvalidArgument("ID", ids, "expected ids, or --all")
    found = list(opened.dead_letters(topic, subscription))
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
