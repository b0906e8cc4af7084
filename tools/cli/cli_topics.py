"""The commands `duelog topics` and `duelog subscriptions`, each list, create and delete."""

from enum import StrEnum
from itertools import islice
from typing import Annotated

import typer

from ...store.errors import short_names
from ..output import answer, printable
from .options import Json, SubscriptionName, TopicName
from .place import Place, command_at_place

topics = typer.Typer(name="topics", no_args_is_help=True, help="Topics of a store: list, create and delete them.")
subscriptions = typer.Typer(
    name="subscriptions", no_args_is_help=True, help="Subscriptions of a topic: list, create and delete them."
)


class Position(StrEnum):
    """Where a new subscription begins."""

    earliest = "earliest"
    latest = "latest"


@command_at_place(topics, "list")
def list_topics(
    store: Place,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Only of this: tenant/namespace.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    json_: Json = False,
) -> None:
    """List topics; partitions each by itself. With --json by their full names.

    ```
    duelog topics list --server http://localhost:8080 --namespace public/default
    ```
    """
    with store.opened() as there:
        for name in islice(there.topics(namespace), limit):
            answer(name, printable(short_names(name)), json_=json_)


@command_at_place(topics, "create")
def create_topic(
    store: Place,
    topic: TopicName,
    json_: Json = False,
) -> None:
    """Create a topic; one that is there stays as it is.

    ```
    duelog topics create data reminders
    ```
    """
    with store.opened(writes=True) as there:
        created = there.create_topic(topic)
    answer({"created": created}, "created" if created else "it is there already", json_=json_)


@command_at_place(topics, "delete")
def delete_topic(
    store: Place,
    topic: TopicName,
    force: Annotated[
        bool, typer.Option("--force", help="Though producers or consumers use it: they are closed.")
    ] = False,
    json_: Json = False,
) -> None:
    """Delete a topic with its messages and subscriptions. Refused while producers or consumers use it.

    ```
    duelog topics delete data reminders
    ```
    """
    with store.opened(writes=True) as there:
        there.delete_topic(topic, force)
    answer({"deleted": True}, "deleted", json_=json_)


@command_at_place(subscriptions, "list")
def list_subscriptions(
    store: Place,
    topic: TopicName,
    json_: Json = False,
) -> None:
    """List the subscriptions of a topic.

    ```
    duelog subscriptions list data reminders
    ```
    """
    with store.opened() as there:
        for name in there.subscriptions(topic):
            answer(name, printable(name), json_=json_)


@command_at_place(subscriptions, "create")
def create_subscription(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    position: Annotated[Position, typer.Option(help="Where it begins.")] = Position.latest,
    json_: Json = False,
) -> None:
    """Create a subscription; one that is there stays as it is.

    ```
    duelog subscriptions create data reminders mailer --position earliest
    ```
    """
    with store.opened(writes=True) as there:
        created = there.create_subscription(topic, subscription, position.value)
    answer({"created": created}, "created" if created else "it is there already", json_=json_)


@command_at_place(subscriptions, "delete")
def delete_subscription(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    json_: Json = False,
) -> None:
    """Delete a subscription with what it has not acknowledged. A server refuses that while it has consumers.

    ```
    duelog subscriptions delete data reminders mailer
    ```
    """
    with store.opened(writes=True) as there:
        there.delete_subscription(topic, subscription)
    answer({"deleted": True}, "deleted", json_=json_)
