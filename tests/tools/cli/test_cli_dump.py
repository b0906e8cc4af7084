"""`duelog dump`: every table of every environment, in text and in JSON, damaged records included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duelog import Message
from duelog.store.codec.format import Table
from duelog.tools.dump import _KEYS
from tests.tools.command_line import FUTURE_MS, PAST_MS, flip, json_lines_of, make_store, ok, refused, run

ROW_TABLES = {"RUN", "LOG", "LEDGER", "COUNTER", "SEQUENCE", "NUMBERED", "TOPIC", "TOPIC_NAME", "PARTITION"}
PARTITION = "20010909T000000Z"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with fired, acknowledged and cancelled messages, and some that are not due."""
    path = tmp_path / "store"
    with make_store(path) as opened:
        topic = opened.topic("t")
        sent = topic.send_batch([message(number) for number in range(300)])
        topic.send(b"far", deliver_at=FUTURE_MS)
        topic.cancel(sent[299])
        with topic.subscribe("mailer", type="shared") as consumer:
            opened.clock.wrapped.advance(100_000)  # type: ignore[attr-defined]  # the manual clock
            got = consumer.receive(10)
            consumer.ack(got[3:5])
    return path


def message(number: int) -> Message:
    """A message due in a second for each number."""
    return Message(b"m%d" % number, deliver_after=number + 1, key=f"k{number}", properties={"n": str(number)})


def by_table(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by their table."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        assert "error" not in row
        found.setdefault(row["table"], []).append(row)
    return found


def test_the_main_environment_is_dumped_table_by_table(store: Path) -> None:
    """Catalog, frontier, cursor and markers are what the store's own figures say."""
    found = by_table(json_lines_of("dump", store))
    (topic,) = found["TOPIC"]
    assert topic["key"] == {"topic": "persistent://public/default/t"}
    assert [row["key"]["start_ms"] for row in found["PARTITION"]] == [999_993_600_000, FUTURE_MS]
    assert [row["value"]["holders"] for row in found["PARTITION"]] == [0, 0]
    (frontier,) = found["FRONTIER"]
    assert (frontier["value"]["fired"], frontier["value"]["seen"]) == (100, 300)
    (cursor,) = found["CURSOR"]
    assert cursor["key"] == {"topic_id": topic["value"]["topic_id"], "subscription": "mailer"}
    (acked,) = found["ACKED"]
    assert acked["value"] == {"count": 2, "ranges": ["3-4"]}
    (cancelled,) = found["CANCELLED"]
    assert cancelled["value"]["ranges"] == ["299"]
    assert sum(row["value"]["count"] for row in found["RUN"]) == 100
    assert {row["value"]["kind"] for row in found["RUN"]} == {"MARKERS"}
    assert found["LEDGER"][0]["value"]["state"] == "OPEN"


def test_the_entries_of_a_partition_are_the_messages_that_were_sent(store: Path) -> None:
    """Ids, due times, keys, properties and payloads."""
    found = by_table(json_lines_of("dump", store, "--partition", PARTITION, "--entries"))
    assert sum(row["value"]["count"] for row in found["RUN"]) == 300
    assert [row["key"]["entry_id"] for row in found["MESSAGE"]] == list(range(300))
    assert found["MESSAGE"][7]["value"] == {
        "due_ms": PAST_MS + 8_000,
        "publish_ms": PAST_MS,
        "key": "k7",
        "properties": {"n": "7"},
        "payload": "m7",
    }
    assert found["LOG"][0]["value"]["ledger_id"] == found["RUN"][0]["key"]["ledger_id"]


def test_markers_are_dumped_with_the_messages_they_point_at(store: Path) -> None:
    """In firing order, by ledger and entry."""
    found = by_table(json_lines_of("dump", store, "--entries", "--table", "run"))
    assert [row["value"]["target_entry"] for row in found["MARKER"]] == list(range(100))


def test_rows_can_be_chosen_by_table_ledger_and_limit(store: Path) -> None:
    """A table gives its rows only, a ledger its runs only."""
    assert set(by_table(json_lines_of("dump", store, "--table", "LEDGER"))) == {"LEDGER"}
    runs = json_lines_of("dump", store, "--table", "RUN")
    ledger = runs[0]["key"]["ledger_id"]
    assert json_lines_of("dump", store, "--ledger", ledger) == runs
    assert json_lines_of("dump", store, "--ledger", 999) == []
    assert len(json_lines_of("dump", store, "--limit", 3)) == 3


def test_the_text_form_has_times_for_people(store: Path) -> None:
    """One row on a line, ISO 8601 for times."""
    shown = ok("dump", store, "--partition", PARTITION, "--entries").splitlines()
    assert any(line.startswith("MESSAGE") and "due_ms=2001-09-09T01:46:48Z" in line for line in shown)
    assert len(shown) == len(json_lines_of("dump", store, "--partition", PARTITION, "--entries"))


def test_every_table_of_the_format_has_its_key_decoded() -> None:
    """A table that is added to the format and forgotten here fails."""
    assert set(Table) - set(_KEYS) == {Table.RUN}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--partition", "20990101T000000Z"], "there is none"),
        (["--partition", "../../etc"], "not of the form"),
        (["--table", "nope"], "FRONTIER"),
        (["--table", "RUN", "--ledger", "1"], "not together"),
    ],
)
def test_dump_refuses_what_is_not_there(store: Path, arguments: list[str], said: str) -> None:
    """Each error says what there is instead."""
    assert said in refused("dump", store, *arguments)


