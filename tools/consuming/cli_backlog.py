"""The commands on one subscription that receive nothing: peek, seek, skip, expire, pause, resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument
from ..asking import asked
from ..cli.options import Json, Store, SubscriptionName, TopicName
from ..output import answer, message_json, message_line
from ..remote.places import Place, Server, Token, Trust, administered
from ..values import iso_time, time_ms


def peek(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    max_: Annotated[int, typer.Option("--max", metavar="N", min=1, help="At most this many messages.")] = 1,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Show the first messages that are due and not acknowledged; nothing is handed out. Of a directory only.

    ```
    duelog peek data reminders mailer --max 10
    ```
    """
    with administered(server or store, token, trust) as there:
        for message in there.peek(topic, subscription, max_):
            answer(message_json(message), message_line(message), json_=json_)


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
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
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
    with administered(server or store, token, trust, writes=True) as there:
        position = there.seek(topic, subscription, target)
    answer({"position": position}, "moved" if position is None else f"at {position}", json_=json_)


def skip(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    max_: Annotated[int, typer.Option("--max", metavar="N", min=1, help="At most this many messages.")],
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Acknowledge the first messages that are due, for one subscription, without receiving them.

    ```
    duelog skip data reminders mailer --max 1
    ```
    """
    with administered(server or store, token, trust, writes=True) as there:
        count = there.skip(topic, subscription, max_)
    answer({"skipped": count}, "skipped" if count is None else f"skipped: {count}", json_=json_)


def expire(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="What has been due for so long: 30m, 2d.")
    ],
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Acknowledge what has been due for long, for one subscription, without receiving it.

    ```
    duelog expire data reminders mailer --older-than 2d
    ```
    """
    seconds = duration_seconds("--older-than", older_than)
    with administered(server or store, token, trust, writes=True) as there:
        count = there.expire(topic, subscription, seconds)
    answer({"expired": count}, "expired" if count is None else f"expired: {count}", json_=json_)


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
    with asked(store, writes=True) as ask:
        wanted = {"topic": topic, "subscription": subscription, "until_ms": until_ms, "seconds": seconds}
        until_ms = ask("pause", wanted)
    line = "paused" if until_ms is None else f"paused until {iso_time(until_ms)}"
    answer({"paused": True, "paused_until_ms": until_ms}, line, json_=json_)


def resume(store: Store, topic: TopicName, subscription: SubscriptionName, json_: Json = False) -> None:
    """Hand out messages of a subscription again.

    ```
    duelog resume data reminders mailer
    ```
    """
    with asked(store, writes=True) as ask:
        ask("resume", {"topic": topic, "subscription": subscription})
    answer({"paused": False}, "resumed", json_=json_)
