"""The commands `duelog topics`, `duelog subscriptions`, `duelog cancel` and `duelog reschedule`.

Of a directory or of a server.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import islice
from typing import Annotated

import typer

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument
from ...store.message import due_at_ms
from ...store.position import MessageId
from ..cli.options import Json, SubscriptionName, TopicName
from ..output import answer, printable, write_json_lines, write_line
from ..values import iso_time, time_ms
from .places import Place, Server, ServerCommand, Token, Trust, administered

topics = typer.Typer(name="topics", no_args_is_help=True, help="Topics of a store: list, create and delete them.")
subscriptions = typer.Typer(
    name="subscriptions", no_args_is_help=True, help="Subscriptions of a topic: list, create and delete them."
)

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the messages, such as 17:3.")]


class Position(StrEnum):
    """Where a new subscription begins."""

    earliest = "earliest"
    latest = "latest"


@topics.command("list", cls=ServerCommand)
def list_topics(
    store: Place,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Only of this: tenant/namespace.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """List topics by their full names; partitions each by itself.

    ```
    duelog topics list --server http://localhost:8080 --namespace public/default
    ```
    """
    with administered(server or store, token, trust) as there:
        for name in islice(there.topics(namespace), limit):
            answer(name, printable(name), json_=json_)


@topics.command("create", cls=ServerCommand)
def create_topic(
    store: Place,
    topic: TopicName,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Create a topic; one that is there stays as it is.

    ```
    duelog topics create data reminders
    ```
    """
    with administered(server or store, token, trust, writes=True) as there:
        created = there.create_topic(topic)
    answer({"created": created}, "created" if created else "it is there already", json_=json_)


@topics.command("delete", cls=ServerCommand)
def delete_topic(
    store: Place,
    topic: TopicName,
    force: Annotated[
        bool, typer.Option("--force", help="Though producers or consumers use it: they are closed.")
    ] = False,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Delete a topic with its messages and subscriptions. Refused while producers or consumers use it.

    ```
    duelog topics delete data reminders
    ```
    """
    with administered(server or store, token, trust, writes=True) as there:
        there.delete_topic(topic, force=force)
    answer({"deleted": True}, "deleted", json_=json_)


@subscriptions.command("list", cls=ServerCommand)
def list_subscriptions(
    store: Place,
    topic: TopicName,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """List the subscriptions of a topic.

    ```
    duelog subscriptions list data reminders
    ```
    """
    with administered(server or store, token, trust) as there:
        for name in there.subscriptions(topic):
            answer(name, printable(name), json_=json_)


@subscriptions.command("create", cls=ServerCommand)
def create_subscription(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    position: Annotated[Position, typer.Option(help="Where it begins.")] = Position.latest,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Create a subscription; one that is there stays as it is.

    ```
    duelog subscriptions create data reminders mailer --position earliest
    ```
    """
    with administered(server or store, token, trust, writes=True) as there:
        created = there.create_subscription(topic, subscription, position.value)
    answer({"created": created}, "created" if created else "it is there already", json_=json_)


@subscriptions.command("delete", cls=ServerCommand)
def delete_subscription(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Delete a subscription with what it has not acknowledged. A server refuses that while it has consumers.

    ```
    duelog subscriptions delete data reminders mailer
    ```
    """
    with administered(server or store, token, trust, writes=True) as there:
        there.delete_subscription(topic, subscription)
    answer({"deleted": True}, "deleted", json_=json_)


def cancel(
    store: Place,
    topic: TopicName,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of the messages, such as 17:3; or --dedup-key.")
    ] = None,
    dedup_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="The pending message of this deduplication key; may be repeated."),
    ] = None,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Cancel delayed messages, so that they are never delivered. Exit status 1: one has fired, or is unknown.

    ```
    duelog cancel --server http://localhost:8080 reminders 17:3 17:4
    duelog cancel data reminders --dedup-key order-17
    ```
    """
    if bool(ids) == bool(dedup_key):
        raise InvalidArgument("ID", ids or [], "expected ids, or --dedup-key; one of the two")
    wanted = [_id(each) for each in ids or []]
    with administered(server or store, token, trust, writes=True) as there:
        if dedup_key:
            named, field = dedup_key, "dedup_key"
            outcomes = ["cancelled" if there.cancel_key(topic, each) else "unknown" for each in named]
        else:
            named, field = ids or [], "message_id"
            outcomes = there.cancel(topic, wanted)
    rows = [{field: each, "outcome": outcome} for each, outcome in zip(named, outcomes, strict=True)]
    _show(rows, [f"{printable(each)}  {outcome}" for each, outcome in zip(named, outcomes, strict=True)], json_)
    if {"fired", "unknown"} & set(outcomes):
        raise typer.Exit(1)


def reschedule(
    store: Place,
    topic: TopicName,
    ids: Ids,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Deliver at this time.")] = None,
    after: Annotated[str | None, typer.Option(metavar="DURATION", help="Deliver this long from now.")] = None,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Give delayed messages another due time; each gets a new id. Exit status 1: for one it is too late, or unknown.

    ```
    duelog reschedule data reminders 17:3 --at 2026-12-24T09:00:00Z
    duelog reschedule --server http://localhost:8080 reminders 17:3 --after 0
    ```
    """
    if (at is None) == (after is None):
        raise InvalidArgument("--at", at, "expected one of the two, --at or --after")
    deliver_at = None if at is None else due_at_ms("--at", time_ms("--at", at), allow_past=False)
    deliver_after = None if after is None else duration_seconds("--after", after)
    wanted = [_id(each) for each in ids]
    with administered(server or store, token, trust, writes=True) as there:
        new_ids = there.reschedule(topic, wanted, deliver_at, deliver_after)
    due = "" if deliver_at is None else f"  due {iso_time(deliver_at)}"
    found = list(zip(ids, new_ids, strict=True))
    rows = [{"message_id": old, "new_message_id": None if new is None else str(new)} for old, new in found]
    _show(rows, [f"{old}  {'too late, or unknown' if new is None else f'{new}{due}'}" for old, new in found], json_)
    if None in new_ids:
        raise typer.Exit(1)


def _id(text: str) -> MessageId:
    try:
        return MessageId.parse(text)
    except InvalidArgument as error:
        raise InvalidArgument("ID", text, error.reason) from error


def _show(rows: list[dict[str, str | None]] | list[dict[str, str]], lines: list[str], json_: bool) -> None:
    if json_:
        write_json_lines(rows)
    for line in lines if not json_ else ():
        write_line(line)
