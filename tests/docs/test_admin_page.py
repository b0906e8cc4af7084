"""docs/admin.md has every request that is offered."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from duelog.tools.cli.main import app
from tests.broker.admin.rest import administered
from tests.packaging.tree import ROOT

PAGE = (ROOT / "docs" / "admin.md").read_text(encoding="utf-8")
SHOWN = {re.split(r"[?\s]", each)[0].rstrip("/") for each in re.findall(r"`([^`\n]+)`", PAGE)} | {
    word.split("?")[0] for each in re.findall(r"`([^`\n]+)`", PAGE) for word in re.split(r"[\s,]+", each)
}
"""Texts in backticks, and each word of them, without queries."""

ROOMS = ("topic_resource", "subscription_resource", "schedule_resource", "topic_stats")


def test_every_route_of_topics_messages_and_jobs_is_on_the_page(tmp_path: Path) -> None:
    """By the end of its path; parameters may have any name there."""

    async def main() -> list[str]:
        async with administered(tmp_path / "store") as (broker, _, _):
            assert broker.application is not None
            found = []
            for route in broker.application.router.routes:
                if route.handler.__module__.rpartition(".")[2] in ROOMS:
                    found.append(route.path)
            return found

    shown = {re.sub(r"\{\w+\}", "{}", each) for each in SHOWN}
    routes = asyncio.run(main())
    assert len(routes) > 30
    missing = []
    for route in routes:
        ends = [re.sub(r"\{\w+\}", "{}", part) for part in route.strip("/").split("/")]
        tails = {"/".join(ends[at:]) for at in range(len(ends))}
        if not any(each.removeprefix("...").strip("/") in tails for each in shown if each.strip("./{}")):
            missing.append(route)
    assert missing == []


@pytest.mark.parametrize("kind", ["check", "audit", "compaction", "snapshots"])
def test_every_kind_of_job_is_on_the_page(kind: str) -> None:
    """A row each."""
    assert re.search(rf"^\| `{kind}` \|", PAGE, re.MULTILINE)


def test_every_command_that_takes_a_server_is_on_the_page() -> None:
    """In the table of the command line; a group by its name."""
    table = PAGE[PAGE.index("## The command line and a server") :]
    told = set(re.findall(r"[a-z-]+", " ".join(re.findall(r"`([^`\n]+)`", table))))
    commands: dict[str, Any] = getattr(get_command(app), "commands")  # noqa: B009 (typed as one command)
    found = {
        name
        for name, each in commands.items()
        for inner in getattr(each, "commands", {"": each}).values()
        if any("--server" in option.opts for option in inner.params)
    }
    assert len(found) > 10
    assert found <= told


def test_the_page_says_that_a_directory_that_is_open_elsewhere_can_be_changed() -> None:
    """By the control socket of the process that has it."""
    assert "changes it needs `--server`" not in PAGE
    assert "asked through its control socket" in PAGE
