"""The pictures of docs/benchmarks.md, drawn from the tables that stand there: python -m benchmarks.pictures

A picture has the rows that it shows in itself (PNG text `rows`), so that a test can hold it to its table. The courses
over time of `steady` have no table: a run of that workload draws them.
"""

import importlib
import json
import re
import struct
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
WITHOUT_TABLE = ("bench-steady.png", "bench-steady-put.png")

_WIDTH_INCHES = 6.0
_DPI = 150
_OURS, _LIMIT, _PEER = "#1b6ca8", "#9aa5ad", "#d98c3f"
_UNITS = {"k": 1e3, "M": 1e6}


class Table(NamedTuple):
    """A table of the page: what its columns are called, and its rows, each a name and the cells as they stand."""

    columns: list[str]
    rows: list[list[str]]


class Picture(NamedTuple):
    """A picture: which section's first table it shows, its title, and whether its bars are logarithmic."""

    file: str
    section: str
    title: str
    log: bool = False


PICTURES = (
    Picture("bench-schedule.png", "Scheduling, batches of 1,000", "Scheduling in batches, messages/s"),
    Picture("bench-schedule_one.png", "One by one", "Scheduling one by one, messages/s"),
    Picture("bench-deliver.png", "Delivering", "Delivering, messages/s"),
    Picture("bench-lateness.png", "Lateness", "Lateness in ms, logarithmic bars", log=True),
    Picture("bench-growth-n.png", "Growth", "Growth with the number of messages"),
)


def table_of(page: str, section: str) -> Table:
    """The first table of a section. Raises ValueError where there is none."""
    found = re.search(rf"^## {re.escape(section)}.*?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    lines = (found.group(1) if found else "").splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith("|")), None)
    if begin is None:
        raise ValueError(f"the section {section!r} has no table")
    cells = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")])
    return Table(cells[0][1:], cells[2:])


def number_of(cell: str) -> float | None:
    """The number that a cell begins with; None: it is empty.

    >>> number_of("5.92 k"), number_of("1,210"), number_of("4.2 ms"), number_of("")
    (5920.0, 1210.0, 4.2, None)
    """
    found = re.match(r"([\d,.]+)(?: ([kM])\b)?", cell)
    return None if found is None else float(found[1].replace(",", "")) * _UNITS.get(found[2] or "", 1)


def rows_in(picture: Path) -> Table:
    """The table that a picture was drawn from. Raises ValueError where it does not say."""
    content, at = picture.read_bytes(), 8
    while at < len(content):
        length, kind = struct.unpack_from(">I4s", content, at)
        name, _, text = content[at + 8 : at + 8 + length].partition(b"\0")
        if kind == b"tEXt" and name == b"rows":
            return Table(**json.loads(text))
        at += length + 12
    raise ValueError(f"{picture.name} does not say what it shows")


def draw(picture: Picture, table: Table, folder: Path) -> Path:
    """Draw a table: a panel for each column, a bar for each row that has a number there; the file."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    panels = [
        (column, [(row[0], row[at]) for row in table.rows if number_of(row[at]) is not None])
        for at, column in enumerate(table.columns, 1)
    ]
    lines = [[textwrap.wrap(name, 26) for name, _ in bars] for _, bars in panels]
    heights = [sum(0.25 + 0.17 * len(each) for each in names) + 0.3 for names in lines]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(_WIDTH_INCHES, 0.7 + sum(heights) + 0.35 * len(panels)), dpi=_DPI, squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, (column, bars), names in zip(axes[:, 0], panels, lines, strict=True):
        _panel(axis, column, bars, ["\n".join(each) for each in names], log=picture.log)
    figure.suptitle(picture.title, fontsize=14)
    file = folder / picture.file
    figure.savefig(file, metadata={"rows": json.dumps(table._asdict()), "Software": None})
    pyplot.close(figure)
    return file


def _panel(axis: Any, column: str, bars: Sequence[tuple[str, str]], names: Sequence[str], *, log: bool) -> None:
    values = [number_of(cell) or 0.0 for _, cell in bars]
    axis.barh(range(len(bars)), values, color=[_colour(name) for name, _ in bars])
    if log:
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 2)
    axis.set_yticks(range(len(bars)), names, fontsize=10.5)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.margins(x=0.3)
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)
    axis.set_title(column, loc="left", fontsize=12.5)
    for place, ((_, cell), value) in enumerate(zip(bars, values, strict=True)):
        shown = cell.partition(" (")[0]
        axis.annotate(shown, (value, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=11)


def _colour(name: str) -> str:
    if "limit:" in name or "the write and fdatasync" in name:
        return _LIMIT
    return _OURS if "duelog" in name or name[:1].isdigit() else _PEER


def main() -> None:
    """Draw all of them anew."""
    page = PAGE.read_text(encoding="utf-8")
    for picture in PICTURES:
        sys.stdout.write(f"{draw(picture, table_of(page, picture.section), PAGE.parent)}\n")


if __name__ == "__main__":
    main()
