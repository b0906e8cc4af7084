"""docs/design.md stays a page that is read in one go."""

from __future__ import annotations

from tests.packaging.tree import ROOT

PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def test_the_design_has_at_most_3500_words() -> None:
    """Why an optimisation is as it is stands at the head of its module; here are shape, protocols, rules, decisions."""
    assert len(PAGE.split()) <= 3_500


def test_the_design_has_no_long_lines() -> None:
    """Rows of tables included: a reason that needs more is a section."""
    assert [line for line in PAGE.splitlines() if len(line) > 120] == []
