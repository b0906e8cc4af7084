"""Draw the pictures of the page that stand in docs/: `python docs/site/page_pictures.py`, with a Chromium installed.

A store is filled by chance, the same each time, and `duelog ui` shows it.
"""

import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from duelog import DelayedStore, Message

DOCS = Path(__file__).parents[1]
SIZE = {"width": 1180, "height": 800}
PICTURES = {
    "page-overview": ("#/?by=topic", "light", ".u-wrap >> nth=3"),
    "page-partitions": ("#/partitions", "dark", ".tile >> nth=30"),
}
_TOPICS = (("order-timeouts", 900, 1_800), ("reminders", 2_500, 9 * 86_400), ("invoices", 700, 40 * 86_400))
"""Names, messages, and their mean delay in seconds."""


def fill(path: Path) -> None:
    """Make the store."""
    chance = random.Random(7)
    with DelayedStore.open(path) as store:
        for name, count, mean_s in _TOPICS:
            topic = store.topic(name)
            delays = [60 + chance.expovariate(1 / mean_s) for _ in range(count)]
            topic.send_batch([Message(b'{"order": 7}', key="customer-7", deliver_after=delay) for delay in delays])
            topic.subscribe("worker").close()
            topic.send_batch([Message(b"now")] * 3)
        store.topic("reminders").every("daily-digest", cron="0 9 * * *", timezone="Europe/Berlin")


def draw(path: Path) -> None:
    """Draw all pictures of a store."""
    command = [sys.executable, "-m", "duelog.tools.cli.main", "ui", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving, sync_playwright() as playwright:
        assert serving.stdout is not None
        address = re.search(r"http\S+", serving.stdout.readline())
        assert address is not None
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (view, scheme, drawn) in PICTURES.items():
            context = browser.new_context(viewport=SIZE, color_scheme=scheme, timezone_id="Europe/Berlin")  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(address[0])
            page.wait_for_selector("h1")
            page.goto(address[0].partition("#")[0] + view)
            page.wait_for_selector(drawn)
            page.screenshot(path=DOCS / f"{name}.png")
            context.close()
        browser.close()
        serving.terminate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        fill(Path(place) / "store")
        draw(Path(place) / "store")
