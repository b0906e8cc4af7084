"""The page of `duelog serve` in a browser: roles with their namespaces, a server that goes away and returns."""

import json
import re
import subprocess
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

import duelog
from duelog import DelayedStore
from duelog.broker.operate.client_message import _Single
from duelog.broker.protocol.commands import KeyValue
from duelog.broker.protocol.entry import BATCH
from duelog.broker.protocol.fields import ENCODERS
from tests.broker.admin.rest import KEY, token
from tests.broker.operate.test_client_message import entry
from tests.broker.page.test_browser import Shown, browser, pytestmark, serious, sync_api
from tests.disaster.running import module

__all__ = ["browser", "pytestmark"]

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
