"""`duelog send` and `duelog receive`."""

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, MessageId
from tests.tools.command_line import FUTURE_MS, PAST_MS, json_lines_of, json_of, make_store, ok, refused, run


def look(path: Path) -> DelayedStore:
    """The store, opened read-only."""
    return DelayedStore.open(path, clock=ManualClock(PAST_MS), read_only=True)


# -- send ----------------------------------------------------------------------------------------


def test_send_makes_a_store_and_keeps_every_field_of_the_message(path: Path) -> None:
    """Payload, key, properties and due time are what was asked for."""
    sent = json_of("send", "--create", path, "reminders", "pay", "--at", "2100-01-01T00:00:00Z", "--key", "order-17",
                   "--property", "shop=7", "--property", "note=a=b")  # fmt: skip
    assert sent["topic"] == "persistent://public/default/reminders"
    assert sent["due_ms"] == FUTURE_MS
    with look(path) as store:
        found = store.topic("reminders").get(MessageId.parse(sent["message_id"]))
        assert found is not None
        assert (found.payload, found.key, found.properties) == (b"pay", "order-17", {"shop": "7", "note": "a=b"})
        assert found.due_ms == FUTURE_MS
        assert list(store.check()) == []


def test_send_after_a_duration_is_due_that_long_after_it_was_published(path: Path) -> None:
    """--after counts from the store's time at sending."""
    sent = json_of("send", "--create", path, "t", "x", "--after", "2h")
    with look(path) as store:
        found = store.topic("t").get(MessageId.parse(sent["message_id"]))
    assert found is not None
    assert found.due_ms - found.publish_ms == 7_200_000


@pytest.mark.parametrize("arguments", [["-"], []])
def test_send_reads_bytes_from_standard_input(path: Path, arguments: list[str]) -> None:
    """With - or no payload every byte of standard input is the message."""
    content = bytes(range(256))
    sent = json_of("send", "--create", path, "t", *arguments, input=content)
    with look(path) as store:
        found = store.topic("t").get(MessageId.parse(sent["message_id"]))
    assert found is not None
    assert found.payload == content


def test_send_prints_the_id_and_the_due_time(path: Path) -> None:
    """For people: one line."""
    assert ok("send", "--create", path, "t", "x", "--at", FUTURE_MS).split() == ["2:0", "due", "2100-01-01T00:00:00Z"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at", "tomorrow"], "--at='tomorrow'"),
        (["--at", "2026-12-01T09:00:00"], "no zone"),
        (["--at", "1795251600"], "seconds for milliseconds? 1795251600 s are 2026-11-21T09:00:00Z"),
        (["--after", "soon"], "--after='soon'"),
        (["--after", "1d", "--at", FUTURE_MS], "one of the two"),
        (["--after", "9999999d"], "9999-12-31"),
        (["--property", "shop"], "name=value"),
    ],
)
def test_send_refuses_bad_values_and_leaves_no_message(path: Path, arguments: list[object], said: str) -> None:
    """Each error names the option or field and the value."""
    assert said in refused("send", "--create", path, "t", "x", *arguments)
    assert not path.exists() or json_of("stats", path)["pending"] == 0
    assert "'a/b'" in refused("send", "--create", path, "a/b", "x")


def test_send_makes_a_store_of_an_empty_directory_and_of_no_other(tmp_path: Path) -> None:
    """An empty directory is as good as none; one of other files does not become a store."""
    (tmp_path / "empty").mkdir()
    ok("send", "--create", tmp_path / "empty", "t", "x")
    assert json_of("stats", tmp_path / "empty")["topics"] == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused("send", "--create", tmp_path / "mine", "t", "x")
    assert [child.name for child in (tmp_path / "mine").iterdir()] == ["notes.txt"]


# -- receive -------------------------------------------------------------------------------------


@pytest.fixture
def due(path: Path) -> Path:
    """A store with five messages that are due, sent in another order than they are due in, and one that is not."""
    with make_store(path) as store:
        topic = store.topic("t")
        for number in (3, 1, 4, 2, 5):
            topic.send(b"m%d" % number, deliver_after=number, key=f"k{number}", properties={"n": str(number)})
        topic.send(b"later", deliver_at=FUTURE_MS)
    return path


def test_receive_prints_what_is_due_in_order_and_acknowledges_it(due: Path) -> None:
    """A second run gets the rest, a third nothing, and the message of the far future stays."""
    first = json_lines_of("receive", "--create", due, "t", "mailer", "--max", 3, "--timeout", 0)
    assert [message["payload"] for message in first] == ["m1", "m2", "m3"]
    second = json_lines_of("receive", "--create", due, "t", "mailer", "--max", 10, "--timeout", 0)
    assert [message["payload"] for message in second] == ["m4", "m5"]
    assert json_lines_of("receive", "--create", due, "t", "mailer", "--timeout", 0) == []
    assert json_of("stats", due, "t")["subscriptions"][0]["backlog"] == 0
    assert json_of("stats", due, "t")["pending"] == 1


