"""The commands on one subscription: receive its messages, look at them, move it, pause and resume it."""

import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument, short_names
from ..output import answer, message_json, message_line, say
from ..values import iso_time, time_ms
from .options import Create, Json, Store, SubscriptionName, TopicName
from .place import Place, asked, command_at_place

app = typer.Typer()


class ConsumerType(StrEnum):
    """How a subscription shares its messages among consumers."""

    exclusive = "exclusive"
    failover = "failover"
    shared = "shared"
    key_shared = "key_shared"


@app.command()
def receive(
    store: Store,
    topic: TopicName,
    subscription: SubscriptionName,
    max_: Annotated[int, typer.Option("--max", metavar="N", min=1, help="At most this many messages.")] = 1,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="End after this long, 0: with what is due now. [default: wait]"),
    ] = None,
    ack: Annotated[
        bool, typer.Option("--ack/--no-ack", help="Acknowledge what was printed, or leave it to be received again.")
    ] = True,
    type_: Annotated[
        ConsumerType, typer.Option("--type", help="How the subscription's consumers share its messages.")
    ] = ConsumerType.exclusive,
    create: Create = False,
    json_: Json = False,
) -> None:
    """Receive messages as they become due, print each on a line, and acknowledge them.

    A line has the message's id, due time, key and payload; with --json it is a JSON object. A topic or subscription
    that is not there is refused, unless --create makes it: a new subscription gets all that the topic still holds, and
    keeps what comes until it is received or unsubscribed.

    ```
    duelog receive data reminders mailer --create --max 10 --timeout 1m
    ```
    """
    seconds = None if timeout is None else duration_seconds("--timeout", timeout)
    received = 0
    # Without a thread of its own the store does nothing before the subscription is there: what an old ledger still
    # holds is received, and not trimmed first.
    with asked(store, writes=True) as opened:
        attached = opened.subscribe(topic, subscription, type_.value, create)
        if attached["created"]:
            say(f"subscription {subscription!r} of {short_names(attached['topic'])} is new")
        deadline = None if seconds is None else time.monotonic() + seconds
        while received < max_:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            batch = opened.receive(max_ - received, left)
            if not batch:
                break
            for message in batch:
                answer(message_json(message), message_line(message), json_=json_)
            sys.stdout.flush()
            received += len(batch)
            if ack:
                opened.ack([message.position for message in batch])
        opened.leave()
    if received < max_:
        say(f"{received} of {max_} messages were due in time")


@command_at_place(app, "peek")
def peek(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    max_: Annotated[int, typer.Option("--max", metavar="N", min=1, help="At most this many messages.")] = 1,
    json_: Json = False,
) -> None:
    """Show the first messages that are due and not acknowledged; nothing is handed out. Of a directory only.

    ```
    duelog peek data reminders mailer --max 10
    ```
    """
    with store.opened() as there:
        for message in there.peek(topic, subscription, max_):
            answer(message_json(message), message_line(message), json_=json_)


@command_at_place(app, "seek")
def seek(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    to: Annotated[
        str | None, typer.Option(metavar="PLACE", help="earliest, latest, or a position, such as 17:3.")
    ] = None,
    due: Annotated[
        str | None, typer.Option(metavar="TIME", help="The first message that was due then or later.")
    ] = None,
    published: Annotated[
        str | None, typer.Option(metavar="TIME", help="The first message that was sent then or later.")
    ] = None,
    json_: Json = False,
) -> None:
    """Have a subscription go on from another place: everything from there on is delivered (again).

    What is not due yet comes at its time either way; what was trimmed is gone. What consumers hold may be delivered
    twice.

    ```
    duelog seek data reminders mailer --to earliest
    duelog seek data reminders mailer --due 2026-12-01T00:00Z
    ```
    """
    given = [each for each in (to, due, published) if each is not None]
    if len(given) != 1:
        raise InvalidArgument("--to", given, "expected one of --to, --due and --published")
    target: str | Mapping[str, int] = to or ""
    if due is not None:
        target = {"due_ms": time_ms("--due", due)}
    if published is not None:
        target = {"published_ms": time_ms("--published", published)}
    with store.opened(writes=True) as there:
        position = there.seek(topic, subscription, target)
    shown = None if position is None else str(position)  # None: a server does not say
    answer({"position": shown}, "moved" if shown is None else f"at {shown}", json_=json_)


@command_at_place(app, "skip")
def skip(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    max_: Annotated[int, typer.Option("--max", metavar="N", min=1, help="At most this many messages.")],
    json_: Json = False,
) -> None:
    """Acknowledge the first messages that are due, for one subscription, without receiving them.

    ```
    duelog skip data reminders mailer --max 1
    ```
    """
    with store.opened(writes=True) as there:
        count = there.skip(topic, subscription, max_)
    answer({"skipped": count}, "skipped" if count is None else f"skipped: {count}", json_=json_)


@command_at_place(app, "expire")
def expire(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="What has been due for so long: 30m, 2d.")
    ],
    json_: Json = False,
) -> None:
    """Acknowledge what has been due for long, for one subscription, without receiving it.

    ```
    duelog expire data reminders mailer --older-than 2d
    ```
    """
    seconds = duration_seconds("--older-than", older_than)
    with store.opened(writes=True) as there:
        count = there.expire(topic, subscription, seconds)
    answer({"expired": count}, "expired" if count is None else f"expired: {count}", json_=json_)


@app.command()
def pause(
    store: Store,
    topic: TopicName,
    subscription: SubscriptionName,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Go on by itself at this time.")] = None,
    for_: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="Go on by itself after so long.")
    ] = None,
    json_: Json = False,
) -> None:
    """Hand nothing out to any consumer of a subscription until it is resumed; what is due waits, over restarts too.

    ```
    duelog pause data reminders mailer --for 1h30m
    ```
    """
    until_ms = None if until is None else time_ms("--until", until)
    seconds = None if for_ is None else duration_seconds("--for", for_)
    if until is not None and for_ is not None:
        raise InvalidArgument("--for", for_, "--until is given too; one of the two")
    with asked(store, writes=True) as opened:
        until_ms = opened.pause(topic, subscription, until_ms, seconds)
    line = "paused" if until_ms is None else f"paused until {iso_time(until_ms)}"
    answer({"paused": True, "paused_until_ms": until_ms}, line, json_=json_)


@app.command()
def resume(store: Store, topic: TopicName, subscription: SubscriptionName, json_: Json = False) -> None:
    """Hand out messages of a subscription again.

    ```
    duelog resume data reminders mailer
    ```
    """
    with asked(store, writes=True) as opened:
        opened.resume(topic, subscription)
    answer({"paused": False}, "resumed", json_=json_)
