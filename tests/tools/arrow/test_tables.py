"""Tables without Spark: what is pending is what the engine says, a view is of one point in time, files are whole."""

import math
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from duelog import DelayedStore, ManualClock, Message
from duelog.store.errors import ClosedError, InvalidArgument
from duelog.tools.arrow import NeedsArrow, open_tables
from duelog.tools.columns import scan_rows
from duelog.tools.columns.main_tables import TABLES
from duelog.tools.columns.scan_arrow import HEADER_COLUMNS, logs_now, pending_in, plan_pending, scan_pending
from duelog.tools.columns.scan_rows import Sizes, Wanted
from duelog.tools.columns.sealed import read_sealed
from duelog.tools.transfer.export_layout import open_export
from duelog.tools.transfer.parquet_export import export_store
from duelog.tools.transfer.parquet_import import import_export
from tests.conftest import HOUR_MS
from tests.duelog.writing_process import START_MS, WritingProcess
from tests.tools.arrow.every_table import CONFIG, NOW_MS, TOPICS, Filled, fill, listed
from tests.tools.command_line import ok, refused

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """A store with rows in every table, which tests do not change."""
    return fill(tmp_path_factory.mktemp("arrow") / "store")


def as_listed(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of `pending` in the engine's form."""
    names = ("topic", "ledger_id", "entry_id", "due_ms", "payload", "key")
    return sorted(((*(row[name] for name in names), dict(row["properties"])) for row in rows), key=lambda row: row[1:3])


@pytest.mark.parametrize("seed", range(2))
def test_what_is_pending_is_what_the_engine_says(seed: int, tmp_path: Path) -> None:
    """Inline too, without what was cancelled, replaced or fired; with headers alone, and whatever a batch holds."""
    made = fill(tmp_path / "store", seed)
    with open_tables(made.path, as_of_ms=made.now_ms) as tables:
        rows = tables.table("pending").to_pylist()
        headers = tables.table("pending", [name for name in TABLES["pending"].names if name in HEADER_COLUMNS])
    assert as_listed(rows) == made.pending
    assert any(row["partition"] is None for row in rows)
    assert any(row["conditional"] for row in rows)
    assert all(row["reason"] is None and not row["withdrawn"] for row in rows)
    assert headers.to_pylist() == [{name: row[name] for name in headers.column_names} for row in rows]
    plan = plan_pending(made.path, as_of_ms=made.now_ms, sizes=Sizes(17))
    sliced = [each for part in plan for batch in scan_pending(part, rows=5) for each in batch.to_pylist()]
    assert sorted(sliced, key=str) == sorted(rows, key=str)


def test_failed_deliveries_and_dead_letters_are_rows(filled: Filled, tmp_path: Path) -> None:
    """Counted as the store does; a letter has all that `store.dead_letters` says."""
    with open_tables(filled.path) as tables:
        attempts = tables.table("attempts").to_pylist()
        letters = tables.table("dead_letters").to_pylist()
    copy = shutil.copytree(filled.path, tmp_path / "copy")
    with DelayedStore.open(copy, CONFIG, clock=ManualClock(filled.now_ms)) as store:
        expected = list(store.dead_letters())
        with store.topic(TOPICS[0]).subscribe("fails", type="shared") as consumer:
            failed = {tuple(m.position): m.redelivery_count for m in consumer.receive(1_000) if m.redelivery_count}
    assert {(row["topic"], row["subscription"]) for row in attempts} == {(TOPICS[0], "fails")}
    assert {(row["ledger_id"], row["entry_id"]): row["failed"] for row in attempts} == failed
    assert len(failed) == 6
    assert len(expected) == 3
    for row, letter in zip(letters, expected, strict=True):
        assert (row["ledger_id"], row["entry_id"]) == tuple(letter.position)
        assert (row["message_ledger"], row["message_entry"]) == tuple(letter.message_id)
        assert (row["cause"], dict(row["properties"]), row["reason"]) == (letter.reason, letter.properties, None)
        for name in ("dead_letter_topic", "topic", "subscription", "due_ms", "publish_ms", "key", "payload", "attempts",
                     "first_ms", "last_ms", "dead_ms"):  # fmt: skip
            assert row[name] == getattr(letter, name)


def test_an_export_has_the_same_tables(filled: Filled, tmp_path: Path) -> None:
    """Each row of each table, whichever of the two is opened; none is empty."""
    export_store(filled.path, tmp_path / "export", pending=True)
    with open_tables(filled.path) as here:
        expected = {name: here.table(name) for name in here.names}
    with open_tables(tmp_path / "export") as there:
        for name, table in expected.items():
            found = there.table(name)
            assert found.schema == table.schema == TABLES[name]
            assert found.num_rows, name
            assert sorted(found.to_pylist(), key=str) == sorted(table.to_pylist(), key=str)
        narrow = there.table("messages", ["topic", "entry_id"], topics="shop/mail/reminders", due_until_ms=NOW_MS + 1)
        assert narrow.schema.names == ["topic", "entry_id"]


def test_rows_are_narrowed_as_they_are_asked_for(filled: Filled) -> None:
    """By topic, partition and due time; of a table without such a column, not."""
    due: dict[str, Any] = {"due_from_ms": filled.now_ms + HOUR_MS, "due_until_ms": filled.now_ms + 20 * HOUR_MS}
    with open_tables(filled.path) as tables:
        every = tables.table("pending").to_pylist()
        day = next(row["partition"] for row in every if row["partition"])
        assert tables.table("pending", topics=TOPICS[1]).to_pylist() == [r for r in every if r["topic"] == TOPICS[1]]
        assert tables.table("pending", partitions=day).to_pylist() == [r for r in every if r["partition"] == day]
        inside = [row for row in every if due["due_from_ms"] <= row["due_ms"] < due["due_until_ms"]]
        assert tables.table("pending", **due).to_pylist() == inside
        assert inside not in ([], every)
        assert tables.table("subscriptions", **due).num_rows == tables.table("subscriptions").num_rows
        for wrong, field in (("nothing", "table"), ("pending", "columns")):
            with pytest.raises(InvalidArgument, match=field):
                tables.table(wrong, ["due"])


def test_batches_are_bounded_and_read_when_they_are_asked_for(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends at its bytes; nothing is read before the first is asked for, and one behind the last at most."""
    monkeypatch.setattr(scan_rows, "BATCH_BYTES", 1_000)
    made: list[int] = []
    real = scan_rows.Batch.__init__

    def counted(self: Any, *arguments: Any) -> None:
        made.append(1)
        real(self, *arguments)

    monkeypatch.setattr(scan_rows.Batch, "__init__", counted)
    with open_tables(filled.path) as tables:
        for name in ("messages", "pending"):
            made.clear()
            reader = tables.batches(name)
            assert made == []
            batches = [reader.read_next_batch(), reader.read_next_batch()]
            few = len(made)
            batches += list(reader)
            assert few < len(made)
            assert pa.Table.from_batches(batches).equals(tables.table(name))
        left = tables.batches("messages")
        left.read_next_batch()
    with pytest.raises(ClosedError, match=f"view of the tables of {filled.path} is closed"):
        left.read_next_batch()


@pytest.mark.parametrize("name", ["messages", "partitions", "dead_letters"])
def test_a_wrong_bound_is_refused_by_its_field_whatever_the_table(filled: Filled, name: str) -> None:
    """None was in NaN, silently; an error of Python's or Arrow's own came of text and datetimes."""
    with open_tables(filled.path) as tables:
        whole = tables.table(name, due_from_ms=0.0, due_until_ms=np.int64(1 << 50))
        assert whole.equals(tables.table(name))
        wrong: list[Any] = [math.nan, "2100-01-01T00:00:00Z", True, datetime.now(UTC)]
        for field in ("due_from_ms", "due_until_ms"):
            for value in wrong:
                with pytest.raises(InvalidArgument, match=f"^{field}=.*: expected milliseconds since 1970"):
                    tables.table(name, **{field: value})
        for field in ("topics", "partitions"):
            with pytest.raises(InvalidArgument, match=f"^{field}=5: expected names"):
                tables.table(name, **dict[str, Any]({field: 5}))


def test_a_view_is_of_one_point_in_time(tmp_path: Path) -> None:
    """Another process sends, fires and acknowledges meanwhile: every table says what was when the view began."""
    with WritingProcess(tmp_path / "store") as process:
        process.do("subscribe", "t", "s")
        process.send("t", "a", 10, 20, HOUR_MS, 5 * HOUR_MS)
        with open_tables(tmp_path / "store", as_of_ms=START_MS) as tables:
            process.send("t", "new", 15, HOUR_MS)
            process.do("advance", HOUR_MS)
            process.do("drain", "t", "s")
            assert [row["payload"] for row in tables.table("pending").to_pylist()] == [b"a"] * 4
            assert [tables.table(name).num_rows for name in ("markers", "messages", "subscriptions")] == [0, 0, 1]
        with open_tables(tmp_path / "store") as tables:
            assert [row["payload"] for row in tables.table("pending").to_pylist()] == [b"a"]


def test_a_message_that_is_moved_while_the_view_begins_is_in_it_once(path: Path) -> None:
    """At its new time, also in a partition that was not there; what is sent meanwhile is not."""
    clock = ManualClock(NOW_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        first, second, _ = store.topic("t").send_batch([Message(b"%d" % n, deliver_after=3_600) for n in range(3)])
    known = logs_now(path)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        store.topic("t").reschedule(first, deliver_after=7_200)
        store.topic("t").reschedule(second, deliver_after=90 * 3_600)
        store.topic("t").send(b"sent meanwhile", deliver_after=3_600)
        expected = [each for each in listed(store) if each[4] != b"sent meanwhile"]
    plan = read_sealed(path, lambda raw, identity, _: pending_in(raw, path, identity, known, Wanted()))
    rows = [each for part in plan for batch in scan_pending(part) for each in batch.to_pylist()]
    assert as_listed(rows) == expected
    assert len(expected) == 3


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_is_written_whole_or_not_at_all(filled: Filled, tmp_path: Path, suffix: str) -> None:
    """The file has the table; where writing fails, the file before it stays, and nothing beside it."""
    target = tmp_path / f"pending.{suffix}"
    with open_tables(filled.path, as_of_ms=filled.now_ms) as tables:
        assert tables.write("pending", target, topics=TOPICS[0]) == tables.table("pending", topics=TOPICS[0]).num_rows
        assert tables.write("pending", target) == len(filled.pending)
        found = pq.read_table(target) if suffix == "parquet" else pa.ipc.open_file(target).read_all()
        assert found.equals(tables.table("pending"))
        before = target.read_bytes()
        tables._read = lambda *_: iter([1])
        with pytest.raises(Exception, match="RecordBatch"):
            tables.write("pending", target)
        for wrong in (tmp_path / "pending.csv", filled.path / "x.parquet"):
            with pytest.raises(InvalidArgument, match="path"):
                tables.write("pending", wrong)
    assert (target.read_bytes(), list(tmp_path.iterdir())) == (before, [target])


def test_the_command_writes_a_table(filled: Filled, tmp_path: Path) -> None:
    """The same as the call; a name that there is not is refused by name."""
    target = tmp_path / "letters.parquet"
    ok("table", filled.path, "dead_letters", "-o", target, "--column", "cause", "--topic", TOPICS[0])
    assert pq.read_table(target).to_pydict() == {"cause": ["redeliveries"] * 3}
    assert "table='nothing'" in refused("table", filled.path, "nothing", "-o", target)
    ok("export", filled.path, tmp_path / "export", "--pending")
    assert pq.read_table(tmp_path / "export" / "pending.parquet").num_rows
    ok("table", tmp_path / "export", "pending", "-o", target, "--until", filled.now_ms + HOUR_MS)


def test_what_is_pending_is_imported_and_due_when_it_was(filled: Filled, tmp_path: Path) -> None:
    """Beside what has fired, which is due at once; ids are new, all else is equal."""
    export_store(filled.path, tmp_path / "export", pending=True)
    expected = sorted((row[0], *row[3:]) for row in filled.pending if row[4] != b"soon")  # by now these are due
    with DelayedStore.open(tmp_path / "copy", CONFIG, clock=ManualClock(filled.now_ms)) as store:
        done = import_export(store, open_export(tmp_path / "export"))
        assert (done.pending, done.damaged) == (len(expected), 0)
        assert sorted((row[0], *row[3:]) for row in listed(store)) == expected
        assert list(store.check(deep=True)) == []
        assert all(set(topic.subscriptions()) >= {"slow"} for topic in store.topics())
    said = ok("import", tmp_path / "shell", "--parquet", tmp_path / "export")
    assert f"but for {len(expected)} that are due when they were" in said


def test_data_frames_keep_whole_numbers(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of ids with nulls is none of floats; where polars is not installed, the error says so."""
    pytest.importorskip("pandas")
    with open_tables(filled.path, as_of_ms=filled.now_ms) as tables:
        frame = tables.pandas("pending")
        assert str(frame["generation"].dtype) == "Int64"
        assert frame["generation"].isna().any()
        assert sorted(frame["due_ms"]) == sorted(row[3] for row in filled.pending)
        assert set(map(type, frame["properties"])) == {dict}
        monkeypatch.setitem(sys.modules, "polars", None)
        with pytest.raises(NeedsArrow, match="pip install polars"):
            tables.polars("pending")


def test_without_pyarrow_the_error_names_the_extra(filled: Filled, tmp_path: Path) -> None:
    """In Python and on the command line, on one line; importing is no error."""
    program = f"""
import sys
sys.path.append({str(ROOT)!r})
sys.modules["pyarrow"] = None
from duelog.store.errors import DuelogError
from duelog.tools.arrow import open_tables
from duelog.tools.cli.main import main
try:
    open_tables({str(filled.path)!r})
except DuelogError as error:
    print(error, file=sys.stderr)
for arguments in (["table", {str(filled.path)!r}, "pending", "-o", "x.parquet"], ["export", {str(filled.path)!r}, "e"]):
    sys.argv = ["duelog", *arguments]
    try:
        main()
    except SystemExit as error:
        assert error.code == 2
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path)
    said = done.stderr.splitlines()
    assert [line.endswith("pip install 'duelog[arrow]'") for line in said] == [True] * 3
    assert [line.split()[0] for line in said] == ["open_tables", "duelog:", "duelog:"]
    assert list(tmp_path.iterdir()) == []
