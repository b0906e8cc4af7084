"""`duelog dead-letters`."""

import json
from pathlib import Path

import pytest

from tests.tools.command_line import PAST_MS, json_lines_of, json_of, make_store, ok, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two dead letters of one topic and one of another."""
    with make_store(tmp_path / "store", max_redeliveries=0) as store:
        for topic, payloads in (("t", [b"a", b"b"]), ("u", [b"c"])):
            with store.topic(topic).subscribe("s") as consumer:
                for payload in payloads:
                    store.topic(topic).send(payload)
                consumer.nack(consumer.receive(10), delay=0)
                assert consumer.receive(10) == []
    return tmp_path / "store"


def test_dead_letters_are_listed_with_where_they_came_from(path: Path) -> None:
    """Letters of the store, of a topic, of a subscription; for people and for programs."""
    letters = json_lines_of("dead-letters", "list", path)
    assert [(letter["payload"], letter["subscription"]) for letter in letters] == [("a", "s"), ("b", "s"), ("c", "s")]
    assert {(letter["reason"], letter["attempts"], letter["first_ms"]) for letter in letters} == {
        ("redeliveries", 1, PAST_MS)
    }
    assert [letter["payload"] for letter in json_lines_of("dead-letters", "list", path, "--topic", "u")] == ["c"]
    assert json_lines_of("dead-letters", "list", path, "--subscription", "other") == []
    shown = ok("dead-letters", "list", path)
    assert "redeliveries (1 attempts)" in shown
    assert letters[0]["message_id"] in shown


def test_dead_letters_are_requeued_by_id_or_all_together(path: Path) -> None:
    """They are in their subscriptions again, and no letters any more."""
    (a, _, _) = json_lines_of("dead-letters", "list", path)
    assert json_of("dead-letters", "requeue", path, a["message_id"]) == {"requeued": 1}
    assert [letter["payload"] for letter in json_lines_of("dead-letters", "list", path)] == ["b", "c"]
    assert ok("dead-letters", "requeue", path, "--all", "--topic", "t").strip() == "requeued: 1"
    received = ok("receive", "--create", path, "t", "s", "--max", "10", "--timeout", "0", "--json").splitlines()
    assert [json.loads(line)["payload"] for line in received] == ["a", "b"]


def test_dead_letters_are_purged_by_id_or_all_together(path: Path) -> None:
    """They are gone."""
    (a, _, _) = json_lines_of("dead-letters", "list", path)
    assert json_of("dead-letters", "purge", path, a["message_id"]) == {"purged": 1}
    assert json_of("dead-letters", "purge", path, "--all") == {"purged": 2}
    assert json_lines_of("dead-letters", "list", path) == []


def test_an_id_that_no_letter_has_is_refused_and_nothing_is_done(path: Path) -> None:
    """So are neither ids nor --all, and both."""
    (a, _, _) = json_lines_of("dead-letters", "list", path)
    for command in ("requeue", "purge"):
        assert "'9:9'" in refused("dead-letters", command, path, a["message_id"], "9:9")
        assert "--all" in refused("dead-letters", command, path)
        assert "--all" in refused("dead-letters", command, path, a["message_id"], "--all")
    assert len(json_lines_of("dead-letters", "list", path)) == 3


def test_dead_letters_are_exported_as_lines_of_json(path: Path, tmp_path: Path) -> None:
    """All that `list --json` has, of those that the filters leave; they stay, and no file is overwritten."""
    file = tmp_path / "letters.jsonl"
    assert json_of("dead-letters", "export", path, file, "--topic", "t") == {"exported": 2}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == json_lines_of("dead-letters", "list", path, "--topic", "t")
    assert "FILE" in refused("dead-letters", "export", path, file)
    assert len(file.read_text().splitlines()) == 2


def test_dead_letters_are_filtered_and_requeued_with_a_delay(path: Path) -> None:
    """By reason, age and key; what is requeued later waits."""
    assert json_lines_of("dead-letters", "list", path, "--reason", "expired") == []
    assert json_lines_of("dead-letters", "list", path, "--key", "k") == []
    assert len(json_lines_of("dead-letters", "list", path, "--older-than", "1h", "--reason", "redeliveries")) == 3
    command = ("dead-letters", "requeue", path, "--all", "--delay", "365d")
    assert json_of(*command, "--topic", "u") == {"requeued": 1}
    assert '"c"' in ok("scheduled", path, "u", "--json")
    assert "--after" in refused("dead-letters", "requeue", path, "--all", "--delay", "soon")
