"""The commands `duelog scheduled`, `duelog stats` and `duelog partitions`, of a directory or a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Annotated

import typer

from ...partitions.timespan import directory_name
from ...store.files.directory import DISK_PARTS
from ..cli.options import Json, TopicName
from ..output import disk_rows, message_json, preview, say, size_text, write_json, write_line, write_table
from ..values import iso_time, time_range_ms
from .operations import Administration, ServerRefused, TopicFigures
from .places import Place, Server, Token, Trust, administered


def scheduled(
    store: Place,
    topic: TopicName,
    start: Annotated[
        str | None, typer.Option("--from", "--start", metavar="TIME", help="Due at this time or later.")
    ] = None,
    end: Annotated[str | None, typer.Option("--until", "--end", metavar="TIME", help="Due before this time.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """List messages of a topic that are not due yet, by due time. Of a server: the first 4,096 bytes of each payload.

    ```
    duelog scheduled data reminders --from 2026-12-01T00:00Z --until 2026-12-02T00:00Z
    duelog scheduled --server http://localhost:8080 reminders
    ```
    """
    start_ms, end_ms = time_range_ms("--from", start, "--until", end)
    with administered(server or store, token, trust) as there:
        found = there.scheduled(topic, start_ms, end_ms, limit + 1)
    shown = found[:limit]
    if json_:
        for message in shown:
            write_json(message_json(message))
    else:
        columns = ("message id", "due", "key", "payload")
        cells = [(str(each.message_id), iso_time(each.due_ms), each.key, preview(each.payload)) for each in shown]
        write_table(f"scheduled messages: {len(shown):,}", columns, cells)
    if len(found) > limit:
        say(f"there are more than {limit:,}; --limit shows more of them")


def stats(
    store: Place,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Of this topic; else of the store.")] = None,
    topics: Annotated[int, typer.Option(min=0, help="Of the store: show this many of its topics, by name.")] = 20,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Show the figures of a store and its topics, or of one topic and its subscriptions.

    Pending messages are not due yet; a subscription's backlog is due and not acknowledged. What consumers hold, and
    dead letters, are counted by the process that has the store open, since it opened it.

    ```
    duelog stats data
    duelog stats data reminders
    duelog stats --server http://localhost:8080 reminders
    ```
    """
    with administered(server or store, token, trust) as there:
        if topic is None:
            _store_stats(there, topics, json_)
        else:
            _topic_stats(there.topic_figures(topic), json_)


def _store_stats(there: Administration, topics: int, json_: bool) -> None:
    figures = there.store_figures()
    shown = list(islice(_figures(there), topics))
    if json_:
        write_json({**figures, "shown": [_topic_json(each) for each in shown]})
        return
    cells = {name: value for name, value in figures.items() if not name.startswith("disk_")}
    parts = {part: figures[f"disk_{part}_bytes"] for part in DISK_PARTS}
    about = [(name.replace("_", " "), value) for name, value in cells.items()]
    write_table(there.name, ("", ">"), [*about, *disk_rows(parts)])
    write_line("")
    columns = ("topic", ">pending", ">main log", ">subscriptions", ">largest backlog")
    write_table(
        f"topics: {len(shown):,} of {figures['topics']:,}",
        columns,
        [
            (
                each.name,
                each.pending,
                size_text(each.stored_bytes),
                len(each.subscriptions),
                max((subscription.backlog for subscription in each.subscriptions), default=None),
            )
            for each in shown
        ],
    )


def _figures(there: Administration) -> Iterator[TopicFigures]:
    for topic in there.topics(None):
        try:
            yield there.topic_figures(topic)
        except ServerRefused as refused:
            if refused.status != 404:  # deleted just now
                raise


def _topic_stats(topic: TopicFigures, json_: bool) -> None:
    if json_:
        write_json(_topic_json(topic))
        return
    about = (("pending", topic.pending), ("fired", topic.fired), ("entries of the main log", topic.entries),
             ("ledgers", topic.ledgers), ("size of the main log", size_text(topic.stored_bytes)))  # fmt: skip
    write_table(topic.name, ("", ">"), [cell for cell in about if cell[1] is not None])
    write_line("")
    columns = ("subscription", ">backlog", "mark-delete", ">consumers", ">unacknowledged", ">redelivering",
               ">dead-lettered", "")  # fmt: skip
    cells = [(*each[:-1], "paused" if each.paused else None) for each in topic.subscriptions]
    write_table(f"subscriptions: {len(topic.subscriptions):,}", columns, cells)


def _topic_json(topic: TopicFigures) -> dict[str, object]:
    return topic._asdict() | {"subscriptions": [each._asdict() for each in topic.subscriptions]}


def partitions(
    store: Place,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """List the time partitions of a store: what is due when, and what it takes on disk.

    A partition is future, current (it has begun), closed (all of it has fired) and then deleted, once the
    subscriptions of every topic in it have acknowledged what they received; references: how many have not.

    ```
    duelog partitions data
    duelog partitions --server http://localhost:8080
    ```
    """
    with administered(server or store, token, trust) as there:
        found = there.partitions()
    if json_:
        for each in found:
            write_json({"partition": directory_name(each.start_ms), **asdict(each)})
        return
    columns = ("partition", "end", "state", ">topics", ">messages", ">pending", ">references", ">disk")
    write_table(
        f"partitions: {len(found):,}",
        columns,
        [
            (
                directory_name(each.start_ms),
                iso_time(each.end_ms),
                each.state,
                each.topics,
                each.messages,
                each.pending,
                each.holders if each.state == "closed" else None,
                size_text(each.disk_bytes),
            )
            for each in found
        ],
    )
