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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from duelog import DelayedStore, Message, ReceivedMessage, Worker
from duelog.upkeep.jobs import PROGRESS, Jobs
from tests.conftest import present
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
