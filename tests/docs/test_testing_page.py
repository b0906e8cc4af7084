"""docs/testing.md names the wrong engines and failpoints that there are."""

from __future__ import annotations

import re

from tests.docs.test_readme import defined
from tests.packaging.tree import FLOORS, ROOT, modules

SECTION = (
    (ROOT / "docs" / "testing.md")
    .read_text(encoding="utf-8")
    .partition("\n## Wrong engines\n")[2]
    .partition("\n## ")[0]
)
MUTANTS = {name for path in (ROOT / "tests").rglob("*mutants.py") for name in defined(path)}


def test_every_wrong_engine_on_the_page_is_there() -> None:
    """Names with underscores in backticks are functions of the modules of mutants."""
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", SECTION))
    assert len(named) > 30
    assert named - MUTANTS == set()


def test_every_failpoint_on_the_page_is_reached() -> None:
    """Names with a dot in backticks are those that the code says to `reach`."""
    named = set(re.findall(r"`([a-z]+\.[a-z]+)`", SECTION))
    code = "".join(path.read_text(encoding="utf-8") for floor in FLOORS for path in modules(ROOT / floor))
    assert named
    assert named - set(re.findall(r'"([a-z]+\.[a-z]+)"', code)) == set()
