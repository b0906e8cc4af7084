"""Each view of a store with a million pending messages, 10,000 topics and 400 partitions, in a real browser."""

import time
from collections.abc import Callable
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from duelog import DelayedStore, Message
from tests.broker.page.test_browser import Shown, browser, pytestmark, serious, show, store, sync_api

__all__ = ["browser", "pytestmark", "show", "store"]

DAY_MS = 86_400_000
TOPICS, DAYS, BATCHES = 10_000, 400, 100


def fill(store: DelayedStore) -> None:
    """A million messages by chance, and one topic that has somewhat more."""
    chance = np.random.default_rng(1)
    now_ms = time.time_ns() // 1_000_000
    topics = [store.topic(f"shop/mail/topic-{number:05}") for number in range(TOPICS)]
    for _ in range(BATCHES):
        dues = (now_ms + DAY_MS // 4 + chance.integers(0, DAYS * DAY_MS, 10_000)).tolist()
        chosen = chance.integers(0, TOPICS, 10_000).tolist()
        store.send_batch([(topics[at], Message(b"pay", deliver_at=due)) for at, due in zip(chosen, dues, strict=True)])
    topics[7].send_batch([Message(b"pay", deliver_after=3 * 3_600)] * 500)


def test_every_view_of_a_large_store_is_whole_and_kept_by_reload_and_back(
    store: DelayedStore, show: Callable[..., Shown]
) -> None:
    """While it is counted for the first time the page says how far; then all is there. No error on the console."""
    fill(store)
    shown = show()
    shown.go("")
    shown.waits_for("are counted since the store was opened")
    shown.go("topics")
    sync_api.expect(shown.page.locator("tbody tr")).to_have_count(50)
    shown.waits_for("10,000 topics")
    shown.go("")
    sync_api.expect(shown.page.locator(".note")).to_have_count(0, timeout=400_000)
    sync_api.expect(shown.page.locator(".figure-card").first).to_contain_text("in 10,000 topics")
    assert shown.page.locator(".figure-card .figure").first.inner_text() == "1M"
    topic = f"topics/{quote('persistent://shop/mail/topic-00007', safe='')}"
    day_ms = store.calendar()[30].start_ms
    expected = {
        "": "Next 12 months", "?by=topic": "shop/mail/topic-00007", "topics?offset=9950": "9,951 to 10,000 of 10,000",
        "topics?sort=pending&descending=true": "topic-00007", topic: "Subscriptions", f"{topic}/messages": "After",
        "partitions": "Jobs", f"partitions/{day_ms}": "Why it is there",
        "letters": "There are no dead letters.", "connections": "duelog", "workers": "Nobody receives.",
    }  # fmt: skip
    for view, text in expected.items():
        shown.go(view)
        shown.waits_for(text)
        shown.page.reload()
        shown.waits_for(text)
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= 1280, view
    assert serious(shown.page) == []
    shown.go("topics?sort=pending&descending=true&offset=50")
    shown.page.locator("tbody a").first.click()
    shown.waits_for("Policies")
    shown.page.go_back()
    shown.waits_for("51 to 100 of 10,000")
    assert shown.said == []
