"""`duelog scheduled`, `stats`, `partitions`, `check` and `dump`: they look and change nothing."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duelog import ManualClock, Message
from duelog.store.codec.format import Table
from duelog.tools.dump import _KEYS
from duelog.tools.store_check import check_store, environments
from tests.tools.command_line import (
    DAY_MS,
    DUELOG,
    FUTURE_MS,
    PAST_MS,
    child,
    files,
    flip,
    json_lines_of,
    json_of,
    make_store,
    ok,
    refused,
    run,
)

LOOKING = ["scheduled {} t", "stats {}", "stats {} t", "partitions {}", "check {}", "check {} --deep", "dump {}",
           "dump {} --entries"]  # fmt: skip


@pytest.fixture
def store(path: Path) -> Path:
    """A store with two topics: messages received and not, due and not, over three partitions."""
    with make_store(path) as opened:
        topic = opened.topic("t")
        topic.send_batch([])
        for number in range(6):
            topic.send(b"m%d" % number, deliver_after=60 + number * DAY_MS // 2_000, key=f"k{number}")
        opened.topic("shop/mail/u").send(b"now")
        clock = opened.clock.wrapped  # type: ignore[attr-defined]  # the manual clock that the store was opened on
        assert isinstance(clock, ManualClock)
        with topic.subscribe("mailer") as consumer, topic.subscribe("other"):
            clock.advance(DAY_MS)
            consumer.ack(consumer.receive(1))
    return path


@pytest.mark.parametrize("command", LOOKING)
def test_looking_at_a_store_changes_none_of_its_files(store: Path, command: str) -> None:
    """No file is made, removed or written."""
    before = files(store)
    for line in (command, f"{command} --json"):
        assert run(*line.format(store).split()).exit_code == 0
    assert files(store) == before


@pytest.mark.parametrize("command", [*LOOKING, "receive {} t s"])
def test_looking_where_there_is_no_store_makes_none(tmp_path: Path, command: str) -> None:
    """A missing directory, an empty one, a file, a directory of something else: refused, and left as they are."""
    missing, empty, foreign, file = (tmp_path / name for name in ("missing", "empty", "foreign", "file"))
    empty.mkdir()
    foreign.mkdir()
    (foreign / "a.txt").write_text("a")
    file.write_text("a")
    for path in (missing, empty, foreign, file):
        assert str(path) in refused(*command.format(path).split())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "empty", "file", "foreign"]


def test_scheduled_lists_what_has_not_fired_by_due_time(store: Path) -> None:
    """In JSON and as a table, from either end, and counted; an unknown topic is refused by the name that was given."""
    found = json_lines_of("scheduled", store, "t")
    assert [message["payload"] for message in found] == ["m2", "m3", "m4", "m5"]
    assert found[0]["due"] == "2001-09-10T01:47:40Z"
    shown = ok("scheduled", store, "t")
    assert "scheduled messages: 4" in shown
    assert "2001-09-10T01:47:40Z  k2              m2" in shown
    assert json_lines_of("scheduled", store, "t", "--newest-first") == found[::-1]
    assert ok("count", store, "t", "--until", "2001-09-11T00:00Z") == "2\n"
    assert "topic 'nope' does not exist" in refused("scheduled", store, "nope")


def test_stats_count_topics_partitions_and_pending_and_the_backlog_of_each_subscription(store: Path) -> None:
    """Of the store, whose topics come with figures of their own, and of one topic."""
    found = json_of("stats", store)
    assert (found["topics"], found["partitions"], found["pending"], found["set_aside"]) == (2, 3, 4, 0)
    assert [topic["name"].rpartition("/")[2] for topic in found["shown"]] == ["t", "u"]
    assert json_of("stats", store, "--topics", 1)["shown"] == found["shown"][:1]
    shown = ok("stats", store)
    assert "topics: 2 of 2" in shown
    assert "persistent://shop/mail/u" in shown
    topic = json_of("stats", store, "t")
    assert (topic["pending"], topic["fired"]) == (4, 2)
    assert {each["name"]: each["backlog"] for each in topic["subscriptions"]} == {"mailer": 1, "other": 2}


def test_tables_are_not_cut_where_the_output_is_no_terminal(store: Path) -> None:
    """A long name stands on one line."""
    with make_store(store) as opened:
        opened.topic("x" * 120).send(b"x", deliver_at=FUTURE_MS)
    assert f"\n{'x' * 120} " in ok("stats", store)


def test_check_of_a_sound_store_says_so_and_exits_with_0(store: Path) -> None:
    """Nothing but what is late by the machine's clock on standard output, a count on standard error."""
    result = run("check", store, "--deep")
    assert result.exit_code == 0
    assert {line.split(": ")[1] for line in result.stdout.splitlines()} == {
        "overdue",
        "late",
    }  # its clock is an old one
    assert "findings: 0" in result.stderr
    assert {json.loads(line)["severity"] for line in ok("check", store, "--json").splitlines()} == {"warning"}


