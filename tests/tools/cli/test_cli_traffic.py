"""`duelog send`, `receive` and `dead-letters`."""

import json
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, MessageId
from tests.conftest import present
from tests.tools.command_line import FUTURE_MS, PAST_MS, json_lines_of, json_of, make_store, ok, refused, run


def test_send_makes_a_store_and_keeps_every_field_of_the_message(path: Path) -> None:
    """Payload, every byte of standard input too, key, properties and due time; for people it is one line."""
    sent = json_of("send", "--create", path, "reminders", "pay", "--at", "2100-01-01T00:00:00Z", "--key", "order-17",
                   "--property", "shop=7", "--property", "note=a=b")  # fmt: skip
    assert (sent["topic"], sent["due_ms"]) == ("persistent://public/default/reminders", FUTURE_MS)
    content = bytes(range(256))
    piped = [json_of("send", path, "reminders", *arguments, input=content) for arguments in (["-"], [])]
    after = json_of("send", path, "reminders", "x", "--after", "2h")
    with DelayedStore.open(path, clock=ManualClock(PAST_MS), read_only=True) as store:
        first, *others, last = [
            present(store.topic("reminders").get(MessageId.parse(each["message_id"]))) for each in (sent, *piped, after)
        ]
        assert (first.payload, first.key, first.properties) == (b"pay", "order-17", {"shop": "7", "note": "a=b"})
        assert (first.due_ms, [each.payload for each in others]) == (FUTURE_MS, [content] * 2)
        assert present(last.due_ms) - last.publish_ms == 7_200_000
        assert list(store.check()) == []
    shown = ok("send", path, "reminders", "x", "--at", FUTURE_MS).split()
    assert (shown[0].count(":"), shown[1:]) == (1, ["due", "2100-01-01T00:00:00Z"])


def test_send_refuses_bad_values_and_leaves_no_message(path: Path) -> None:
    """Each error names the option or field and the value."""
    for arguments, said in (
        (["--at", "tomorrow"], "--at='tomorrow'"),
        (["--at", "2026-12-01T09:00:00"], "no zone"),
        (["--at", "1795251600"], "seconds for milliseconds? 1795251600 s are 2026-11-21T09:00:00Z"),
        (["--after", "soon"], "--after='soon'"),
        (["--after", "1d", "--at", FUTURE_MS], "one of the two"),
        (["--after", "9999999d"], "9999-12-31"),
        (["--property", "shop"], "name=value"),
    ):
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
    """With every field; what is not acknowledged comes again, and the message of the far future stays."""
    receive = ("receive", "--create", due, "t", "mailer", "--timeout", 0)
    assert len(json_lines_of(*receive, "--max", 5, "--no-ack", "--type", "shared")) == 5
    first = json_lines_of(*receive, "--max", 3)
    assert first[0] == {
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
    assert [message["payload"] for message in first] == ["m1", "m2", "m3"]
    result = run(*receive, "--max", 9, "--json")
    assert (result.exit_code, "2 of 9 messages were due in time" in result.stderr) == (0, True)
    assert [json.loads(line)["payload"] for line in result.stdout.splitlines()] == ["m4", "m5"]
    assert json_lines_of(*receive) == []
    figures = json_of("stats", due, "t")
    assert (figures["subscriptions"][0]["backlog"], figures["pending"]) == (0, 1)
    assert run(*receive, "--type", "private").exit_code == 2


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
    assert refused("send", due, "tt", "x") == "duelog: TOPIC='tt': there is no such topic; --create makes it\n"
    assert ok("topics", "list", due) == "t\n"
    assert "there is no such directory" in refused("send", tmp_path / "none", "t", "x")
    assert not (tmp_path / "none").exists()
    assert json_of("send", due, "tt", "x", "--create")["topic"] == "persistent://public/default/tt"
    assert json_of("send", due, "tt", "x")["due_ms"] is not None


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


def test_dead_letters_are_listed_and_exported_with_where_they_came_from(buried: Path, tmp_path: Path) -> None:
    """Those that the filters leave, for people and for programs; they stay, and no file is overwritten."""

    def listed(*options: object) -> str:
        return "".join(letter["payload"] for letter in json_lines_of("dead-letters", "list", buried, *options))

    letters = json_lines_of("dead-letters", "list", buried)
    assert [(letter["payload"], letter["subscription"]) for letter in letters] == [("a", "s"), ("b", "s"), ("c", "s")]
    known = {(letter["reason"], letter["attempts"], letter["first_ms"]) for letter in letters}
    assert known == {("redeliveries", 1, PAST_MS)}
    assert [listed("--topic", "u"), listed("--older-than", "1h", "--reason", "redeliveries")] == ["c", "abc"]
    assert [listed(*each) for each in (["--subscription", "no"], ["--reason", "expired"], ["--key", "k"])] == [""] * 3
    shown = ok("dead-letters", "list", buried)
    assert "redeliveries (1 attempts)" in shown
    assert letters[0]["message_id"] in shown
    file = tmp_path / "letters.jsonl"
    assert json_of("dead-letters", "export", buried, file, "--topic", "t") == {"exported": 2}
    assert [json.loads(line) for line in file.read_text().splitlines()] == letters[:2]
    assert "FILE" in refused("dead-letters", "export", buried, file)
    assert len(file.read_text().splitlines()) == 2


def test_dead_letters_are_requeued_and_purged_by_id_or_all_together(buried: Path) -> None:
    """Later, too. An id that no letter has, neither ids nor --all, or both are refused, and nothing is done."""
    a, b, _ = [letter["message_id"] for letter in json_lines_of("dead-letters", "list", buried)]
    for command in ("requeue", "purge"):
        assert "'9:9'" in refused("dead-letters", command, buried, a, "9:9")
        assert "--all" in refused("dead-letters", command, buried)
        assert "--all" in refused("dead-letters", command, buried, a, "--all")
    assert "--after" in refused("dead-letters", "requeue", buried, "--all", "--delay", "soon")
    assert json_of("dead-letters", "requeue", buried, a) == {"requeued": 1}
    assert json_of("dead-letters", "purge", buried, b) == {"purged": 1}
    assert ok("dead-letters", "requeue", buried, "--all", "--topic", "u", "--delay", "365d").strip() == "requeued: 1"
    assert '"c"' in ok("scheduled", buried, "u", "--json")
    received = json_lines_of("receive", "--create", buried, "t", "s", "--max", "10", "--timeout", "0")
    assert [each["payload"] for each in received] == ["a"]
    assert json_of("dead-letters", "purge", buried, "--all") == {"purged": 0}
    assert json_lines_of("dead-letters", "list", buried) == []
