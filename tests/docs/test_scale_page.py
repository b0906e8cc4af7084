"""docs/scale.md does what it says: its table is read, its settings are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from duelog.broker.placement.placement import parse_placement
from tests.docs.test_broker_page import shown
from tests.packaging.tree import ROOT

settings = pytest.importorskip("duelog.broker.proxy.proxy_configuration")
configuration = pytest.importorskip("duelog.broker.server.configuration")

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_table_of_the_page_places_namespaces() -> None:
    """As its text says."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    table = parse_placement(text, Path("placement.toml"))
    owners = [table.owner(each) for each in ("acme/orders", "acme/mail", "public/default")]
    assert [each and each.name for each in owners] == ["a", "b", "a"]


def test_the_page_has_every_setting_of_the_proxy_with_its_default() -> None:
    """In one table, and no other."""
    found = {}
    for names, defaults in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|.*\|$", PAGE, re.MULTILINE):
        values = defaults.strip().replace("`", "").split(", ")
        for place, name in enumerate(names.replace("`", "").split(", ")):
            found[name] = values[place] if place < len(values) else ""
    assert found == {configuration.in_file(each.name): shown(each.default) for each in fields(settings.ProxyConfig)}
