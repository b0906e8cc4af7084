"""The commands that look at a directory and change nothing in it: check, dump."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from ...store.codec.format import Table
from ...store.errors import InvalidArgument
from ..dump import open_environment, partition_directory, rows, wal_rows
from ..output import (
    answer,
    progress_bar,
    say,
    write_json,
    write_line,
)
from ..store_check import check_punctuality, check_store
from ..values import require_store
from .options import Json, Store


def check(
    store: Store,
    deep: Annotated[bool, typer.Option("--deep", help="Read and decode every payload too.")] = False,
    json_: Json = False,
) -> None:
    """Look for damage: every page, checksum of headers and records, and whether all fits. Exit status 1: found some.

    Messages that are overdue, or fired late, by more than a minute are warnings, and do not change the exit status.

    Works beside a writing process, and on a store that would kill its reader: what the pages of a file make
    suspicious is read in a child process, whose death is a finding.

    ```
    duelog check data --deep
    ```
    """
    require_store(store)
    with progress_bar("files", MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        damage = check_store(store, deep=deep, progress=progress)
    findings = damage or check_punctuality(store)
    for finding in findings:
        line = f"{finding.severity}: {finding.code}: {finding.address}: {finding.message}; {finding.advice}"
        answer(asdict(finding), line, json_=json_)
    if not json_:
        say(f"findings: {len(damage):,}")
    if damage:
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
