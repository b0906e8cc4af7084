"""`duelog import`: JSON lines in batches; a bad line stops it and says where and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.command_line import FUTURE_MS, PAST_MS, json_lines_of, json_of, ok, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store is going to be."""
    return tmp_path / "store"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the lines are."""
    return tmp_path / "messages.jsonl"


def lines(*records: object) -> str:
    """Records as JSON lines; a str as it is."""
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


def test_every_form_of_payload_and_due_time_is_read(path: Path, file: Path) -> None:
    """Text and base64; ms, ISO 8601, seconds and durations; key and properties."""
    file.write_text(
        lines(
            {"topic": "t", "payload": "héllo", "deliver_at": FUTURE_MS, "key": "k", "properties": {"a": "b"}},
            {"topic": "t", "payload_base64": "/wA=", "deliver_at": "2100-01-01T00:00:01Z"},
            {"topic": "t", "payload": "after", "deliver_after": 9e8},
            {"topic": "t", "payload": "text", "deliver_after": "10000d"},
            "",
            {"topic": "t", "payload": "", "deliver_at": FUTURE_MS + 2, "key": None, "properties": {}},
        )
    )
    assert json_of("import", path, file)["messages"] == 5
    found = {message.get("payload", "bytes"): message for message in json_lines_of("scheduled", path, "t")}
    assert found["héllo"]["due_ms"] == FUTURE_MS
    assert (found["héllo"]["key"], found["héllo"]["properties"]) == ("k", {"a": "b"})
    assert (found["bytes"]["payload_base64"], found["bytes"]["due_ms"]) == ("/wA=", FUTURE_MS + 1_000)
    assert found["after"]["due_ms"] - found["after"]["publish_ms"] == 900_000_000_000
    assert found["text"]["due_ms"] - found["text"]["publish_ms"] == 864_000_000_000
    assert found[""]["due_ms"] == FUTURE_MS + 2


def test_messages_keep_the_order_of_their_lines(path: Path) -> None:
    """Of equal due times the first line is received first, over the borders of batches and between topics."""
    content = lines(*({"topic": f"t{n % 2}", "payload": str(n), "deliver_at": FUTURE_MS} for n in range(50)))
    assert json_of("import", path, "-", "--batch", 7, input=content) | {"seconds": 0} == {
        "messages": 50,
        "topics": 2,
        "seconds": 0,
    }
    for topic in (0, 1):
        found = [int(message["payload"]) for message in json_lines_of("scheduled", path, f"t{topic}")]
        assert found == list(range(topic, 50, 2))


def test_a_message_without_a_due_time_is_due_at_once(path: Path) -> None:
    """As with send; so is one whose time has passed."""
    content = lines({"topic": "t", "payload": "now"}, {"topic": "t", "payload": "past", "deliver_at": PAST_MS})
    ok("import", path, "-", input=content)
    assert [m["payload"] for m in json_lines_of("receive", path, "t", "s", "--max", 2)] == ["now", "past"]


BAD = [
    ("no json", "line=b'no json'", "no JSON"),
    ("[1]", "line=[1]", "JSON object"),
    ("[" * 100_000, "line=", "no JSON"),
    ("\xff", "line=", "no JSON"),
    ({"payload": "x"}, "topic=None", "missing"),
    ({"topic": 7, "payload": "x"}, "topic=7", "expected a str"),
    ({"topic": "a//b", "payload": "x"}, "topic='a//b'", "empty"),
    ({"topic": "t"}, "payload=None", "expected one of"),
    ({"topic": "t", "payload": "x", "payload_base64": "eA=="}, "payload='x'", "expected one of"),
    ({"topic": "t", "payload": {"a": 1}}, "payload={'a': 1}", "expected text"),
    ('{"topic": "t", "payload": "\\ud800"}', "payload=", "surrogate"),
    ({"topic": "t", "payload_base64": "%%"}, "payload_base64='%%'", "no base64"),
    ({"topic": "t", "payload_base64": 7}, "payload_base64=7", "no base64"),
    ({"topic": "t", "payload": "x", "deliver_at": "2026-12-01T09:00:00"}, "deliver_at='2026-12-01T09:00:00'", "zone"),
    ({"topic": "t", "payload": "x", "deliver_at": 1.5e12}, "deliver_at=1500000000000.0", "float"),
    ({"topic": "t", "payload": "x", "deliver_at": -1}, "deliver_at=-1", "1970"),
    ({"topic": "t", "payload": "x", "deliver_at": 10**18}, f"deliver_at={10**18}", "9999"),
    ({"topic": "t", "payload": "x", "deliver_at": True}, "deliver_at=True", "expected"),
    ({"topic": "t", "payload": "x", "deliver_after": "soon"}, "deliver_after='soon'", "expected seconds"),
    ('{"topic": "t", "payload": "x", "deliver_after": NaN}', "deliver_after=nan", "finite"),
    ('{"topic": "t", "payload": "x", "deliver_after": 1e999}', "deliver_after=inf", "finite"),
    ({"topic": "t", "payload": "x", "deliver_after": -1}, "deliver_after=-1", "negative"),
    ({"topic": "t", "payload": "x", "deliver_at": 1, "deliver_after": 1}, "deliver_after=1", "one of the two"),
    ({"topic": "t", "payload": "x", "key": 7}, "key=7", "expected a str"),
    ({"topic": "t", "payload": "x", "properties": {"a": 1}}, "properties['a']=1", "expected a str"),
    ({"topic": "t", "payload": "x", "properties": ["a"]}, "properties=['a']", "mapping"),
    ({"topic": "t", "payload": "x", "deliver_att": 1}, "deliver_att=1", "unknown field"),
    ({"topic": "t", "payload": "x" * 6_000_000}, "payload=", "5242880"),
]


@pytest.mark.parametrize(("record", "where", "why"), BAD, ids=[where for _, where, _ in BAD])
def test_a_bad_line_names_its_number_field_and_value_and_stops_its_batch(
    path: Path, file: Path, record: object, where: str, why: str
) -> None:
    """Batches before it are in the store, nothing of its own is, and the count of both is said."""
    good = {"topic": "t", "payload": "x", "deliver_at": FUTURE_MS}
    file.write_text(lines(good, good, "", good, {**good, "topic": "other"}, record, good), encoding="latin-1")
    said = refused("import", path, file, "--batch", 2)
    assert f"duelog: line 6: {where}" in said
    assert why in said
    assert (
        "2 messages, up to line 2, are in the store\n" in said or "4 messages, up to line 5, are in the store\n" in said
    )
    assert "Traceback" not in said
    assert len(said) < 1_000
    assert json_of("stats", path)["pending"] == (4 if "4 messages" in said else 2)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(path: Path, file: Path) -> None:
    """A line longer than any message can be is not read to its end."""
    with file.open("wb") as out:
        out.truncate(64 << 20)
    said = refused("import", path, file)
    assert "line 1: line=" in said
    assert "longer than" in said


def test_importing_nothing_is_no_error(path: Path) -> None:
    """An empty file gives an empty store and a count of 0."""
    assert json_of("import", path, "-", input="")["messages"] == 0
    assert json_of("stats", path)["topics"] == 0


def test_a_file_that_cannot_be_read_makes_no_store(path: Path, tmp_path: Path) -> None:
    """Its name and the reason are said."""
    assert "missing.jsonl" in refused("import", path, tmp_path / "missing.jsonl")
    assert "directory" in refused("import", path, tmp_path)
    assert not path.exists()
