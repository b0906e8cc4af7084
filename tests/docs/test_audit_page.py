"""docs/audit.md against the code: every kind of finding, every table, every option."""

from __future__ import annotations

from pathlib import Path

from duelog.tools.audit.audit_tables import CODES, TABLES
from tests.docs.test_metrics_page import rows
from tests.tools.command_line import ok

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")


def test_the_page_lists_every_kind_of_finding() -> None:
    """With severity, meaning and advice, in the order of the code, and no other."""
    expected = [[f"`{name}`", code.severity, code.meaning, code.advice] for name, code in CODES.items()]
    assert rows(PAGE, 4) == expected


def test_the_page_lists_every_table() -> None:
    """And no other."""
    assert [row[0].strip("`") for row in rows(PAGE, 2)] == list(TABLES)


def test_the_page_names_every_option() -> None:
    """The page lists the options of `duelog audit --help`."""
    options = {word.strip("[]`,;:") for word in ok("audit", "--help").split() if word.startswith("--")} - {"--help"}
    assert [option for option in sorted(options) if option not in PAGE] == []
