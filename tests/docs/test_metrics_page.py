"""docs/metrics.md against the instruments in the code; docs/audit.md against its findings, tables and options."""

import re
from pathlib import Path

from duelog.broker.metrics.exposition import ENGINE, METRICS
from duelog.metrics import SPECS
from duelog.tools.audit.audit_tables import CODES, TABLES
from tests.tools.command_line import ok

AUDIT = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def rows(page: str, cells: int) -> list[list[str]]:
    """The rows of a page's tables that have so many cells and begin with a name in backticks."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [row for row in found if len(row) == cells and row[0].startswith("`")]


def test_the_page_lists_every_instrument_with_its_kind_unit_and_attributes() -> None:
    """In the order of the code, and no other."""
    listed = [
        (name.strip("`"), kind, unit.strip("`"), tuple(re.findall(r"`([^`]+)`", attributes)), description)
        for name, kind, unit, attributes, description in rows(PAGE, 5)
    ]
    assert listed == [(spec.name, spec.kind, spec.unit, spec.attributes, spec.description) for spec in SPECS]


def test_the_page_explains_every_attribute() -> None:
    """The second table has each attribute that an instrument has, and no other."""
    explained = {name.strip("`") for name, _ in rows(PAGE, 2)}
    assert explained == {attribute for spec in SPECS for attribute in spec.attributes}


def test_the_page_lists_what_a_broker_exports_beside_the_instruments() -> None:
    """In the order of the code, each with its kind, labels and description."""
    listed = [
        (name.strip("`"), kind, tuple(re.findall(r"`([^`]+)`", labels)), description)
        for name, kind, labels, description in rows(PAGE, 4)
    ]
    assert listed == [tuple(each) for each in METRICS if each not in ENGINE]


def test_names_are_unique() -> None:
    """Two instruments of one name would be merged by an SDK, two metrics by Prometheus."""
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    assert len({each.name for each in METRICS}) == len(METRICS)


def test_the_page_lists_every_kind_of_finding() -> None:
    """With severity, meaning and advice, in the order of the code, and no other."""
    expected = [[f"`{name}`", code.severity, code.meaning, code.advice] for name, code in CODES.items()]
    assert rows(AUDIT, 4) == expected


def test_the_page_lists_every_table() -> None:
    """And no other."""
    assert [row[0].strip("`") for row in rows(AUDIT, 2)] == list(TABLES)


def test_the_page_names_every_option() -> None:
    """The page lists the options of `duelog audit --help`."""
    options = {word.strip("[]`,;:") for word in ok("audit", "--help").split() if word.startswith("--")} - {"--help"}
    assert [option for option in sorted(options) if option not in AUDIT] == []
