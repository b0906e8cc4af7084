"""The pictures of docs/benchmarks.md show what its tables say."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.tree import ROOT

SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "pictures.py"), run_name="pictures")
PAGE, PICTURES, Table = SCRIPT["PAGE"], SCRIPT["PICTURES"], SCRIPT["Table"]
draw, number_of, rows_in, table_of = (SCRIPT[name] for name in ("draw", "number_of", "rows_in", "table_of"))
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.file)
def test_a_picture_shows_the_rows_of_its_table(picture: Any) -> None:
    """Those that it was drawn from are the ones on the page; else `python -m benchmarks.pictures` draws it again."""
    assert rows_in(PAGE.parent / picture.file) == table_of(TEXT, picture.section)


def test_every_picture_of_the_page_is_held_to_a_table_or_has_none() -> None:
    """And no other one lies beside the page."""
    shown = set(re.findall(r"\]\((bench-[\w-]+\.png)\)", TEXT))
    assert shown == {picture.file for picture in PICTURES} | set(SCRIPT["WITHOUT_TABLE"])
    assert shown == {file.name for file in PAGE.parent.glob("bench-*.png")}


def test_a_picture_of_other_numbers_is_told_from_the_table(tmp_path: Path) -> None:
    """A picture carries the rows that it was drawn from."""
    pytest.importorskip("matplotlib")
    table = table_of(TEXT, "Delivering")
    older = Table(table.columns, [[name, "291 k"] for name, _ in table.rows])
    file = draw(PICTURES[2], older, tmp_path)
    assert rows_in(file) == older != table


def test_a_number_in_a_cell_is_read_with_its_unit() -> None:
    """Thousands, millions, and what has neither."""
    cells = ["5.92 k", "9.6 M", "1,210", "4.2 ms", "17.7 MB", "2.2 (1.8 to 2.7)", ""]
    assert [number_of(cell) for cell in cells] == [5_920, 9_600_000, 1_210, 4.2, 17.7, 2.2, None]
