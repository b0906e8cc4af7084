"""Output of tools: JSON for programs, tables and lines for people.

Standard output carries the answer and nothing else; whatever else there is to say goes to standard error. Text from
messages is shown with everything that is not printable escaped, so that a payload cannot drive a terminal.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .values import iso_time

if TYPE_CHECKING:
    from ..store.message import ReceivedMessage, ScheduledMessage

_PIPE_COLUMNS = 200
"""Width of a table that goes to a file or a program, where COLUMNS says nothing."""

_PREVIEW_CHARACTERS = 60


def write_json(value: object) -> None:
    """One JSON value, in which paths are texts, on one line of standard output, ASCII only."""
    sys.stdout.write(json.dumps(value, default=os.fspath) + "\n")


def write_json_lines(values: Iterable[object]) -> None:
    """A list: one JSON value on a line for each of its elements."""
    for value in values:
        write_json(value)


def write_line(text: str) -> None:
    """One line of standard output as it is."""
    sys.stdout.write(text + "\n")


AS_JSON: ContextVar[bool] = ContextVar("as_json", default=False)
"""True while a command runs that was given --json."""

in_json = AS_JSON.get


def answer(value: object, line: str) -> None:
    """Print the result of a command: one JSON value for programs, or a line for people."""
    if in_json():
        write_json(value)
    else:
        write_line(line)


@contextmanager
def progress_bar(unit: str, *, time_left: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error while the block runs, where that is a terminal; told what is done, and of how much.

    time_left: show what is left in place of what has passed. For a process that asks for it, lines (`jobs.PROGRESS`).
    """
    from ..upkeep.jobs import PROGRESS

    if PROGRESS in os.environ:
        yield _progress_lines(PROGRESS)
        return
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class OnceKnown(ProgressColumn):
        """A column that is empty until it is known how much there is to do."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self._column = column

        def render(self, task: Task) -> RenderableType:
            return "" if task.total is None else self._column(task)

    shown = Progress(
        TextColumn(unit),
        BarColumn(),
        OnceKnown(DownloadColumn() if unit == "bytes" else MofNCompleteColumn()),
        OnceKnown(TimeRemainingColumn() if time_left else TimeElapsedColumn()),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with shown:
        task = shown.add_task(unit, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _progress_lines(word: str) -> Callable[[int, int], None]:
    said = -1

    def show(done: int, total: int) -> None:
        nonlocal said
        percent = 100 * done // max(total, 1)
        if percent != said:
            said = percent
            sys.stderr.write(f"{word} {done} {total}\n")
            sys.stderr.flush()

    return show


def fill_closed() -> None:
    """Have standard streams that were closed lead nowhere: Python has none, and a file would get their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)  # as they are
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def flush_output() -> None:
    """Have everything written to standard output. Raises OSError, with no file name."""
    sys.stdout.flush()


def drop_output() -> None:
    """Drop what standard output does not take, which would be tried once more when the process ends."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(descriptor, sys.stdout.fileno())
    finally:
        os.close(descriptor)


def say(text: str) -> None:
    """One line of standard error, for the person."""
    sys.stderr.write(f"duelog: {text}\n")


def write_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A title and a table on standard output; columns whose name begins with `>` are aligned to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        header_style="bold", box=None, pad_edge=False, show_header=any(column.strip(">") for column in columns)
    )
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell_text(cell)) for cell in row))
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(file=sys.stdout, width=None if fits else _PIPE_COLUMNS, highlight=False)
    with console.capture() as captured:  # else a closed pipe is exit status 1 to rich
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(table)
    sys.stdout.write(captured.get())


def listing(values: Iterable[object], title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a list: its elements for programs, or a table for people; only the one of the two is read."""
    if in_json():
        write_json_lines(values)
    else:
        write_table(title, columns, rows)


def cell_text(value: object) -> str:
    """A value in a table: integers with thousands separators, None as nothing.

    >>> cell_text(82_000), cell_text(None), cell_text("a")
    ('82,000', '', 'a')
    """
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return printable(str(value))


def printable(text: str) -> str:
    """The text with every character escaped that is not printable.

    >>> printable("a[b]\\x1b[2J")
    'a[b]\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def disk_rows(parts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Rows of a table: the disk space of a store, and what it goes into (`disk_parts`)."""
    ahead = {"wal": " (made ahead)", "attempts": " (made ahead)"}
    of_it = [(f"  of it {part}{ahead.get(part, '')}", size_text(size)) for part, size in parts.items()]
    return [("on disk", size_text(sum(parts.values()))), *of_it]


def size_text(size_bytes: int) -> str:
    """A size for people.

    >>> size_text(40_960), size_text(3 << 30)
    ('40.0 KiB', '3.0 GiB')
    """
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def payload_fields(payload: bytes) -> dict[str, str]:
    """A payload in JSON, as `duelog import` reads it: text where it is UTF-8, else base64."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def payload_of(fields: Mapping[str, Any]) -> bytes:
    """The payload of a message, letter or schedule in an operation's JSON."""
    return base64.b64decode(fields["payload"])


def preview(payload: bytes) -> str:
    """The beginning of a payload for people: text where it is UTF-8, else hexadecimal, and the size of what is cut.

    >>> preview(b"pay"), preview(bytes([0, 255]))
    ('pay', '0x00ff')
    """
    try:
        text = printable(payload.decode())
    except UnicodeDecodeError:
        text = "0x" + payload[: _PREVIEW_CHARACTERS // 2 + 1].hex()
    if len(text) <= _PREVIEW_CHARACTERS:
        return text
    return f"{text[:_PREVIEW_CHARACTERS]}... ({len(payload):,} bytes)"


def message_json(message: ScheduledMessage | ReceivedMessage) -> dict[str, object]:
    """A message in JSON: ids as text, times in epoch ms and as ISO 8601."""
    from ..operations.json_form import to_json
    from ..store.message import ReceivedMessage

    found = to_json(message)
    shown = {name: found[name] for name in ("message_id", "topic")} | payload_fields(message.payload)
    shown |= {name: found[name] for name in ("key", "properties", "due_ms")} | {"due": iso_time(message.due_ms)}
    shown["publish_ms"] = found["publish_ms"]
    optional = {name: found.get(name) for name in ("occurrence", "dedup_key")}
    shown |= {name: value for name, value in optional.items() if value is not None}
    received = ("position", "subscription", "redelivery_count") if isinstance(message, ReceivedMessage) else ()
    return shown | {name: found[name] for name in received}


def message_line(message: ReceivedMessage) -> str:
    """A received message on one line: id, due time, key, payload."""
    key = "-" if message.key is None else printable(message.key)
    return f"{message.message_id}  {iso_time(message.due_ms)}  {key}  {preview(message.payload)}"