def test_receive_without_acknowledging_gets_the_same_again(due: Path) -> None:
    """--no-ack leaves the messages in the subscription's backlog."""
    first = json_lines_of("receive", "--create", due, "t", "mailer", "--max", 5, "--no-ack")
    again = json_lines_of("receive", "--create", due, "t", "mailer", "--max", 5)
    assert [message["message_id"] for message in first] == [message["message_id"] for message in again]


def test_receive_gives_every_field_in_json(due: Path) -> None:
    """Ids as text, times in ms and as ISO 8601."""
    (message,) = json_lines_of("receive", "--create", due, "t", "mailer")
    assert message == {
        "message_id": "2:1",
        "topic": "persistent://public/default/t",
        "payload": "m1",
        "key": "k1",
        "properties": {"n": "1"},
        "due_ms": PAST_MS + 1_000,
        "due": "2001-09-09T01:46:41Z",
        "publish_ms": PAST_MS,
        "position": "1:0",
        "subscription": "mailer",
        "redelivery_count": 0,
    }


def test_receive_waits_for_a_message_that_becomes_due(path: Path) -> None:
    """Without a timeout it ends when the message is there, not before its time."""
    sent = json_of("send", "--create", path, "t", "soon", "--after", "0.2")
    (message,) = json_lines_of("receive", "--create", path, "t", "mailer")
    assert (message["payload"], message["due_ms"]) == ("soon", sent["due_ms"])


def test_receive_escapes_what_could_drive_a_terminal(path: Path) -> None:
    """Escape sequences of a payload and a key are shown, not sent."""
    with make_store(path) as store:
        store.topic("t").send(b"\x1b[2J[bold]\n", key="\x1b]0;x\x07")
    shown = ok("receive", "--create", path, "t", "mailer")
    assert "\x1b" not in shown
    assert r"\x1b[2J[bold]\n" in shown


def test_receive_says_when_time_is_over(due: Path) -> None:
    """Fewer messages than asked for is no error, and standard error has the count."""
    result = run("receive", "--create", due, "t", "mailer", "--max", "9", "--timeout", "0", "--json")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert "5 of 9 messages were due in time" in result.stderr


def test_a_typo_in_receive_makes_no_subscription_that_holds_everything_for_ever(due: Path) -> None:
    """A subscription or topic that is not there is refused by its name, and none is made; --create makes it."""
    said = refused("receive", due, "t", "mialer", "--timeout", 0)
    assert "SUBSCRIPTION='mialer': t has no such subscription; --create makes it" in said
    assert "TOPIC='T': there is no such topic; --create makes it" in refused("receive", due, "T", "mailer")
    assert ok("subscriptions", "list", due, "t") == ""
    assert ok("topics", "list", due) == "t\n"
    assert len(json_lines_of("receive", due, "t", "mailer", "--create")) == 1
    assert len(json_lines_of("receive", due, "t", "mailer")) == 1


def test_a_typo_in_send_makes_no_topic(due: Path, tmp_path: Path) -> None:
    """Nor a store, where the directory is mistaken."""
    said = refused("send", due, "tt", "x")
    assert said == "duelog: TOPIC='tt': there is no such topic; --create makes it\n"
    assert ok("topics", "list", due) == "t\n"
    assert "there is no such directory" in refused("send", tmp_path / "none", "t", "x")
    assert not (tmp_path / "none").exists()
    assert json_of("send", due, "tt", "x", "--create")["topic"] == "persistent://public/default/tt"
    assert json_of("send", due, "tt", "x")["due_ms"] is not None


def test_both_types_of_subscription_can_be_asked_for(due: Path) -> None:
    """--type shared works, another word is a usage error."""
    assert len(json_lines_of("receive", "--create", due, "t", "mailer", "--type", "shared", "--max", 5)) == 5
    assert run("receive", "--create", due, "t", "mailer", "--type", "private").exit_code == 2


def test_a_message_is_cancelled_by_the_key_that_it_was_sent_with(path: Path) -> None:
    """At a shell the key is known, the id seldom; the key is free then, and status 1 says that none was pending."""
    sent = json_of("send", "--create", path, "t", "x", "--after", "1h", "--dedup-key", "order-17")
    assert json_of("cancel", path, "t", "--dedup-key", "order-17") == {"dedup_key": "order-17", "outcome": "cancelled"}
    again = run("cancel", path, "t", "--dedup-key", "order-17")
    assert (again.exit_code, again.stdout) == (1, "order-17  unknown\n")
    assert json_of("send", path, "t", "x", "--after", "1h", "--dedup-key", "order-17") != sent
    assert "it was there" in ok("send", path, "t", "x", "--after", "1h", "--dedup-key", "order-17")
    assert [ok("count", path, "t", "--prefix", prefix) for prefix in ("order-", "o-")] == ["1\n", "0\n"]
    assert ok("cancel", path, "t", "--prefix", "order-") == "order-17  cancelled\n"
    assert run("cancel", path, "t", "--prefix", "order-").exit_code == 0
    assert "cancel by id" in refused("cancel", "--server", "http://localhost:1", "t", "--dedup-key", "order-17")
