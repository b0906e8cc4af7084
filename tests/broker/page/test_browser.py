"""The page in a real browser: each view, each action by pressing with its effect in the store, nothing executed."""

import csv
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import duelog
from duelog import DelayedStore, Message, ReceivedMessage, Worker
from duelog.broker.operate.client_message import _Single
from duelog.broker.protocol.commands import KeyValue
from duelog.broker.protocol.entry import BATCH
from duelog.broker.protocol.fields import ENCODERS
from duelog.upkeep.jobs import PROGRESS, Jobs
from tests.broker.admin.rest import KEY, token
from tests.broker.operate.test_client_message import entry
from tests.conftest import DAY_MS, present
from tests.disaster.running import module

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
sync_api.expect.set_options(timeout=20_000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(__file__).parents[3] / "broker" / "page" / "front" / "node_modules" / "axe-core" / "axe.min.js"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.skipif(
        not (files("duelog.broker.page") / "assets" / "index.html").is_file(), reason="the page is not built: make page"
    ),
    pytest.mark.xdist_group("browser"),
    pytest.mark.proof,  # minutes: .ci/run has them run where a change touches the page
]

VIEWS = ["", "topics", "letters", "partitions", "connections", "workers"]
ASCII = "".join(map(chr, range(0x20, 0x7F))).replace("/", "")
HOSTILE = [
    "<script>window.hurt=1<script>",
    "<img src=x onerror='window.hurt=1'>",
    "\u202e gnp.exe \u0634\u0645\u0633 \u2066\u200f\u200b\ufeff",
    "a&b=c#d?e%2F \"' %00 ..",
    ASCII,
    "".join(map(chr, range(0xA1, 0x100))),
    "\u65e5\u672c e\u0301 \U0001f600 \ufffe\uffff \U0010ffff",
]
"""Names; together they have every ASCII character that one may have."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, without a window."""
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Shown:
    """A page of a store that this process has open, through `duelog ui`."""

    process: subprocess.Popen[str]

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address, _, self.token = address.partition("#")
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.goto(address)
        page.wait_for_selector("h1")

    def go(self, view: str) -> None:
        """Open a view and wait until what it asked for is there."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#/{view}")
        self.page.wait_for_selector("h1")
        sync_api.expect(self.page.get_by_text("Asking …")).to_have_count(0)

    def press(self, label: str, **fields: str) -> None:
        """Press a button, fill the dialog in, and confirm."""
        self.page.get_by_role("button", name=label, exact=True).first.click()
        dialog = self.page.get_by_role("dialog")
        for name, value in fields.items():
            field = dialog.locator(f"[name={name}]")
            if field.evaluate("each => each.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        dialog.locator("button.strong").click()
        dialog.wait_for(state="detached")

    def text(self) -> str:
        """All that stands in the view."""
        return str(self.page.inner_text("main"))

    def waits_for(self, text: str) -> None:
        """The view has it, within some seconds."""
        sync_api.expect(self.page.locator("main")).to_contain_text(text)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store of this process, which `duelog ui` asks."""
    with DelayedStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def show(browser: Any, store: DelayedStore) -> Iterator[Callable[..., Shown]]:
    """Opens the page of the store."""
    processes, contexts = [], []

    def shown(*options: str, **context: Any) -> Shown:
        command = module("duelog.tools.cli.main", "ui", str(store.path), *options)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        address = present(re.search(r"http\S+", present(process.stdout).readline()))
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}))
        page = Shown(contexts[-1].new_page(), address[0])
        page.process = process
        return page

    yield shown
    for each in contexts:
        each.close()
    for process in processes:
        process.terminate()
        process.communicate(timeout=30)


def filled(store: DelayedStore) -> None:
    """Messages to come, subscriptions, a schedule, dead letters."""
    topic = store.topic("reminders")
    topic.send_batch([Message(b'{"bill": %d}' % at, key="k", deliver_after=3_600 + at * 7_200) for at in range(40)])
    topic.every("digest", cron="0 9 * * *")
    with topic.subscribe("mailer") as mailer:
        for _ in range(2):
            topic.send(b"now")
        for message in mailer.receive(2, timeout=20):
            mailer.dead_letter(message, "ValueError: no such bill")
    for _ in range(3):
        topic.send(b"backlog")
    for number in range(60):
        store.topic(f"shop/mail/t{number:02}").create()