def test_check_finds_a_flipped_bit_of_a_payload_only_when_deep(store: Path) -> None:
    """Exit status 1, and the address of the entry in text and in JSON."""
    flip(store / "partitions" / "20010911T000000Z" / "g000001" / "data.mdb", b"m4\xa2k4")
    assert run("check", store).exit_code == 0
    result = run("check", store, "--deep", "--json")
    assert result.exit_code == 1
    (finding,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert (finding["severity"], finding["code"]) == ("error", "corrupt-entry")
    assert "20010911T000000Z" in finding["address"]
    assert finding["address"].endswith("entry 0")
    assert "duelog repair" in finding["advice"]
    shown = run("check", store, "--deep")
    assert shown.exit_code == 1
    assert "corrupt-entry" in shown.stdout
    assert "findings: 1" in shown.stderr


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda store: shutil.rmtree(store / "partitions" / "20010911T000000Z"), "20010911T000000Z"),
        (lambda store: (store / "main" / "data.mdb").write_bytes(b""), "damaged-file"),
        (lambda store: flip(store / "STORE", b"partition_ms"), "store-file"),
    ],
)
def test_check_of_a_store_that_does_not_open_has_findings(
    store: Path, spoil: Callable[[Path], object], said: str
) -> None:
    """A missing partition, an empty file and a damaged STORE are damage, not usage errors; `send` is refused."""
    spoil(store)
    result = run("check", store)
    assert result.exit_code == 1
    assert said in result.stdout
    refused("send", "--create", store, "t", "x")


def test_a_store_of_a_later_format_is_refused_by_every_command(store: Path) -> None:
    """With the version found and the one that is known: status 2, and a finding for `check`."""
    fields = json.loads((store / "STORE").read_text())
    fields["format"] = 99
    (store / "STORE").write_text(json.dumps(fields))
    for arguments in (["stats", store], ["send", "--create", store, "t", "x"]):
        assert "99" in refused(*arguments)
    result = run("check", store)
    assert result.exit_code == 1
    assert "99" in result.stdout


def on_a_terminal(*arguments: object) -> str:
    """The text that a command writes to standard error where that is a terminal."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [*DUELOG, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # the terminal's end, on Linux
            while more := terminal.read(1 << 16):  # a terminal gives at most 4 KiB at a time
                shown += more
    assert process.returncode == 0, shown
    return shown.decode()


def test_check_shows_how_far_it_is_on_a_terminal(store: Path) -> None:
    """A bar on standard error, there only."""
    assert "files" in on_a_terminal("check", store, "--deep")
    assert child("check", store, "--deep").stderr == "duelog: findings: 0\n"


def test_a_check_tells_of_each_file_by_its_pages_and_by_its_entries(store: Path) -> None:
    """The figure goes up to the end, which stays the same while nothing comes and goes."""
    told: list[tuple[int, int]] = []
    assert check_store(store, deep=True, progress=lambda done, total: told.append((done, total))) == []
    files_there = len(environments(store))
    assert told[0] == (0, 2 * files_there)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {2 * files_there}
    assert told[-1][0] >= 2 * files_there - 2


def test_export_shows_no_count_before_it_knows_of_how_much(store: Path, tmp_path: Path) -> None:
    """Neither while it plans, nor where nothing is to be written."""
    pytest.importorskip("pyarrow", reason="needs duelog[arrow]")
    shown = on_a_terminal("export", store, tmp_path / "export")
    assert "slices" in shown
    assert "?" not in shown.replace("?25", "")  # the cursor is hidden, and shown again


ROW_TABLES = {"RUN", "LOG", "LEDGER", "COUNTER", "SEQUENCE", "NUMBERED", "TOPIC", "TOPIC_NAME", "PARTITION"}
PARTITION = "20010909T000000Z"


@pytest.fixture
def dumped(path: Path) -> Path:
    """A store with fired, acknowledged and cancelled messages, and some that are not due."""
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


def test_the_main_environment_is_dumped_table_by_table(dumped: Path) -> None:
    """Catalog, frontier, cursor and markers are what the store's own figures say."""
    found = by_table(json_lines_of("dump", dumped))
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


