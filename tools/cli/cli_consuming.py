"""The commands on topics and subscriptions, and on one subscription: receive, peek, seek, skip, expire, pause, resume.

`duelog topics` and `duelog subscriptions` each list, create and delete; `duelog dead-letters` has what could not be
delivered.
"""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument, short_names
from .. import output
from ..values import iso_time, time_ms
from .options import NOTHING, Create, Given, Group, Place, Store, SubscriptionName, TopicName, argument, asked, option

if TYPE_CHECKING:
    from ... import DelayedStore, ReceivedMessage, Subscription

topics = typer.Typer(name="topics", no_args_is_help=True, help="Topics of a store: list, create and delete them.")
subscriptions = typer.Typer(
    name="subscriptions", no_args_is_help=True, help="Subscriptions of a topic: list, create and delete them."
)


class Position(StrEnum):
    """Where a new subscription begins."""

    earliest = "earliest"
    latest = "latest"


@topics.command("list")
def list_topics(
    store: Place,
    namespace: Annotated[
        str | None, option("--namespace", "-n", "NAMESPACE", "Only of this: tenant/namespace.")
    ] = None,
    limit: Annotated[int | None, option("At most this many.", min=1)] = None,
) -> None:
    """List topics; partitions each by itself. With --json by their full names.

    $ duelog topics list --server http://localhost:8080 --namespace public/default
    """
    with store.opened() as there:
        for name in islice(there.topics(namespace), limit and min(limit, sys.maxsize)):
            output.answer(name, output.printable(short_names(name)))


@topics.command("create")
def create_topic(store: Place, topic: TopicName) -> None:
    """Create a topic; one that is there stays as it is.

    $ duelog topics create data reminders
    """
    with store.opened(writes=True) as there:
        created = there.create_topic(topic=topic)
    output.answer({"created": created}, "created" if created else "it is there already")


@topics.command("delete")
def delete_topic(
    store: Place,
    topic: TopicName,
    force: Annotated[bool, option("--force", "Though producers or consumers use it: they are closed.")] = False,
) -> None:
    """Delete a topic with its messages and subscriptions. Refused while producers or consumers use it.

    $ duelog topics delete data reminders
    """
    with store.opened(writes=True) as there:
        there.delete_topic(topic, force)
    output.answer({"deleted": True}, "deleted")


@subscriptions.command("list")
def list_subscriptions(store: Place, topic: TopicName) -> None:
    """List the subscriptions of a topic.

    $ duelog subscriptions list data reminders
    """
    with store.opened() as there:
        for name in there.subscriptions(topic=topic):
            output.answer(name, output.printable(name))


@subscriptions.command("create")
def create_subscription(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    position: Annotated[Position, option("Where it begins.")] = Position.latest,
) -> None:
    """Create a subscription; one that is there stays as it is.

    $ duelog subscriptions create data reminders mailer --position earliest
    """
    with store.opened(writes=True) as there:
        created = there.create_subscription(topic, subscription, position.value)
    output.answer({"created": created}, "created" if created else "it is there already")


@subscriptions.command("delete")
def delete_subscription(store: Place, topic: TopicName, subscription: SubscriptionName) -> None:
    """Delete a subscription with what it has not acknowledged. A server refuses that while it has consumers.

    $ duelog subscriptions delete data reminders mailer
    """
    with store.opened(writes=True) as there:
        there.delete_subscription(topic, subscription)
    output.answer({"deleted": True}, "deleted")


app = typer.Typer()

_AT_ONCE, _MOST_AT_ONCE, _MOST_BYTES = 16, 1_000, 4 << 20
"""Messages that are received and acknowledged together."""


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
    max_: Annotated[int, option("--max", "N", "At most this many messages.", min=1)] = 1,
    timeout: Annotated[
        str | None, option("DURATION", "End after this long, 0: with what is due now. [default: wait]")
    ] = None,
    ack: Annotated[
        bool, option("--ack/--no-ack", "Acknowledge what was printed, or leave it to be received again.")
    ] = True,
    type_: Annotated[
        ConsumerType, option("--type", "How the subscription's consumers share its messages.")
    ] = ConsumerType.exclusive,
    create: Create = False,
) -> None:
    """Receive messages as they become due, print each on a line, and acknowledge them.

    A line has the message's id, due time, key and payload; with --json it is a JSON object. A topic or subscription
    that is not there is refused, unless --create makes it: a new subscription gets all that the topic still holds, and
    keeps what comes until it is received or unsubscribed.

    $ duelog receive data reminders mailer --create --max 10 --timeout 1m
    """
    from ..asking import attached

    seconds = None if timeout is None else duration_seconds("--timeout", timeout)
    received = 0

    def attach(there: "DelayedStore") -> "tuple[Subscription, bool]":
        target = there.topic(topic)
        is_there = target.exists()
        if not (is_there or create):
            raise InvalidArgument("TOPIC", topic, "there is no such topic; --create makes it")
        is_new = not is_there or subscription not in target.subscriptions()
        if is_new and not create:
            reason = f"{target.name} has no such subscription; --create makes it"
            raise InvalidArgument("SUBSCRIPTION", subscription, reason)
        return target.subscribe(subscription, type=type_.value), is_new

    # Without a thread of its own the store does nothing before the subscription is there: what an old ledger still
    # holds is received, and not trimmed first.
    with ExitStack() as stack:
        consumer, is_new = attached(store, stack, attach)
        stack.enter_context(consumer)
        if is_new:
            output.say(f"subscription {subscription!r} of {short_names(consumer.topic)} is new")
        deadline = None if seconds is None else time.monotonic() + seconds
        while received < max_:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            batch = _due(consumer, max_ - received, left)
            if not batch:
                break
            for message in batch:
                output.answer(output.message_json(message), output.message_line(message))
            sys.stdout.flush()
            received += len(batch)
            if ack:
                consumer.ack(batch, durable=True)
        consumer.close(failed=False)
    if received < max_:
        output.say(f"{received} of {max_} messages were due in time")