def test_every_view_on_an_empty_and_a_small_store_is_whole(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """No error on the console, nothing serious for axe, in both colours, wide and narrow; nothing is wider than it."""
    shown = show()
    for more in ([], ["topics/reminders", "topics/reminders/messages"]):
        if more:
            filled(store)
        for scheme, width in itertools.product(("light", "dark"), (390, 1280, 1920)):
            shown.page.emulate_media(color_scheme=scheme)
            shown.page.set_viewport_size({"width": width, "height": 850})
            for view in [*VIEWS, *more]:
                shown.go(view)
                assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
                found = serious(shown.page) if more else []
                assert not found, (view, scheme, found)
    assert shown.said == []


def test_the_longest_names_make_no_view_wider_than_it_is(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """Of a topic and a subscription, without a place where a line would break; on a telephone too."""
    topic, subscription = store.topic("t" * 370), "s" * 200
    sent = topic.send(b"x" * 500, key="k" * 500, properties={"p" * 300: "v" * 300}, deliver_after=3_600)
    with topic.subscribe(subscription) as consumer:
        topic.send(b"now")
        consumer.dead_letter(consumer.receive(1, timeout=20)[0], "r" * 500)
    shown, of = show(), f"topics/{topic.name.replace('/', '%2F')}"
    of_workers = f"workers/{topic.name.replace('/', '%2F')}/{subscription}"
    for width, view in itertools.product(
        (390, 1280), ("topics", of, f"{of}/messages", f"{of}/messages/{sent}", "letters", "workers", of_workers)
    ):
        shown.page.set_viewport_size({"width": width, "height": 850})
        shown.go(view)
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
    assert shown.said == []


def test_an_address_that_leads_nowhere_says_so(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """A view that is not there, one that every object of JavaScript has by name, and what is escaped by halves."""
    shown = show()
    for view, said in (("nowhere", "no such view"), ("constructor", "no such view"), ("topics/50%", "does not exist")):
        shown.go(view)
        shown.waits_for(said)
    assert [each for each in shown.said if "Failed to load" not in each] == []


def test_reload_and_back_keep_every_view(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """Each has an address of its own, and needs nothing that came before it."""
    filled(store)
    shown = show()
    page, seen = shown.page, list[tuple[str, str]]()

    def settled() -> tuple[str, str]:
        page.wait_for_selector("h1")
        sync_api.expect(page.get_by_text("Asking …")).to_have_count(0)
        return page.url, page.inner_text("h1")

    for view in [*VIEWS, "topics/reminders", "topics/reminders/messages"]:
        page.goto(f"{shown.address}#/{view}")
        seen.append(settled())
        page.reload()
        assert settled() == seen[-1]
    assert len({heading for _, heading in seen}) > 6
    for before in reversed(seen[:-1]):
        page.go_back()
        assert settled() == before
    assert shown.said == []


def serious(page: Any) -> list[str]:
    """What axe-core finds that keeps somebody out; nothing where it is not installed."""
    if not AXE.is_file():
        return []
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations))"
    )
    return [
        f"{each['id']}: {[node['html'][:200] for node in each['nodes']][:3]}"
        for each in json.loads(found)
        if each["impact"] in ("serious", "critical")
    ]


def test_actions_of_a_subscription_are_done_by_pressing(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """Pause, resume, skip, expire, seek, subscribe, unsubscribe: each asks once, and the store has its effect."""
    filled(store)
    shown, topic = show(), store.topic("reminders")
    mailer = topic.subscription("mailer")
    shown.go("topics/reminders")
    shown.press("Pause mailer")
    assert mailer.stats().paused
    shown.page.wait_for_selector("text=Resume >> nth=0")
    shown.press("Resume mailer")
    assert not mailer.stats().paused
    shown.press("Skip mailer", count="1")
    assert mailer.stats().backlog == 2
    shown.press("Expire mailer", older="0")
    assert mailer.stats().backlog == 0
    shown.press("Seek mailer", to="earliest")
    assert mailer.stats().backlog > 0
    shown.press("Subscribe", subscription="audit", position="latest")
    assert topic.subscriptions() == ["audit", "mailer"]
    shown.waits_for("audit")
    shown.press("Unsubscribe mailer")
    assert topic.subscriptions() == ["audit"]
    shown.press("Pause digest")
    assert [each.paused for each in topic.schedules()] == [True]
    shown.press("Change ttl_ms", value="86400000")
    assert store.effective_policies("reminders").ttl_ms == 86_400_000
    assert shown.said == []


def test_messages_are_sent_found_moved_and_cancelled_by_pressing(
    store: DelayedStore, show: Callable[..., Shown]
) -> None:
    """Leaving a dialog changes nothing and gives the focus back; going back keeps the view, reloading too."""
    filled(store)
    shown, topic = show(), store.topic("reminders")
    shown.go("topics/reminders/messages")
    assert '{"bill": 0}' in shown.text()
    shown.press("Send a message", payload="Grüße", key="k7", delay="60")
    first = next(topic.scheduled())
    assert (first.payload, first.key) == ("Grüße".encode(), "k7")
    shown.waits_for("Grüße")
    cancel = shown.page.get_by_role("button", name=f"Cancel {first.message_id}")
    cancel.click()
    sync_api.expect(shown.page.get_by_role("button", name="Leave it")).to_be_focused()
    shown.page.keyboard.press("Escape")
    sync_api.expect(cancel).to_be_focused()
    shown.page.keyboard.press("Enter")
    shown.page.get_by_role("button", name="Leave it").click()
    assert topic.state(first.message_id) == "scheduled"
    shown.page.locator("tbody a").first.click()
    shown.waits_for("Grüße")
    before = shown.page.url
    shown.page.reload()
    shown.waits_for("Grüße")
    assert shown.page.url == before
    shown.press(f"Reschedule {first.message_id}", at="2031-05-04T10:00")
    assert topic.state(first.message_id) == "cancelled"
    moved = list(topic.scheduled())[-1]
    assert (moved.payload, moved.due_ms) == ("Grüße".encode(), int(moved.due_ms // 60_000 * 60_000))
    shown.waits_for(f"Message {moved.message_id}")
    shown.press(f"Cancel {moved.message_id}")
    assert topic.state(moved.message_id) == "cancelled"
    shown.waits_for("cancelled")
    shown.page.go_back()
    shown.page.go_back()
    shown.waits_for("Messages to come")
    assert shown.said == []


def test_dead_letters_are_sent_back_singly_and_all_by_pressing(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """Their reason stands beside them."""
    filled(store)
    shown = show()
    shown.go("letters")
    assert "ValueError: no such bill" in shown.text()
    (letter, other) = store.dead_letters()
    shown.press(f"Send back {letter.message_id}")
    assert [each.message_id for each in store.dead_letters()] == [other.message_id]
    shown.press("Send all back")
    assert list(store.dead_letters()) == []
    shown.waits_for("There are no dead letters.")
    assert shown.said == []


def test_workers_tell_what_runs_what_failed_and_what_is_tried_again_and_are_paused_by_pressing(
    store: DelayedStore, show: Callable[..., Shown]
) -> None:
    """One of this process and one that is connected alike; the traceback opens by the keyboard, and is text."""
    shown, gate = show(), threading.Event()
    workers = Worker(store, name="w"), Worker(store.path, name="v", connect=True)

    def handle(message: ReceivedMessage) -> None:
        if message.payload == b"bad":
            raise ValueError("<img src=x onerror='window.hurt=1'>")
        gate.wait(60)

    with ExitStack() as stack:
        stack.callback(gate.set)
        for worker in workers:
            worker.task("t", retries=1, backoff=3600)(handle)
            stack.enter_context(worker)
        store.topic("t").send(b"bad")
        running = store.topic("t").send(b"good")
        for name, other in ("wv", "vw"):
            shown.go("workers")
            shown.waits_for("1 of 8")
            shown.page.get_by_role("link", name=name, exact=True).click()
            shown.waits_for(f"{os.getpid()} on ")
            for part in (str(running), "ValueError: <img src=x", "in 59 min", "1 of 8"):
                shown.waits_for(part)
            shown.page.locator("summary").focus()
            shown.page.keyboard.press("Enter")
            sync_api.expect(shown.page.locator("pre")).to_contain_text("raise ValueError(")
            assert serious(shown.page) == []
            shown.press(f"Pause {name}")
            assert store.topic("t").subscription(name).stats().paused
            assert not store.topic("t").subscription(other).stats().paused
            shown.press(f"Resume {name}")
            assert not store.topic("t").subscription(name).stats().paused
    shown.waits_for("No worker tells what it does.")
    assert shown.page.evaluate("window.hurt") is None
    assert shown.said == []


def test_topics_are_searched_sorted_and_paged_and_the_address_keeps_it(
    store: DelayedStore, show: Callable[..., Shown]
) -> None:
    """By the server; an export has all that was found, not the page alone."""
    filled(store)
    shown = show()
    shown.go("topics")
    shown.page.get_by_role("button", name="Pending").click()
    sync_api.expect(shown.page.locator("tbody a").first).to_have_text("reminders")
    shown.page.get_by_role("button", name="After").click()
    shown.waits_for("51 to 62 of 62")
    shown.page.reload()
    shown.waits_for("51 to 62 of 62")
    shown.page.go_back()
    shown.waits_for("1 to 50 of 62")
    with shown.page.expect_download() as download:
        shown.page.get_by_role("button", name="Topics as CSV").click()
    assert len(Path(download.value.path()).read_text(encoding="utf-8").splitlines()) == 63
    shown.page.get_by_label("Search topics").fill("T5")
    shown.waits_for("10 of 62 topics")
    assert "search=T5" in shown.page.url
    assert shown.said == []


def test_hostile_names_are_shown_in_every_view_and_not_executed(
    store: DelayedStore, show: Callable[..., Shown]
) -> None:
    """HTML, script, right to left, and every character that a name may have; links lead there, and buttons work.

    Of topics, subscriptions, keys, properties, reasons of dead letters; in addresses, also after a reload.
    """
    shown, consumers = show(), {}
    for name in HOSTILE:
        topic = store.topic(f"public/default/{name}")
        consumers[topic.name] = topic.subscribe(name)
        topic.send(b"x", key=name, properties={name: name})
        consumers[topic.name].dead_letter(consumers[topic.name].receive(1, timeout=20)[0], name)
        topic.send(name.encode(), deliver_after=3_600, key=name, properties={name: name})
    ordered = sorted(consumers)
    for at, full in enumerate(ordered):
        name, topic = full.removeprefix("persistent://public/default/"), store.topic(full)
        shown.go(f"topics/{quote(full, safe='')}")
        assert shown.page.text_content("h1") == name
        shown.press(f"Pause {name}")
        assert topic.subscription(name).stats().paused
        shown.page.get_by_role("link", name="Messages", exact=True).click()
        shown.page.locator("tbody a").first.click()
        shown.page.wait_for_selector("pre")
        shown.page.reload()
        shown.page.wait_for_selector("pre")
        assert shown.page.text_content("pre") == name
        assert shown.page.locator("dd").all_text_contents().count(name) == 2  # the key, and the value of a property
        shown.go("workers")
        shown.page.locator(f"tbody tr:nth-child({at + 1}) a").first.click()
        shown.waits_for("No worker tells")
        assert shown.page.text_content("h1") == name
        shown.go(f"letters?topic={quote(full, safe='')}")
        assert shown.page.locator("tbody tr").count() == 1
        shown.press(f"Send back {next(store.dead_letters(full)).message_id}")
        assert not list(store.dead_letters(full))
    shown.go("topics")
    assert set(HOSTILE) < set(shown.page.locator("tbody a").all_text_contents())
    assert serious(shown.page) == []
    assert shown.page.evaluate("window.hurt") is None
    assert shown.said == []


def test_hostile_payloads_are_shown_and_not_executed(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """HTML, script, right to left, binary, 5 MiB of either, JSON that is deep, none at all."""
    topic, shown = store.topic("t"), show()
    html = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script>"
    large, deep = (html * (5 << 20))[: (5 << 20) - 64], "[" * 5_000 + "]" * 5_000
    payloads = [html, "\u202egnp.exe \u0634\u0645\u0633", large, deep, ""]
    ids = [topic.send(text.encode(), deliver_after=60) for text in payloads]
    binary = topic.send((bytes(range(256)) * (20 << 10))[:-64], deliver_after=60)
    shown.go("topics/t/messages")
    shown.waits_for("(5.0 MiB, not text)")
    shown.waits_for("(empty)")
    for each, text in zip(ids, payloads, strict=True):
        shown.go(f"topics/t/messages/{each}")
        if text is not deep:
            assert shown.page.text_content("pre") == text[: 1 << 18]
    shown.go(f"topics/t/messages/{binary}")
    assert "00000010  10 11 12" in shown.page.inner_text("pre")
    assert shown.page.evaluate("window.hurt") is None
    assert shown.said == []


def test_who_may_only_look_sees_no_buttons_that_change(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """And another token, or none, shows nothing."""
    filled(store)
    shown = show("--only-look")
    for view in ("topics", "topics/reminders", "topics/reminders/messages", "letters", "partitions"):
        shown.go(view)
        assert shown.page.locator("button.danger").count() == 0
        for label in ("Send a message", "Create a topic", "Subscribe", "Check"):
            assert shown.page.get_by_role("button", name=label, exact=True).count() == 0
    assert "may only look" in shown.page.inner_text("header")
    shown.page.evaluate("sessionStorage.clear()")
    shown.page.reload()
    shown.page.get_by_label("Token").fill("wrong")
    shown.page.get_by_role("button", name="Enter").click()
    shown.page.wait_for_selector("text=another start")
    shown.page.get_by_label("Token").fill(shown.token.removeprefix("token="))
    shown.page.get_by_role("button", name="Enter").click()
    shown.page.wait_for_selector("nav")


def test_the_page_changes_as_the_store_does(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """What is sent while it is open is counted; that a server has gone is told."""
    store.topic("t").create()
    shown = show()
    shown.go("topics/t")
    store.topic("t").send_batch([Message(b"", deliver_after=600)] * 7)
    sync_api.expect(shown.page.locator(".figure-card .figure").first).to_have_text("7")
    shown.process.terminate()
    shown.page.wait_for_selector("text=No answer")


def test_jobs_are_started_followed_and_read_by_pressing(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """Progress in per cent that a reload keeps, the end said; the audit's page in a frame that runs nothing."""
    filled(store)
    store.topic("public/default/<img src=x onerror='top.hurt=1'>").send(b"x", deliver_after=600)
    ready = store.path.parent / "ready"
    os.mkfifo(ready)
    program = f"import sys; print('{PROGRESS} 37 100', file=sys.stderr, flush=True); open({str(ready)!r}).read()"
    store._jobs = Jobs(store.path, store.clock.now_ms, [sys.executable, "-c", program])
    shown = show()
    shown.go("partitions")
    shown.press("Compact")
    shown.waits_for("37 %")
    shown.page.reload()
    shown.waits_for("37 %")
    shown.press("Cancel job 1")
    shown.waits_for("cancelled")
    shown.press("Check")
    shown.waits_for("37 %")
    ready.write_bytes(b"")  # it ends, and wrote nothing
    sync_api.expect(shown.page.locator(".said")).to_have_text("Check: done")
    store._jobs = Jobs(store.path, store.clock.now_ms)
    shown.press("Audit")
    shown.page.get_by_role("link", name="Result of job 1").click()
    frame = shown.page.frame_locator("iframe")
    sync_api.expect(frame.get_by_role("heading", name="At a glance")).to_be_visible(timeout=30_000)
    assert frame.locator("main").evaluate("each => getComputedStyle(each).maxWidth") != "none", "it has its style"
    assert "onerror" in frame.locator("body").inner_text()
    shown.page.reload()
    sync_api.expect(frame.get_by_role("heading", name="At a glance")).to_be_visible()
    assert shown.page.evaluate("window.hurt") is None
    shown.press("Save snapshots")
    assert serious(shown.page) == []
    assert shown.said == []


def test_bars_are_told_apart_by_topic_where_asked(store: DelayedStore, show: Callable[..., Shown]) -> None:
    """The largest by their names and the rest, in the picture's key and its table; the address keeps it."""
    filled(store)
    for number in range(6):
        store.topic(f"shop/mail/t{number:02}").send_batch([Message(b"", deliver_after=900)] * (number + 1))
    shown = show()
    shown.go("")
    shown.page.get_by_role("button", name="By topic").click()
    hour = shown.page.locator("figure").first
    sync_api.expect(hour.locator(".key")).to_contain_text("shop/mail/t05")
    sync_api.expect(hour.locator(".key")).to_contain_text("Other topics")
    shown.page.reload()
    sync_api.expect(hour.locator(".key li")).to_have_count(6)
    hour.get_by_text("As a table").click()
    with shown.page.expect_download() as download:
        hour.get_by_role("button", name="as CSV").click()
    rows = list(csv.reader(Path(download.value.path()).read_text(encoding="utf-8").splitlines()))
    sums = {name: sum(int(row[at]) for row in rows[1:]) for at, name in enumerate(rows[0])}
    assert {name[-3:]: sums[name] for name in rows[0][1:]} == {
        "t05": 6,
        "t04": 5,
        "t03": 4,
        "t02": 3,
        "t01": 2,
        "ers": 1,
    }
    assert serious(shown.page) == []
    shown.page.get_by_role("button", name="Together").click()
    sync_api.expect(shown.page.locator(".key")).to_have_count(0)
    assert shown.said == []


def test_the_first_load_weighs_at_most_300_kb_and_nothing_comes_from_elsewhere(
    store: DelayedStore, show: Callable[..., Shown]
) -> None:
    """Uncompressed; what is asked later is the store's figures."""
    shown = show()
    loaded: dict[str, int] = {}
    shown.page.on("requestfinished", lambda request: loaded.update({request.url: request.sizes()["responseBodySize"]}))
    shown.go("")
    shown.waits_for("Next hour")
    assert all(url.startswith((shown.address, "data:", "about:")) for url in loaded)
    assert {url.rpartition("/")[2] for url in loaded} >= {"app.js", "app.css"}
    assert 50_000 < sum(loaded.values()) <= 300_000


SETTINGS = f"""
authenticationProviders = ["token"]
tokenSecretKey = "{KEY}"
authorizationEnabled = true
superUserRoles = ["root"]
viewerRoles = ["guest"]
bindAddress = "127.0.0.1"
"""

NAMES = ("persistent://a/b/t", "persistent://a/c/t")


@contextmanager
def served(folder: Path, port: int = 0, settings: str = "") -> Iterator[str]:
    """`duelog serve` of a store in a folder, with its page at a port; the page's address."""
    (folder / "broker.toml").write_text(settings)
    options = {"host": "127.0.0.1", "port": 0, "http": port, "config": folder / "broker.toml"}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = module("duelog.tools.cli.main", "serve", str(folder / "store"), *given)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            address = re.search(r"http\S+", process.stdout.readline())
            assert address is not None
            yield address[0] + "/"
        finally:
            process.terminate()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Shown]]:
    """Opens the page at an address, as a role."""
    with ExitStack() as stack:

        def shown(address: str, role: str | None = None) -> Shown:
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            stack.callback(context.close)
            return Shown(context.new_page(), address if role is None else f"{address}#token={token(role)}")

        yield shown


def change(address: str, method: str, path: str, body: Any, role: str = "root") -> None:
    """Change something of the broker by REST."""
    headers = {"Authorization": f"Bearer {token(role)}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{address}admin/v2/{path}", json.dumps(body).encode(), headers=headers, method=method
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A broker that asks for tokens: `desk` may consume in a/b, `web` produce there, `chief` administers tenant a.

    Each of the namespaces a/b and a/c has a topic with messages, a subscription and a dead letter.
    """
    folder = tmp_path_factory.mktemp("secured")
    with served(folder, settings=SETTINGS) as address, duelog.connect(folder / "store") as store:
        change(address, "PUT", "tenants/a", {"adminRoles": ["chief"], "allowedClusters": ["standalone"]})
        for namespace in ("a/b", "a/c"):
            change(address, "PUT", f"namespaces/{namespace}", {})
        change(address, "POST", "namespaces/a/b/permissions/desk", ["consume"])
        change(address, "POST", "namespaces/a/b/permissions/web", ["produce"])
        for name in NAMES:
            topic = store.topic(name)
            with topic.subscribe("mailer") as mailer:
                topic.send(b"now")
                mailer.dead_letter(mailer.receive(1, timeout=20)[0], "no")
            topic.send(b"later", deliver_after=3_600)
        yield address, folder / "store"


def places(shown: Shown) -> list[str]:
    """The views that one can go to."""
    shown.page.wait_for_selector("nav[aria-label=Views] a")
    return list(shown.page.locator("nav[aria-label=Views] a").all_inner_texts())


def buttons(shown: Shown) -> set[str]:
    """Labels of the buttons of the view, without exports and pages."""
    found = shown.page.locator("main button:not(.plain):not(.sort):not(.pages button)").all_inner_texts()
    return set(found) - {"Look up", "JSON", "Text", "Hex"}


def status(shown: Shown, operation: str, **given: Any) -> int:
    """What the server answers to the page's own browser and token."""
    script = """([path, body, token]) => fetch(path, {method: "POST", body: JSON.stringify(body), headers: {
        "Content-Type": "application/json", Authorization: `Bearer ${token}`}}).then((answer) => answer.status)"""
    path = f"duelog/v1/operations/{operation}"
    return int(shown.page.evaluate(script, [path, given, shown.token.removeprefix("token=")]))


TOPIC, OTHER = (f"topics/{quote(name, safe='')}" for name in NAMES)
ALL = ["Overview", "Topics", "Dead letters", "Partitions", "Connections", "Workers"]
SOME = ["Topics", "Dead letters", "Workers"]
SENDING = {"Send a message", "Reschedule", "Cancel"}
ADMINISTERING = {"Send a message", "Change", "Delete"}
CONSUMING = {"Pause", "Skip", "Expire", "Seek", "Unsubscribe", "Subscribe"}


@pytest.mark.parametrize(
    ("role", "seen", "of_topic", "of_messages", "refused"),
    [
        ("root", ALL, {*ADMINISTERING, *CONSUMING}, SENDING, []),
        ("guest", ALL, set(), set(), [("pause", 0), ("send", 0)]),
        ("chief", SOME, {*ADMINISTERING, *CONSUMING}, SENDING, [("overview", None), ("tick", None)]),
        ("desk", SOME, CONSUMING, set(), [("send", 0), ("pause", 1), ("overview", None)]),
        ("web", ["Topics"], {"Send a message"}, SENDING, [("pause", 0), ("send", 1)]),
    ],
)
def test_a_role_sees_what_it_may_do_and_is_refused_the_rest(
    secured: tuple[str, Path],
    look: Callable[..., Shown],
    role: str,
    seen: list[str],
    of_topic: set[str],
    of_messages: set[str],
    refused: list[tuple[str, int | None]],
) -> None:
    """Views, buttons, lists: of its namespace alone where it has no more; the server refuses what is not shown."""
    shown = look(secured[0], role)
    assert places(shown) == seen
    shown.go("")
    shown.page.wait_for_url(f"{shown.address}#/{'' if 'Overview' in seen else 'topics'}")
    shown.go(TOPIC)
    shown.waits_for("mailer")
    assert buttons(shown) == of_topic
    shown.go(f"{TOPIC}/messages")
    shown.waits_for("later")
    assert buttons(shown) == of_messages
    shown.go("topics")
    shown.waits_for("a/b/t")
    if role in ("desk", "web"):
        assert "a/c" not in shown.page.inner_text("body")
        assert "2 topics" in shown.text()
        shown.go(OTHER)
        shown.waits_for(f"{role} may not look at this in a/c.")
        assert buttons(shown) == set()
    if "Dead letters" in seen:
        shown.go("letters")
        shown.waits_for("a/b/t")
        assert buttons(shown) == (set() if role == "guest" else {"Send back", "Drop", "Send all back", "Drop all"})
        assert serious(shown.page) == []
    assert shown.said == []
    given = {"send": {"payload": ""}, "pause": {"subscription": "mailer"}}
    for operation, at in refused:
        where = {} if at is None else {"topic": NAMES[at]}
        assert status(shown, operation, **where, **given.get(operation, {})) == 403, operation


def test_a_role_of_one_namespace_works_in_it_and_changes_nothing_else(
    secured: tuple[str, Path], look: Callable[..., Shown]
) -> None:
    """It drops all dead letters, which are those of its namespace; who has several chooses one, by the keyboard too."""
    shown = look(secured[0], "desk")
    with duelog.connect(secured[1]) as store:
        shown.go("letters")
        shown.press("Drop all")
        shown.waits_for("There are no dead letters.")
        assert [letter.topic for letter in store.dead_letters()] == [NAMES[1]]
        shown.go(TOPIC)
        shown.press("Pause mailer")
        assert [store.topic(name).subscription("mailer").stats().paused for name in NAMES] == [True, False]
        shown.press("Resume mailer")
    chief = look(secured[0], "chief")
    chief.go("topics")
    chief.waits_for("a/b/t")
    chief.page.get_by_label("Namespace").select_option("a/c")
    chief.waits_for("a/c/t")
    assert "namespace=a%2Fc" in chief.page.url
    assert "a/b/t" not in chief.text()
    chief.press("Create a topic", topic="a/c/made")
    chief.waits_for("a/c/made")
    assert shown.said == chief.said == []


def test_who_has_no_rights_is_told_so(secured: tuple[str, Path], look: Callable[..., Shown]) -> None:
    """A role that is granted nothing sees no view."""
    assert "nobody may not look at this in any namespace." in look(secured[0], "nobody").text()


def test_a_server_that_goes_away_and_returns_at_its_address_is_told_and_the_view_is_kept(
    tmp_path: Path, look: Callable[..., Shown]
) -> None:
    """The address, what was typed, the focus stay; what changed meanwhile is there; an action says why it failed."""
    with served(tmp_path) as address:
        with duelog.connect(tmp_path / "store") as store:
            store.topic("t").subscribe("s").close()
            kept = store.topic("t").send(b"kept", deliver_after=3_600)
        shown, one = look(address), look(address)
        shown.go("topics/t/messages?from=2020-01-01T00:00")
        shown.waits_for("kept")
        one.go(f"topics/t/messages/{kept}")
        one.waits_for("kept")
        before = shown.page.url
        field = shown.page.get_by_placeholder("17:3")
        field.fill("1:2")
    lost = "No answer; trying again"
    for page in (shown, one):
        sync_api.expect(page.page.get_by_role("status").filter(has_text=lost)).to_be_visible()
        assert "kept" in page.text()
    shown.page.get_by_role("button", name=f"Cancel {kept}").click()
    shown.page.get_by_role("dialog").locator("button.strong").click()
    shown.page.wait_for_selector(".said:has-text('the server does not answer')")
    shown.page.keyboard.press("Escape")
    field.focus()
    assert serious(shown.page) == []
    with DelayedStore.open(tmp_path / "store") as store:
        assert store.topic("t").state(kept) == "scheduled"
        store.topic("t").send(b"came", deliver_after=7_200)
        store.topic("t").cancel(kept)
    with served(tmp_path, int(address.rstrip("/").rpartition(":")[2])) as again:
        assert again == address
        shown.waits_for("came")
        one.waits_for("cancelled")
        for page in (shown, one):
            sync_api.expect(page.page.get_by_role("status").filter(has_text="Live")).to_be_visible()
        assert "kept" not in shown.text()
        assert shown.page.url == before
        sync_api.expect(field).to_have_value("1:2")
        sync_api.expect(field).to_be_focused()
        shown.press("Send a message", payload="after", key="", delay="60")
        shown.waits_for("after")
    assert all("ERR_" in each for each in shown.said), shown.said


def test_messages_of_pulsar_clients_are_shown_as_they_were_sent(tmp_path: Path, look: Callable[..., Shown]) -> None:
    """Key, properties and payload of one, and of each of a batch, in lists, alone, and as dead letters; all as text."""
    hurt = "<img src=x onerror='window.hurt=1'>"
    single = entry(hurt.encode(), partition_key=f"key {hurt}", properties=[KeyValue("shop", f"7 {hurt}")], event_time=1)
    content = b""
    for number in range(3):
        body = b'{"bill": %d}' % number
        head = ENCODERS[_Single](_Single(len(body), [KeyValue("number", str(number))], partition_key=f"of-{number}"))
        content += len(head).to_bytes(4, "big") + head + body
    batch = entry(zlib.compress(content), flags=BATCH, num_messages_in_batch=3, compression=2,
                  uncompressed_size=len(content))  # fmt: skip
    with served(tmp_path) as address, duelog.connect(tmp_path / "store", name="seeder") as store:
        topic = store.topic("t")
        ids = [topic.send(each, deliver_after=3_600) for each in (single, batch, entry(b"x", encryption_keys=[b"key"]))]
        with topic.subscribe("s") as consumer:
            topic.send(batch)
            consumer.dead_letter(consumer.receive(1, timeout=20)[0], "no")
        shown = look(address)
        shown.go("topics/t/messages")
        for text in (f"key {hurt}", hurt, '{"bill": 0} (and 2 messages)', "of-0", "(encrypted)"):
            shown.waits_for(text)
        shown.go(f"topics/t/messages/{ids[0]}")
        for text in (f"key {hurt}", f"7 {hurt}", "producer p, its number 7", "Event time"):
            shown.waits_for(text)
        assert shown.page.inner_text("pre") == hurt
        shown.go(f"topics/t/messages/{ids[1]}")
        shown.waits_for("compressed by ZLIB")
        shown.waits_for("number=2")
        link = shown.page.get_by_role("link", name="3", exact=True)
        link.focus()
        shown.page.keyboard.press("Enter")
        shown.waits_for("Message 3 of 3")
        assert '"bill": 2' in shown.page.inner_text("pre")
        assert shown.page.url.endswith("?part=2")
        assert serious(shown.page) == []
        shown.go(f"topics/t/messages/{ids[2]}")
        shown.waits_for("It is shown as it is stored, encrypted.")
        shown.go("connections")
        for text in (f"duelog {duelog.__version__}", "seeder", "program", "topic lists being made"):
            shown.waits_for(text)
        assert serious(shown.page) == []
        shown.go("letters")
        shown.waits_for('{"bill": 0} (and 2 messages)')
        shown.page.locator("a.payload").click()
        shown.waits_for("Message 1 of 3")
        assert shown.page.evaluate("window.hurt") is None
        assert shown.said == []


MANY_TOPICS, DAYS, BATCHES = 10_000, 400, 100


def fill(store: DelayedStore) -> None:
    """A million messages by chance, and one topic that has somewhat more."""
    chance = np.random.default_rng(1)
    now_ms = time.time_ns() // 1_000_000
    topics = [store.topic(f"shop/mail/topic-{number:05}") for number in range(MANY_TOPICS)]
    for _ in range(BATCHES):
        dues = (now_ms + DAY_MS // 4 + chance.integers(0, DAYS * DAY_MS, 10_000)).tolist()
        chosen = chance.integers(0, MANY_TOPICS, 10_000).tolist()
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
