"""`duelog import`: JSON lines, checked before they are written; a bad line stops it and says where and why."""

import io
import json
from pathlib import Path

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock
from duelog.errors import InvalidMessage, StoreFull
from duelog.operations.operations import Operations
from duelog.store.files.failpoints import arm, disarm
from duelog.tools.transfer.import_lines import Import
from tests.tools.command_line import FUTURE_MS, PAST_MS, json_lines_of, json_of, ok, refused


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
    """Lines of equal due times are received in order, over the borders of batches and between topics."""
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
    """A line is refused as a send is; so is one whose time has passed."""
    content = lines({"topic": "t", "payload": "now"}, {"topic": "t", "payload": "past", "deliver_at": PAST_MS})
    ok("import", path, "-", input=content)
    assert [m["payload"] for m in json_lines_of("receive", "--create", path, "t", "s", "--max", 2)] == ["now", "past"]


BAD = [
    ("no json", "line=b'no json'", "no JSON"),
    ("[1]", "line=[1]", "JSON object"),
    ("[" * 100_000, "line=", "no JSON"),
    ("\xff", "line=", "no JSON"),
    ({"payload": "x"}, "topic:", "missing"),
    ({"topic": 7, "payload": "x"}, "topic=7", "expected a str"),
    ({"topic": "a//b", "payload": "x"}, "topic='a//b'", "empty"),
    ({"topic": "t"}, "payload:", "expected one of"),
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


def test_a_bad_line_names_its_number_field_and_value_and_nothing_is_stored(path: Path, file: Path) -> None:
    """Every line of a file is checked before any is written, whatever the size of a batch."""
    good = {"topic": "t", "payload": "x", "deliver_at": FUTURE_MS}
    for record, where, why in BAD:
        file.write_text(lines(good, good, "", good, {**good, "topic": "other"}, record, good), encoding="latin-1")
        said = refused("import", path, file, "--batch", 2)
        assert f"duelog: line 6: {where}" in said
        assert why in said
        assert "0 messages, up to line 0, are in the store\n" in said
        assert "Traceback" not in said
        assert len(said) < 1_000
        assert json_of("stats", path)["topics"] == 0


class Pipe(io.BytesIO):
    """A file that can be read once."""

    def seekable(self) -> bool:
        return False


def test_of_a_pipe_a_batch_with_a_bad_line_is_not_stored_and_those_before_it_are(store: DelayedStore) -> None:
    """The counts say so: up to which line everything is stored, and nothing after it."""
    good = {"topic": "t", "payload": "x", "deliver_at": FUTURE_MS}
    content = lines(good, good, "", good, {**good, "topic": "other"}, good, {**good, "topic": 7}, good)
    work = Import(Operations(store), batch_messages=2)
    with pytest.raises(InvalidMessage, match="line 7: topic=7"):
        work.run(Pipe(content.encode()))
    assert (work.messages, work.lines, work.began_to) == (4, 5, 0)
    assert [store.topic(name).stats().pending for name in ("t", "other")] == [3, 1]


@pytest.mark.parametrize("source", [io.BytesIO, Pipe], ids=["file", "pipe"])
def test_a_line_that_a_policy_refuses_is_named_and_nothing_of_its_batch_is_stored(
    store: DelayedStore, clock: ManualClock, source: type[io.BytesIO]
) -> None:
    """Also of the topics that come before its own in the batch; its own due time is the value."""
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=60_000), topic="limited")
    later = clock.now_ms() + 90_000
    free = {"topic": "free", "payload": "x", "deliver_at": later}
    for wrong, message in (
        ({"deliver_at": later}, rf"line 3: deliver_at={later}: a delay of 90000 ms is longer than .*=60000 .*limited"),
        ({"deliver_after": "2m"}, "line 3: deliver_after='2m': a delay of 120000 ms is longer"),
    ):
        content = lines(free, {"topic": "limited", "payload": "x"}, {"topic": "limited", "payload": "x", **wrong}, free)
        work = Import(Operations(store))
        with pytest.raises(InvalidMessage, match=message):
            work.run(source(content.encode()))
        assert (work.messages, work.began_to) == (0, 0)
        assert list(store.topics()) == []


