"""docs/admin.md has every request that is offered."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.broker.admin.rest import administered
from tests.packaging.tree import ROOT

PAGE = (ROOT / "docs" / "admin.md").read_text(encoding="utf-8")
SHOWN = {re.split(r"[?\s]", each)[0].rstrip("/") for each in re.findall(r"`([^`\n]+)`", PAGE)} | {
    word.split("?")[0] for each in re.findall(r"`([^`\n]+)`", PAGE) for word in re.split(r"[\s,]+", each)
}
"""What stands in backticks, and each word of it, without queries."""

ROOMS = ("topic_resource", "subscription_resource", "stats_resource", "schedule_resource", "store_resource")


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
