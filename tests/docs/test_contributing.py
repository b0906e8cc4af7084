"""CONTRIBUTING.md shows the folders that there are."""

from __future__ import annotations

import re

from tests.packaging.tree import FLOORS, ROOT, modules


def test_the_table_of_folders_has_every_floor_and_room() -> None:
    """Each folder of a floor that holds modules, floors in their order, and no other."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \| ", text, re.MULTILINE)
    folders = {str(module.parent.relative_to(ROOT)) for floor in FLOORS for module in modules(ROOT / floor)}
    assert sorted(rows) == sorted(folders)
    assert [row for row in rows if "/" not in row] == list(FLOORS)
