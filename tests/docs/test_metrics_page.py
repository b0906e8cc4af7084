"""docs/metrics.md against the instruments in the code."""

from __future__ import annotations

import re
from pathlib import Path

from duelog.metrics import SPECS

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]


def test_the_page_lists_every_instrument_with_its_kind_unit_and_attributes() -> None:
    """In the order of the code, and no other."""
    listed = [row for row in rows() if len(row) == 5 and row[0].startswith("`")]
    assert [(row[0].strip("`"), row[1], row[2].strip("`"), tuple(re.findall(r"`([^`]+)`", row[3])), row[4])
            for row in listed] == [(spec.name, spec.kind, spec.unit, spec.attributes, spec.description)
                                   for spec in SPECS]  # fmt: skip


def test_the_page_explains_every_attribute() -> None:
    """The second table has each attribute that an instrument has, and no other."""
    explained = {row[0].strip("`") for row in rows() if len(row) == 2 and row[0].startswith("`")}
    assert explained == {attribute for spec in SPECS for attribute in spec.attributes}


def test_names_are_unique() -> None:
    """Two instruments of one name would be merged by an SDK."""
    assert len({spec.name for spec in SPECS}) == len(SPECS)
