"""The command `duelog receive`."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import Annotated

import typer

from ...store.duration import duration_seconds
from ..asking import asked, received_message
from ..cli.options import Create, Json, Store, SubscriptionName, TopicName
from ..output import answer, message_json, message_line, say


class ConsumerType(StrEnum):
    """How a subscription shares its messages among consumers."""

    exclusive = "exclusive"
    failover = "failover"
    shared = "shared"
    key_shared = "key_shared"


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
    with asked(store, writes=True) as ask:
        wanted = {"topic": topic, "subscription": subscription, "type": type_.value, "create": create}
        attached = ask("subscribe", wanted)
        if attached["created"]:
            say(f"subscription {subscription!r} of {attached['topic']} is new")
        deadline = None if seconds is None else time.monotonic() + seconds
        while received < max_:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            batch = list(map(received_message, ask("receive", {"max_messages": max_ - received, "timeout": left})))
            if not batch:
                break
            for message in batch:
                answer(message_json(message), message_line(message), json_=json_)
            sys.stdout.flush()
            received += len(batch)
            if ack:
                ask("ack", {"positions": [str(message.position) for message in batch]})
        ask("leave", {})
    if received < max_:
        say(f"{received} of {max_} messages were due in time")
