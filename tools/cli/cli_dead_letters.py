"""The commands `duelog dead-letters list | export | requeue | purge`: messages whose deliveries all failed."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument, short_names
from ..output import answer, payload_fields, payload_of, preview, write_json_lines, write_table
from ..values import iso_time
from .options import NOTHING, Given, Group, Json, Store, grouped
from .place import asked

app = typer.Typer(
    name="dead-letters",
    no_args_is_help=True,
    help="Messages whose deliveries all failed: list, export, deliver them again, or drop them for good.",
)


def _filter(name: str, metavar: str, text: str) -> Any:
    return Annotated[str | None, typer.Option(name, metavar=metavar, help=text)]


Letters = Annotated[
    Given,
    Group(
        topic=_filter("--topic", "TOPIC", "That came from this topic only."),
        subscription=_filter("--subscription", "SUBSCRIPTION", "That came from this subscription only."),
        reason=_filter("--reason", "REASON", "That died of this only."),
        key=_filter("--key", "KEY", "That have this key only."),
        older_than=_filter("--older-than", "DURATION", "That have been dead for so long only: 30m, 2d."),
    ),
]
"""Which letters are meant."""

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of the messages, as `list` shows them, or --all.")
]
All = Annotated[bool, typer.Option("--all", help="All that the other options leave.")]


@app.command("list")
@grouped
def list_(
    store: Store,
    letters: Letters = NOTHING,
    json_: Json = False,
) -> None:
    """List dead letters, oldest first: where they came from, why, and when their first and last delivery failed.

    ```
    duelog dead-letters list data --topic reminders
    ```
    """
    with asked(store, writes=False) as opened:
        found = list(opened.ask("dead_letters", _filters(letters)))
    if json_:
        write_json_lines(_fields(letter) for letter in found)
        return
    rows = [
        (
            letter["message_id"],
            short_names(letter["topic"]),
            letter["subscription"],
            f"{letter['reason']} ({letter['attempts']} attempts)",
            iso_time(letter["first_ms"]),
            iso_time(letter["last_ms"]),
            preview(payload_of(letter)),
        )
        for letter in found
    ]
    write_table("dead letters", ["id", "topic", "subscription", "reason", "first", "last", "payload"], rows)


@app.command()
@grouped
def export(
    store: Store,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it must not exist.")],
    letters: Letters = NOTHING,
    json_: Json = False,
) -> None:
    """Write dead letters to a file, one JSON object a line with all that `list --json` has; they stay where they are.

    ```
    duelog dead-letters export data letters.jsonl --older-than 30d
    ```
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
    answer({"exported": count}, f"exported: {count}", json_=json_)


@app.command()
@grouped
def requeue(
    store: Store,
    ids: Ids = None,
    all_: All = False,
    delay: Annotated[
        str, typer.Option("--after", "--delay", metavar="DURATION", help="Due so long from now: 10m, 1d.")
    ] = "0",
    letters: Letters = NOTHING,
    json_: Json = False,
) -> None:
    """Deliver dead letters again, at once or later, to the subscriptions that they came from; all of them or none.

    ```
    duelog dead-letters requeue data --all --topic reminders --after 1h
    ```
    """
    filters = _filters(letters)
    wanted = {"delay": duration_seconds("--after", delay), "ids": _chosen(ids or [], all_), **filters}
    with asked(store, writes=True) as opened:
        count = opened.requeue_dead_letters(**wanted)
    answer({"requeued": count}, f"requeued: {count}", json_=json_)


@app.command()
@grouped
def purge(
    store: Store,
    ids: Ids = None,
    all_: All = False,
    letters: Letters = NOTHING,
    json_: Json = False,
) -> None:
    """Drop dead letters for good; all of those named or none.

    ```
    duelog dead-letters purge data 17:3
    ```
    """
    wanted = {"ids": _chosen(ids or [], all_), **_filters(letters)}
    with asked(store, writes=True) as opened:
        count = opened.purge_dead_letters(**wanted)
    answer({"purged": count}, f"purged: {count}", json_=json_)


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
    return {**others, **payload_fields(payload_of(letter))}
