"""docs/design.md stays a page that is read in one go, and names what is there."""

from __future__ import annotations

import re

from tests.packaging.tree import FLOORS, ROOT, modules

PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def test_the_design_has_at_most_3500_words() -> None:
    """Why an optimisation is as it is stands at the head of its module; here are shape, protocols, rules, decisions."""
    assert len(PAGE.split()) <= 3_500


def test_the_design_has_no_long_lines() -> None:
    """Rows of tables included: a reason that needs more is a section."""
    assert [line for line in PAGE.splitlines() if len(line) > 120] == []


def test_the_design_names_no_attribute_that_is_not_there() -> None:
    """`Class.name` in backticks: the module that defines the class has the name."""
    sources = [path.read_text(encoding="utf-8") for floor in FLOORS for path in modules(ROOT / floor)]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE)
    assert len(named) > 3
    for owner, name in named:
        (source,) = [source for source in sources if re.search(rf"^class {owner}\b", source, re.MULTILINE)]
        assert re.search(rf"\b{name}\b", source), f"{owner}.{name}"
