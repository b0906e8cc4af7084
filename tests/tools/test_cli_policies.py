"""`duelog policies`."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog.store.policies import DELAY_FIELDS
from tests.tools.command_line import json_of, make_store, ok, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store without messages."""
    make_store(tmp_path / "store").close()
    return tmp_path / "store"


def test_what_is_set_is_shown_with_the_scope_that_wins(path: Path) -> None:
    """A topic's view has what is set there, what is in force, and where it comes from."""
    ok("policies", "set", path, "--max-delay", "7d")
    ok("policies", "set", path, "--namespace", "public/default", "--enable", "-t", "1s")
    ok("policies", "set", path, "--topic", "t", "--fixed-delay", "30s")
    shown = json_of("policies", "get", path, "--topic", "t")
    assert {name: shown["effective"][name] for name in DELAY_FIELDS} == {
        "active": True,
        "tick_time_ms": 1_000,
        "max_delivery_delay_ms": 604_800_000,
        "fixed_delivery_delay_ms": 30_000,
    }
    assert shown["set_at"]["max_delivery_delay_ms"] == "store"
    assert shown["set_at"]["tick_time_ms"] == "namespace public/default"
    assert shown["set"]["fixed_delivery_delay_ms"] == 30_000
    assert "namespace public/default" in ok("policies", "get", path, "--topic", "t")
    assert [row["scope"] for row in json_of("policies", "get", path)] == [
        "topic persistent://public/default/t",
        "namespace public/default",
        "store",
    ]


def test_set_leaves_what_it_does_not_name(path: Path) -> None:
    """--disable after --max-delay keeps the maximum; remove takes both."""
    ok("policies", "set", path, "--max-delay", "0.5")
    assert json_of("policies", "set", path, "--disable")["max_delivery_delay_ms"] == 500
    assert json_of("policies", "get", path)[0]["active"] is False
    assert json_of("policies", "remove", path) == {"removed": True}
    assert json_of("policies", "get", path) == []


def test_a_message_over_the_maximum_is_refused_on_the_command_line(path: Path) -> None:
    """The line says the limit and where it was set."""
    ok("policies", "set", path, "--topic", "t", "--max-delay", "1h")
    assert "max_delivery_delay_ms=3600000 set on topic" in refused("send", path, "t", "x", "--after", "2h")


def test_set_without_a_policy_is_refused(path: Path) -> None:
    """Nothing to do is a mistake of whoever typed it."""
    assert "--max-delay" in refused("policies", "set", path)