def test_an_import_that_was_broken_off_stores_what_is_missing_under_the_same_name(
    store: DelayedStore, clock: ManualClock
) -> None:
    """Wherever between its commits it ended; without a name it says which lines may be stored."""
    due_ms = clock.now_ms() + 60_000
    records = [{"topic": f"t{n % 2}", "payload": str(n), "deliver_at": due_ms + n % 3 * 86_400_000} for n in range(20)]
    content = lines(*records).encode()
    for at in (1, 3, 6, 9, 12, 15, 18):
        left = at

        def fail() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise StoreFull(store.path, "no room, says the test")

        work = Import(Operations(store), batch_messages=6, once="nightly")
        arm("commit.before", fail)
        try:
            work.run(io.BytesIO(content))
        except StoreFull:
            assert work.began_to > work.lines
        finally:
            disarm()
    work = Import(Operations(store), once="nightly")
    work.run(io.BytesIO(content))
    assert work.messages == 20
    assert work.stored_before > 0
    again = Import(Operations(store), once="nightly")
    again.run(io.BytesIO(content))
    assert (again.messages, again.stored_before) == (20, 20)
    for topic in (0, 1):
        found = sorted(int(each.payload) for each in store.topic(f"t{topic}").scheduled())
        assert found == list(range(topic, 20, 2))


def test_a_due_time_before_2001_is_taken_where_it_is_asked_for(path: Path, file: Path) -> None:
    """A line in seconds is refused with what it was meant to be; with --allow-past it is due at once."""
    file.write_text(lines({"topic": "t", "payload": "x", "deliver_at": 1_795_251_600}))
    said = refused("import", path, file)
    assert "line 1: deliver_at=1795251600" in said
    assert "2026-11-21T09:00:00Z" in said
    assert json_of("import", path, file, "--allow-past", "--once", "n")["messages"] == 1
    assert json_of("import", path, file, "--allow-past", "--once", "n")["stored_before"] == 1
    assert [m["payload"] for m in json_lines_of("receive", "--create", path, "t", "s")] == ["x"]


def test_options_for_lines_are_refused_with_a_calendar_or_an_archive(path: Path, file: Path) -> None:
    """They would say something of lines that are not there."""
    assert "--once='n': is for JSON lines; --ics is given too" in refused("import", path, file, "--ics", "--once", "n")
    assert "--allow-past" in refused("import", path, "--parquet", file, "--allow-past")


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


def test_lines_with_keys_are_stored_once_or_replace(path: Path, file: Path) -> None:
    """However often they are imported; a number and a key do not go together, and a wrong field is named."""
    file.write_text(
        lines(
            {"topic": "t", "payload": "a", "deliver_after": "2h", "dedup_key": "k", "dedup_for": "3h"},
            {"topic": "t", "payload": "b", "deliver_after": "2h", "dedup_key": "k"},
            {"topic": "t", "payload": "c", "deliver_after": "2h", "dedup_key": "l", "replace": True},
            {"topic": "t", "payload": "d", "deliver_after": "3h", "dedup_key": "l", "replace": True},
        )
    )
    for _ in range(2):
        json_of("import", path, file)
        assert [found["payload"] for found in json_lines_of("scheduled", path, "t")] == ["a", "d"]
    assert "line 1: dedup_key='k'" in refused("import", path, file, "--once", "n")
    for wrong in ({"dedup_for": 3}, {"replace": True}, {"replace": "no", "dedup_key": "k"}, {"dedup_key": ""}):
        file.write_text(lines({"topic": "t", "payload": "x", **wrong}))
        assert f"line 1: {next(iter(wrong))}" in refused("import", path, file)
