"""The commands that look at a store and change nothing in it: scheduled, stats, partitions, check, dump."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from typing import Annotated

import typer

from ... import DelayedStore
from ...partitions.timespan import directory_name
from ...stats import SubscriptionStats, TopicStats
from ...store.codec.format import Table
from ...store.errors import InvalidArgument
from ..dump import open_environment, partition_directory, rows, wal_rows
from ..output import (
    answer,
    message_json,
    preview,
    say,
    size_text,
    write_json,
    write_line,
    write_table,
)
from ..store_check import check_store
from ..values import iso_time, open_to_read, require_store, time_ms
from .options import Json, Store, TopicName


def scheduled(
    store: Store,
    topic: TopicName,
    start: Annotated[str | None, typer.Option(metavar="TIME", help="Due at this time or later.")] = None,
    end: Annotated[str | None, typer.Option(metavar="TIME", help="Due before this time.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    json_: Json = False,
) -> None:
    """List messages of a topic that are not due yet, by due time.

    ```
    duelog scheduled data reminders --start 2026-12-01T00:00Z --end 2026-12-02T00:00Z
    ```
    """
    start_ms = None if start is None else time_ms("--start", start)
    end_ms = None if end is None else time_ms("--end", end)
    with open_to_read(store) as opened:
        found = opened.topic(topic).scheduled(start_ms, end_ms, limit + 1)
        shown = list(islice(found, limit))
        more = next(found, None) is not None
    if json_:
        for message in shown:
            write_json(message_json(message))
    else:
        columns = ("message id", "due", "key", "payload")
        cells = [(str(each.message_id), iso_time(each.due_ms), each.key, preview(each.payload)) for each in shown]
        write_table(f"scheduled messages: {len(shown):,}", columns, cells)
    if more:
        say(f"there are more than {limit:,}; --limit shows more of them")


def stats(
    store: Store,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Of this topic; else of the store.")] = None,
    topics: Annotated[int, typer.Option(min=0, help="Of the store: show this many of its topics, by name.")] = 20,
    json_: Json = False,
) -> None:
    """Show the figures of a store and its topics, or of one topic and its subscriptions.

    Pending messages are not due yet; a subscription's backlog is due and not acknowledged.

    ```
    duelog stats data
    duelog stats data reminders
    ```
    """
    with open_to_read(store) as opened:
        if topic is None:
            _store_stats(opened, topics, json_)
        else:
            _topic_stats(opened.topic(topic).stats(), json_)


def _store_stats(store: DelayedStore, topics: int, json_: bool) -> None:
    figures = store.stats()
    shown = [topic.stats() for topic in islice(store.topics(), topics)]
    # What only the process that has the store open for writing knows (its commits, its indexes) is left out.
    summary = {
        "topics": figures.topics,
        "partitions": figures.partitions,
        "pending": figures.pending,
        "set_aside": figures.set_aside,
        "disk_bytes": figures.disk_bytes,
    }
    if json_:
        write_json({**summary, "shown": [_topic_json(each) for each in shown]})
        return
    cells = [*list(summary.items())[:-1], ("disk", size_text(figures.disk_bytes))]
    write_table(str(store.path), ("", ">"), [(name.replace("_", " "), value) for name, value in cells])
    write_line("")
    columns = ("topic", ">pending", ">main log", ">subscriptions", ">largest backlog")
    write_table(
        f"topics: {len(shown):,} of {figures.topics:,}",
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


def _topic_stats(topic: TopicStats, json_: bool) -> None:
    if json_:
        write_json(_topic_json(topic))
        return
    cells = (("pending", topic.pending), ("fired", topic.fired), ("entries of the main log", topic.entries),
             ("ledgers", topic.ledgers), ("size of the main log", size_text(topic.stored_bytes)))  # fmt: skip
    write_table(topic.name, ("", ">"), cells)
    write_line("")
    columns = ("subscription", ">backlog", "mark-delete")
    found = [(each.name, each.backlog, str(each.mark_delete)) for each in topic.subscriptions]
    write_table(f"subscriptions: {len(found):,}", columns, found)


def _topic_json(topic: TopicStats) -> dict[str, object]:
    return {
        "name": topic.name,
        "pending": topic.pending,
        "fired": topic.fired,
        "entries": topic.entries,
        "ledgers": topic.ledgers,
        "stored_bytes": topic.stored_bytes,
        "subscriptions": [_subscription_json(each) for each in topic.subscriptions],
    }


def _subscription_json(subscription: SubscriptionStats) -> dict[str, object]:
    mark_delete = f"{subscription.mark_delete.ledger_id}:{subscription.mark_delete.entry_id}"
    return {"name": subscription.name, "backlog": subscription.backlog, "mark_delete": mark_delete}


def partitions(store: Store, json_: Json = False) -> None:
    """List the time partitions of a store: what is due when, and what it takes on disk.

    A partition is future, current (it has begun), closed (all of it has fired) and then deleted, once the
    subscriptions of every topic in it have acknowledged what they received; references: how many have not.

    ```
    duelog partitions data
    ```
    """
    with open_to_read(store) as opened:
        found = opened.partitions()
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


def check(
    store: Store,
    deep: Annotated[bool, typer.Option("--deep", help="Read and decode every payload too.")] = False,
    json_: Json = False,
) -> None:
    """Look for damage: every page, checksum of headers and records, and whether all fits. Exit status 1: found some.

    Works beside a writing process, and on a store that would kill its reader: what the pages of a file make
    suspicious is read in a child process, whose death is a finding.

    ```
    duelog check data --deep
    ```
    """
    require_store(store)
    findings = check_store(store, deep=deep)
    for finding in findings:
        line = f"{finding.severity}: {finding.code}: {finding.address}: {finding.message}; {finding.advice}"
        answer(asdict(finding), line, json_=json_)
    if not json_:
        say(f"findings: {len(findings):,}")
    if findings:
        raise typer.Exit(1)


def dump(
    store: Store,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this time partition (as `partitions` names it).")
    ] = None,
    table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Only this table: FRONTIER, LEDGER, CURSOR, RUN, ...")
    ] = None,
    ledger: Annotated[int | None, typer.Option(min=0, help="Only the runs of this ledger.")] = None,
    entries: Annotated[bool, typer.Option("--entries", help="Every message and marker of the runs too.")] = False,
    wal: Annotated[bool, typer.Option("--wal", help="The groups of the write-ahead log, and nothing else.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many rows.")] = None,
    json_: Json = False,
) -> None:
    """Print what lies in the store, key by key: the main environment, one time partition, or the write-ahead log.

    A run is what one commit appended to one ledger; markers point from the main log at messages of partitions. What
    is damaged is printed as such. docs/format.md says what the tables and fields are.

    ```
    duelog dump data --table FRONTIER
    duelog dump data --partition 20261201T000000Z --entries
    duelog dump data --wal
    ```
    """
    require_store(store)
    wanted = None if table is None else _table(table)
    if wanted is not None and ledger is not None:
        raise InvalidArgument("--ledger", ledger, "not together with --table: a ledger's rows are its runs")
    with ExitStack() as stack:
        if wal:
            if (partition, table, ledger) != (None, None, None):
                raise InvalidArgument("--wal", True, "not together with --partition, --table or --ledger")
            found = wal_rows(store, entries=entries)
        else:
            path = store / "main" if partition is None else partition_directory(store, partition)
            name = "main" if partition is None else f"partition {partition}"
            environment = stack.enter_context(closing(open_environment(path, name)))
            found = rows(environment, table=wanted, ledger_id=ledger, entries=entries)
        for row in islice(found, limit):
            if json_:
                write_json(row.as_json())
            else:
                write_line(row.as_line())
    sys.stdout.flush()


def _table(name: str) -> Table:
    try:
        return Table[name.upper()]
    except KeyError:
        known = ", ".join(table.name for table in Table)
        raise InvalidArgument("--table", name, f"expected one of {known}") from None
