"""`duelog send`, `receive` and `dead-letters`."""

import json
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, MessageId
from tests.tools.command_line import FUTURE_MS, PAST_MS, json_lines_of, json_of, make_store, ok, refused, run


def look(path: Path) -> DelayedStore:
    """The store, opened read-only."""
    return DelayedStore.open(path, clock=ManualClock(PAST_MS), read_only=True)


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


@pytest.fixture
def buried(tmp_path: Path) -> Path:
    """A store with two dead letters of one topic and one of another."""
    with make_store(tmp_path / "store", max_redeliveries=0) as store:
        for topic, payloads in (("t", [b"a", b"b"]), ("u", [b"c"])):
            with store.topic(topic).subscribe("s") as consumer:
                for payload in payloads:
                    store.topic(topic).send(payload)
                consumer.nack(consumer.receive(10), delay=0)
                assert consumer.receive(10) == []
    return tmp_path / "store"


def test_dead_letters_are_listed_with_where_they_came_from(buried: Path) -> None:
    """Letters of the store, of a topic, of a subscription; for people and for programs."""
    letters = json_lines_of("dead-letters", "list", buried)
    assert [(letter["payload"], letter["subscription"]) for letter in letters] == [("a", "s"), ("b", "s"), ("c", "s")]
    assert {(letter["reason"], letter["attempts"], letter["first_ms"]) for letter in letters} == {
        ("redeliveries", 1, PAST_MS)
    }
    assert [letter["payload"] for letter in json_lines_of("dead-letters", "list", buried, "--topic", "u")] == ["c"]
    assert json_lines_of("dead-letters", "list", buried, "--subscription", "other") == []
    shown = ok("dead-letters", "list", buried)
    assert "redeliveries (1 attempts)" in shown
    assert letters[0]["message_id"] in shown


def test_dead_letters_are_requeued_by_id_or_all_together(buried: Path) -> None:
    """They are in their subscriptions again, and no letters any more."""
    (a, _, _) = json_lines_of("dead-letters", "list", buried)
    assert json_of("dead-letters", "requeue", buried, a["message_id"]) == {"requeued": 1}
    assert [letter["payload"] for letter in json_lines_of("dead-letters", "list", buried)] == ["b", "c"]
    assert ok("dead-letters", "requeue", buried, "--all", "--topic", "t").strip() == "requeued: 1"
    received = ok("receive", "--create", buried, "t", "s", "--max", "10", "--timeout", "0", "--json").splitlines()
    assert [json.loads(line)["payload"] for line in received] == ["a", "b"]


def test_dead_letters_are_purged_by_id_or_all_together(buried: Path) -> None:
    """They are gone."""
    (a, _, _) = json_lines_of("dead-letters", "list", buried)
    assert json_of("dead-letters", "purge", buried, a["message_id"]) == {"purged": 1}
    assert json_of("dead-letters", "purge", buried, "--all") == {"purged": 2}
    assert json_lines_of("dead-letters", "list", buried) == []


def test_an_id_that_no_letter_has_is_refused_and_nothing_is_done(buried: Path) -> None:
    """So are neither ids nor --all, and both."""
    (a, _, _) = json_lines_of("dead-letters", "list", buried)
    for command in ("requeue", "purge"):
        assert "'9:9'" in refused("dead-letters", command, buried, a["message_id"], "9:9")
        assert "--all" in refused("dead-letters", command, buried)
        assert "--all" in refused("dead-letters", command, buried, a["message_id"], "--all")
    assert len(json_lines_of("dead-letters", "list", buried)) == 3


def test_dead_letters_are_exported_as_lines_of_json(buried: Path, tmp_path: Path) -> None:
    """All that `list --json` has, of those that the filters leave; they stay, and no file is overwritten."""
    file = tmp_path / "letters.jsonl"
    assert json_of("dead-letters", "export", buried, file, "--topic", "t") == {"exported": 2}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == json_lines_of("dead-letters", "list", buried, "--topic", "t")
    assert "FILE" in refused("dead-letters", "export", buried, file)
    assert len(file.read_text().splitlines()) == 2


def test_dead_letters_are_filtered_and_requeued_with_a_delay(buried: Path) -> None:
    """By reason, age and key; what is requeued later waits."""
    assert json_lines_of("dead-letters", "list", buried, "--reason", "expired") == []
    assert json_lines_of("dead-letters", "list", buried, "--key", "k") == []
    assert len(json_lines_of("dead-letters", "list", buried, "--older-than", "1h", "--reason", "redeliveries")) == 3
    command = ("dead-letters", "requeue", buried, "--all", "--delay", "365d")
    assert json_of(*command, "--topic", "u") == {"requeued": 1}
    assert '"c"' in ok("scheduled", buried, "u", "--json")
    assert "--after" in refused("dead-letters", "requeue", buried, "--all", "--delay", "soon")
