"""docs/scale.md does what it says: its table is read."""

from __future__ import annotations

import re
from pathlib import Path

from duelog.broker.cluster.placement import parse_placement
from tests.packaging.tree import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_table_of_the_page_places_namespaces() -> None:
    """Each namespace has the owner that the text says."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    table = parse_placement(text, Path("placement.toml"))
    owners = [table.owner(each) for each in ("acme/orders", "acme/mail", "public/default")]
    assert [each and each.name for each in owners] == ["a", "b", "a"]
