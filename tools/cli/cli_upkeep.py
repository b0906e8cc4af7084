"""The commands `duelog backup` and `duelog repair`."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..output import answer, printable, say, size_text, write_json, write_line
from ..repair.repair_store import repair_store
from ..values import open_to_read
from .options import Json, Store


def backup(
    store: Store,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Where to make the copy: an empty directory, or none.")],
    json_: Json = False,
) -> None:
    """Copy a store while it is in use, by this process or another. Restoring is opening the copy.

    The copy is the store as of one instant after the command began. A file named BACKUP, with the checksums of the
    others, is written last: a copy without one is not complete. `duelog check --deep DEST` compares the copy with it,
    as long as no process has opened it for writing.

    ```
    duelog backup data copies/2026-11-21
    ```
    """
    _allow_every_descriptor()
    with open_to_read(store) as opened:
        result = opened.backup(dest)
    if json_:
        write_json({"path": str(result.path), "partitions": result.partitions, "file_bytes": result.file_bytes,
                    "taken_ms": result.taken_ms})  # fmt: skip
        return
    say(f"copied {result.partitions:,} partitions and the main environment, {size_text(result.file_bytes)}")


def _allow_every_descriptor() -> None:
    """Have this process use as many as it may: a backup of what another one writes holds two a partition."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def repair(
    store: Store,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to put what is discarded; else STORE-given-up.jsonl.")
    ] = None,
    json_: Json = False,
) -> None:
    """Make anew what can be told from the rest, discard what cannot, into a file with the reasons: the store is usable.

    Refused while a process has the store open. Make a copy of the store first: what is discarded is not delivered any
    more. The file has a JSON line for each entry or record: environment, ledger, entry, reason, and the bytes as far
    as they can be read; messages that only a damaged write-ahead log had are among them. Exit status 1: something is
    left that cannot be repaired; restore a backup.

    ```
    duelog repair data --output given-up.jsonl
    ```
    """
    report = repair_store(store, output or store.with_name(store.name + "-given-up.jsonl"))
    for action in report.actions:
        answer({"action": action}, printable(action), json_=json_)
    if json_:
        figures = {"lost": report.lost, "again": report.again, "uncancelled": report.uncancelled}
        left = [found.message for found in report.left]
        write_json({"given_up": report.given_up, **figures, "subscriptions": report.subscriptions, "left": left})
    else:
        for found in report.left:
            write_line(printable(f"left: {found.code}: {found.address}: {found.message}"))
        say(
            f"messages lost: {report.lost:,}; that may come again though acknowledged: {report.again:,}, "
            f"though cancelled: {report.uncancelled:,}"
        )
        say(f"discarded: {report.given_up:,}; left: {len(report.left):,}")
    if report.left:
        raise typer.Exit(1)
