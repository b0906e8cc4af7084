"""The command `duelog table`: one table of a store or an export, into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..output import say
from ..values import time_ms
from . import open_tables


def table(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Directory of a store or an export.")],
    name: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="messages, pending, markers, partitions, subscriptions, frontiers, ledgers, acknowledgements, "
            "attempts or dead_letters.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to: a name in .parquet or .arrow.")
    ],
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this column; may be repeated.", show_default=False)
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC", help="Only this topic; may be repeated.", show_default=False)
    ] = None,
    partition: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this partition; may be repeated.", show_default=False)
    ] = None,
    from_: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Only what is due from then on.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only what is due before.")] = None,
) -> None:
    """Write one table to a Parquet or Arrow file, as of one point in time. Needs duelog[arrow].

    The tables are those of Spark's data source (docs/arrow.md): messages of closed partitions, those still to come
    (pending), and what the store knows of them. Works beside a process that has the store open, and changes nothing.

    ```
    duelog table data pending -o pending.parquet --topic reminders --until 2026-12-01T00:00:00Z
    ```
    """
    with open_tables(store, pending=name == "pending") as tables:
        rows = tables.write(
            name,
            output,
            column or None,
            topics=topic or None,
            partitions=partition or None,
            due_from_ms=None if from_ is None else time_ms("--from", from_),
            due_until_ms=None if until is None else time_ms("--until", until),
        )
    say(f"{rows:,} rows of {name} in {output}")