def test_a_damaged_entry_is_dumped_as_damaged_and_the_rest_goes_on(store: Path) -> None:
    """One flipped bit of a body costs one row its value."""
    flip(store / "partitions" / PARTITION / "g000001" / "data.mdb", b"m123\xa4k123")
    arguments = ["dump", str(store), "--partition", PARTITION, "--entries"]
    rows = [row for row in json_lines_of(*arguments) if row["table"] == "MESSAGE"]
    assert [row["key"]["entry_id"] for row in rows if "error" in row] == [123]
    assert len(rows) == 300
    assert "DAMAGED: body does not match its checksum" in ok(*arguments)


def test_a_damaged_record_is_dumped_as_damaged(store: Path) -> None:
    """A catalog record that no command could use is still shown."""
    data = store / "main" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"\x31\x00\x00\x00\x01mailer", b"\x31\x00\x00\x00\x01majler"))
    result = run("dump", store)
    assert result.exit_code == 0
    assert "DAMAGED: record" in result.stdout


def test_a_store_that_does_not_open_can_be_dumped(store: Path) -> None:
    """A missing partition refuses opening for writing, not the dump of what is there."""
    (store / "partitions" / PARTITION / "g000001" / "data.mdb").unlink()
    assert run("send", "--create", store, "t", "x").exit_code == 2
    assert by_table(json_lines_of("dump", store))["TOPIC"]
    assert "is missing" in refused("dump", store, "--partition", PARTITION)


def test_a_dump_is_read_in_short_transactions(store: Path) -> None:
    """More keys than one transaction reads come in order and once."""
    with make_store(store, durability="none") as opened:
        for number in range(600):
            opened.topic(f"t{number}").send(b"x", deliver_at=FUTURE_MS)
    arguments = ["dump", str(store), "--partition", "21000101T000000Z", "--table", "LOG"]
    keys = [row["key"]["topic_id"] for row in json_lines_of(*arguments)]
    assert keys == sorted(keys)
    assert len(set(keys)) == 601


def test_the_write_ahead_log_is_dumped_group_by_group(tmp_path: Path) -> None:
    """Each group with what it has for every environment; damaged ones are passed over."""
    path = tmp_path / "store"
    with make_store(path) as opened:
        topic = opened.topic("t")
        topic.send_batch([Message(b"due"), Message(b"far", deliver_at=FUTURE_MS)])
        topic.producer("p").send(Message(b"numbered", deliver_at=FUTURE_MS), sequence_id=1)
        found = json_lines_of("dump", path, "--wal", "--entries")
        assert "GROUP" in ok("dump", path, "--wal")
    groups = [row for row in found if row["table"] == "GROUP"]
    assert [row["key"] for row in groups] == [{"segment": 1, "sequence": number} for number in range(len(groups))]
    assert len(groups) > 2  # what was made for the messages, and they
    assert sum(row["value"]["rows"] for row in groups) == len([row for row in found if row["table"] in ROW_TABLES])
    bodies = [(row["value"]["environment"], row["value"]["payload"]) for row in found if row["table"] == "MESSAGE"]
    assert sorted(bodies) == [
        ("main", "due"),
        ("partition 21000101T000000Z", "far"),
        ("partition 21000101T000000Z", "numbered"),
    ]
    assert [row["value"]["environment"] for row in found if row["table"] == "SEQUENCE"] == ["main"]
    assert "not together" in refused("dump", path, "--wal", "--table", "RUN")