def _due(consumer: "Subscription", most: int, timeout: float | None) -> "list[ReceivedMessage]":
    """Messages that are due; the more at a time the smaller they are."""
    found = consumer.receive(min(most, _AT_ONCE), timeout)
    if len(found) == _AT_ONCE < most:
        size = sum(len(message.payload) for message in found) // _AT_ONCE + 1
        further = min(most, _MOST_AT_ONCE, _MOST_BYTES // size) - _AT_ONCE
        found += consumer.receive(further, timeout=0) if further > 0 else []
    return found


@app.command("peek")
def peek(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    max_: Annotated[int, option("--max", "N", "At most this many messages.", min=1)] = 1,
) -> None:
    """Show the first messages that are due and not acknowledged; nothing is handed out. Of a directory only.

    $ duelog peek data reminders mailer --max 10
    """
    with store.opened() as there:
        for message in there.peek(topic, subscription, max_):
            output.answer(output.message_json(message), output.message_line(message))


@app.command("seek")
def seek(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    to: Annotated[str | None, option("PLACE", "earliest, latest, or a position, such as 17:3.")] = None,
    due: Annotated[str | None, option("TIME", "The first message that was due then or later.")] = None,
    published: Annotated[str | None, option("TIME", "The first message that was sent then or later.")] = None,
) -> None:
    """Have a subscription go on from another place: everything from there on is delivered (again).

    What is not due yet comes at its time either way; what was trimmed is gone. What consumers hold may be delivered
    twice.

    $ duelog seek data reminders mailer --to earliest
    $ duelog seek data reminders mailer --due 2026-12-01T00:00Z
    """
    given = [each for each in (to, due, published) if each is not None]
    if len(given) != 1:
        raise InvalidArgument("--to", given or None, "expected one of --to, --due and --published")
    target: str | Mapping[str, int] = to or ""
    if due is not None:
        target = {"due_ms": time_ms("--due", due)}
    if published is not None:
        target = {"published_ms": time_ms("--published", published)}
    with store.opened(writes=True) as there:
        position = there.seek(topic, subscription, target)
    shown = None if position is None else str(position)  # None: a server does not say
    output.answer({"position": shown}, "moved" if shown is None else f"at {shown}")


@app.command("skip")
def skip(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    max_: Annotated[int, option("--max", "N", "At most this many messages.", min=1)],
) -> None:
    """Acknowledge the first messages that are due, for one subscription, without receiving them.

    $ duelog skip data reminders mailer --max 1
    """
    with store.opened(writes=True) as there:
        count = there.skip(topic, subscription, max_)
    output.answer({"skipped": count}, "skipped" if count is None else f"skipped: {count}")


@app.command("expire")
def expire(
    store: Place,
    topic: TopicName,
    subscription: SubscriptionName,
    older_than: Annotated[str, option("--older-than", "DURATION", "What has been due for so long: 30m, 2d.")],
) -> None:
    """Acknowledge what has been due for long, for one subscription, without receiving it.

    $ duelog expire data reminders mailer --older-than 2d
    """
    seconds = duration_seconds("--older-than", older_than)
    with store.opened(writes=True) as there:
        count = there.expire(topic, subscription, seconds)
    output.answer({"expired": count}, "expired" if count is None else f"expired: {count}")


@app.command()
def pause(
    store: Store,
    topic: TopicName,
    subscription: SubscriptionName,
    until: Annotated[str | None, option("TIME", "Go on by itself at this time.")] = None,
    for_: Annotated[str | None, option("--for", "DURATION", "Go on by itself after so long.")] = None,
) -> None:
    """Hand nothing out to any consumer of a subscription until it is resumed; what is due waits, over restarts too.

    $ duelog pause data reminders mailer --for 1h30m
    """
    until_ms = None if until is None else time_ms("--until", until)
    seconds = None if for_ is None else duration_seconds("--for", for_)
    if until is not None and for_ is not None:
        raise InvalidArgument("--for", for_, "--until is given too; one of the two")
    with asked(store, writes=True) as opened:
        until_ms = opened.pause(topic, subscription, until_ms, seconds)
    line = "paused" if until_ms is None else f"paused until {iso_time(until_ms)}"
    output.answer({"paused": True, "paused_until_ms": until_ms}, line)


@app.command()
def resume(store: Store, topic: TopicName, subscription: SubscriptionName) -> None:
    """Hand out messages of a subscription again.

    $ duelog resume data reminders mailer
    """
    with asked(store, writes=True) as opened:
        opened.resume(topic=topic, subscription=subscription)
    output.answer({"paused": False}, "resumed")


dead_letters = typer.Typer(
    name="dead-letters",
    no_args_is_help=True,
    help="Messages whose deliveries all failed: list, export, deliver them again, or drop them for good.",
)


_FILTERS = {
    "topic": ("TOPIC", "That came from this topic only."),
    "subscription": ("SUBSCRIPTION", "That came from this subscription only."),
    "reason": ("REASON", "That died of this only."),
    "key": ("KEY", "That have this key only."),
    "older_than": ("DURATION", "That have been dead for so long only: 30m, 2d."),
}
Letters = Annotated[Given, Group({name: Annotated[str | None, option(*row)] for name, row in _FILTERS.items()})]
"""Which letters are meant."""

Ids = Annotated[list[str] | None, argument("[ID]...", "Ids of the messages, as `list` shows them, or --all.")]
All = Annotated[bool, option("--all", "All that the other options leave.")]


@dead_letters.command("list")
def list_(store: Store, letters: Letters = NOTHING) -> None:
    """List dead letters, oldest first: where they came from, why, and when their first and last delivery failed.

    $ duelog dead-letters list data --topic reminders
    """
    with asked(store, writes=False) as opened:
        found = list(opened.ask("dead_letters", _filters(letters)))
    rows = (
        (
            letter["message_id"],
            short_names(letter["topic"]),
            letter["subscription"],
            f"{letter['reason']} ({letter['attempts']} attempts)",
            iso_time(letter["first_ms"]),
            iso_time(letter["last_ms"]),
            output.preview(output.payload_of(letter)),
        )
        for letter in found
    )
    columns = ("id", "topic", "subscription", "reason", "first", "last", "payload")
    output.listing(map(_fields, found), "dead letters", columns, rows)


@dead_letters.command()
def export(
    store: Store,
    file: Annotated[Path, argument("FILE", "The file to write; it must not exist.")],
    letters: Letters = NOTHING,
) -> None:
    """Write dead letters to a file, one JSON object a line with all that `list --json` has; they stay where they are.

    $ duelog dead-letters export data letters.jsonl --older-than 30d
    """
    filters, count = _filters(letters), 0
    with asked(store, writes=False) as opened:
        try:
            out = file.open("x", encoding="ascii")
        except FileExistsError:
            raise InvalidArgument("FILE", str(file), "there is such a file already") from None
        try:
            with out:
                for letter in opened.ask("dead_letters", filters):
                    out.write(json.dumps(_fields(letter)) + "\n")
                    count += 1
        except BaseException:
            with suppress(OSError):
                file.unlink()
            raise
    output.answer({"exported": count}, f"exported: {count}")


@dead_letters.command()
def requeue(
    store: Store,
    ids: Ids = None,
    all_: All = False,
    delay: Annotated[str, option("--after", "--delay", "DURATION", "Due so long from now: 10m, 1d.")] = "0",
    letters: Letters = NOTHING,
) -> None:
    """Deliver dead letters again, at once or later, to the subscriptions that they came from; all of them or none.

    $ duelog dead-letters requeue data --all --topic reminders --after 1h
    """
    filters = _filters(letters)
    wanted = {"delay": duration_seconds("--after", delay), "ids": _chosen(ids or [], all_), **filters}
    with asked(store, writes=True) as opened:
        count = opened.requeue_dead_letters(**wanted)
    output.answer({"requeued": count}, f"requeued: {count}")


@dead_letters.command()
def purge(store: Store, ids: Ids = None, all_: All = False, letters: Letters = NOTHING) -> None:
    """Drop dead letters for good; all of those named or none.

    $ duelog dead-letters purge data 17:3
    """
    wanted = {"ids": _chosen(ids or [], all_), **_filters(letters)}
    with asked(store, writes=True) as opened:
        count = opened.purge_dead_letters(**wanted)
    output.answer({"purged": count}, f"purged: {count}")


def _filters(letters: Given) -> dict[str, Any]:
    older_than = letters["older_than"]
    return {**letters, "older_than": None if older_than is None else duration_seconds("--older-than", older_than)}


def _chosen(ids: list[str], all_: bool) -> list[str] | None:
    """The ids that a command names, None: all. Raises InvalidArgument."""
    if all_ == bool(ids):
        raise InvalidArgument("ID", ids, "expected ids, or --all")
    return None if all_ else ids


def _fields(letter: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in letter.items() if name != "payload"}
    return {**others, **output.payload_fields(output.payload_of(letter))}