def test_the_entries_of_a_partition_are_the_messages_that_were_sent(dumped: Path) -> None:
    """Ids, due times, keys, properties and payloads."""
    found = by_table(json_lines_of("dump", dumped, "--partition", PARTITION, "--entries"))
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


def test_markers_are_dumped_with_the_messages_they_point_at(dumped: Path) -> None:
    """In firing order, by ledger and entry."""
    found = by_table(json_lines_of("dump", dumped, "--entries", "--table", "run"))
    assert [row["value"]["target_entry"] for row in found["MARKER"]] == list(range(100))


def test_rows_can_be_chosen_by_table_ledger_and_limit(dumped: Path) -> None:
    """A table gives its rows only, a ledger its runs only."""
    assert set(by_table(json_lines_of("dump", dumped, "--table", "LEDGER"))) == {"LEDGER"}
    runs = json_lines_of("dump", dumped, "--table", "RUN")
    ledger = runs[0]["key"]["ledger_id"]
    assert json_lines_of("dump", dumped, "--ledger", ledger) == runs
    assert json_lines_of("dump", dumped, "--ledger", 999) == []
    assert len(json_lines_of("dump", dumped, "--limit", 3)) == 3


def test_the_text_form_has_times_for_people(dumped: Path) -> None:
    """One row on a line, ISO 8601 for times."""
    shown = ok("dump", dumped, "--partition", PARTITION, "--entries").splitlines()
    assert any(line.startswith("MESSAGE") and "due_ms=2001-09-09T01:46:48Z" in line for line in shown)
    assert len(shown) == len(json_lines_of("dump", dumped, "--partition", PARTITION, "--entries"))


def test_every_table_of_the_format_has_its_key_decoded() -> None:
    """A table that is added to the format and forgotten here fails."""
    assert set(Table) - set(_KEYS) == {Table.RUN}


NOT_THERE: list[tuple[list[str], str]] = [
    (["--partition", "20990101T000000Z"], "has no directory"),
    (["--partition", "../../etc"], "not of the form"),
    (["--table", "nope"], "FRONTIER"),
    (["--table", "RUN", "--ledger", "1"], "not together"),
]


def test_dump_refuses_what_is_not_there(dumped: Path) -> None:
    """Each error says what there is instead."""
    for arguments, said in NOT_THERE:
        assert said in refused("dump", dumped, *arguments)


def test_a_damaged_entry_or_record_is_dumped_as_damaged_and_the_rest_goes_on(dumped: Path) -> None:
    """A flipped bit of a body costs one row its value; a catalog record that no command could use is still shown."""
    flip(dumped / "partitions" / PARTITION / "g000001" / "data.mdb", b"m123\xa4k123")
    arguments = ["dump", str(dumped), "--partition", PARTITION, "--entries"]
    rows = [row for row in json_lines_of(*arguments) if row["table"] == "MESSAGE"]
    assert [row["key"]["entry_id"] for row in rows if "error" in row] == [123]
    assert len(rows) == 300
    assert "DAMAGED: body does not match its checksum" in ok(*arguments)
    data = dumped / "main" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"\x31\x00\x00\x00\x01mailer", b"\x31\x00\x00\x00\x01majler"))
    result = run("dump", dumped)
    assert result.exit_code == 0
    assert "DAMAGED: record" in result.stdout


def test_a_store_that_does_not_open_can_be_dumped(dumped: Path) -> None:
    """A missing partition refuses opening for writing, not the dump of what is there."""
    (dumped / "partitions" / PARTITION / "g000001" / "data.mdb").unlink()
    assert run("send", "--create", dumped, "t", "x").exit_code == 2
    assert by_table(json_lines_of("dump", dumped))["TOPIC"]
    assert "is missing" in refused("dump", dumped, "--partition", PARTITION)


def test_a_dump_is_read_in_short_transactions(dumped: Path) -> None:
    """More keys than one transaction reads come in order and once."""
    with make_store(dumped, durability="none") as opened:
        for number in range(600):
            opened.topic(f"t{number}").send(b"x", deliver_at=FUTURE_MS)
    arguments = ["dump", str(dumped), "--partition", "21000101T000000Z", "--table", "LOG"]
    keys = [row["key"]["topic_id"] for row in json_lines_of(*arguments)]
    assert keys == sorted(keys)
    assert len(set(keys)) == 601


def test_the_write_ahead_log_is_dumped_group_by_group(path: Path) -> None:
    """Each group with what it has for every environment; damaged ones are passed over."""
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
