"""Scanning sealed generations: every message comes once, as it was sent; what is damaged comes with its reason."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from duelog.partitions.timespan import directory_name
from duelog.store.codec import format as fmt
from duelog.store.codec.body import decode_body
from duelog.store.codec.format import run_key
from duelog.store.codec.run import PackedRun, Run
from duelog.store.env.environment import Environment
from duelog.store.errors import BrokenInvariant, DamagedStore, InvalidArgument
from duelog.tools.columns.scan_arrow import HEADER_COLUMNS, MESSAGES, read_bodies, scan_messages
from duelog.tools.columns.scan_rows import Batch, LogRange, Piece, Sizes, Slice, Wanted, plan_scan
from duelog.tools.columns.sealed import identity_of, open_generation, sealed_generations
from tests.conftest import HOUR_MS
from tests.duelog.writing_process import WritingProcess
from tests.proof import length
from tests.tools.closed_days import DAY_MS, FIRST_MS, TOPICS, Built, Sent, build

CANCELLED = 40


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A store of three closed days, which tests do not change."""
    return build(tmp_path_factory.mktemp("scan") / "store", cancelled=CANCELLED)


def rows_of(plan: list[Slice], wanted: Wanted | None = None, **options: Any) -> list[dict[str, Any]]:
    """The rows of all slices."""
    return [
        row for part in plan for batch in scan_messages(part, wanted=wanted, **options) for row in batch.to_pylist()
    ]


def as_sent(row: dict[str, Any]) -> Sent:
    """The message that a row is of."""
    values = {**row, "properties": dict(row["properties"])}
    return Sent(*(values[name] for name in Sent._fields))


def test_every_sealed_message_comes_once_and_as_it_was_sent(built: Built) -> None:
    """Payload, key, properties and times of each, in append order of its log."""
    rows = rows_of(plan_scan(built.path))
    assert sorted(map(as_sent, rows), key=str) == sorted(built.sealed, key=str)
    places = [(row["partition"], row["topic_id"], row["ledger_id"], row["entry_id"]) for row in rows]
    assert places == sorted(places)
    assert all(row["reason"] is None and not row["dropped"] and not row["conditional"] for row in rows)


def test_headers_alone_say_the_same_as_whole_entries(built: Built) -> None:
    """The columns of a scan of headers are those of the scan of everything."""
    plan = plan_scan(built.path, claims=True)
    columns = [name for name in MESSAGES.names if name in HEADER_COLUMNS]
    narrow = [row for part in plan for batch in scan_messages(part, columns) for row in batch.to_pylist()]
    assert narrow == [{name: row[name] for name in columns} for row in rows_of(plan)]


@pytest.mark.parametrize(("entries", "size"), [(1, 1 << 30), (77, 1 << 30), (500, 1 << 30), (1 << 20, 20_000)])
def test_slices_of_any_size_give_the_same_rows(built: Built, entries: int, size: int) -> None:
    """Where a log is cut, also inside a run, or a batch ends, changes nothing."""
    if entries == 1:
        plan = [part for part in plan_scan(built.path) if part.sealed.start_ms == FIRST_MS]
        plan = [part._replace(ranges=(each._replace(start=at, limit=at + 1),))
                for part in plan for each in part.ranges for at in range(0, each.limit)]  # fmt: skip
        whole = [row for row in rows_of(plan_scan(built.path)) if row["partition"] == directory_name(FIRST_MS)]
    else:
        plan = plan_scan(built.path, sizes=Sizes(entries, size))
        whole = rows_of(plan_scan(built.path))
        assert len(plan) > len(plan_scan(built.path))
        assert all(part.entries <= entries for part in plan)
    assert rows_of(plan) == whole
    assert rows_of(plan, rows=100) == whole


def test_what_is_not_wanted_is_not_planned(built: Built) -> None:
    """Topics, partitions and due times leave out logs and generations before anything is opened."""
    one = plan_scan(built.path, Wanted.of(topics=["shop/mail/reminders"]))
    assert {each.topic for part in one for each in part.ranges} == {TOPICS[1]}
    day = plan_scan(built.path, Wanted.of(partitions=[directory_name(FIRST_MS + DAY_MS)]))
    assert {part.sealed.start_ms for part in day} == {FIRST_MS + DAY_MS}
    late = plan_scan(built.path, Wanted.of(due_from_ms=FIRST_MS + DAY_MS, due_until_ms=FIRST_MS + 2 * DAY_MS))
    assert late == day
    assert plan_scan(built.path, Wanted.of(due_from_ms=FIRST_MS + 30 * DAY_MS)) == []
    assert plan_scan(built.path, Wanted.of(topics=["nobody"])) == []


def test_rows_are_cut_at_the_due_times_that_were_asked_for(built: Built) -> None:
    """The first instant belongs to it, the last does not; bodies go with their rows."""
    wanted = Wanted.of(due_from_ms=FIRST_MS + 3_600_000, due_until_ms=FIRST_MS + DAY_MS + 7_200_000)
    rows = rows_of(plan_scan(built.path, wanted), wanted)
    expected = [sent for sent in built.sealed if wanted.due_from_ms <= sent.due_ms < wanted.due_until_ms]
    assert {sent.due_ms for sent in expected} >= {wanted.due_from_ms}
    assert sorted(map(as_sent, rows), key=str) == sorted(expected, key=str)


def test_cancelled_messages_are_withdrawn(built: Built) -> None:
    """The slice carries the claims that main has of entries."""
    plan = plan_scan(built.path, claims=True)
    withdrawn = {(row["ledger_id"], row["entry_id"]) for row in rows_of(plan) if row["withdrawn"]}
    cancelled = {(sent.ledger_id, sent.entry_id) for sent in built.sent[:CANCELLED] if sent in built.sealed}
    assert withdrawn == cancelled
    assert withdrawn


def _damage(path: Path, needle: bytes) -> None:
    """Change a byte in the middle of `needle` wherever a file holds it: pages have earlier copies."""
    content, at = path.read_bytes(), len(needle) // 2
    assert needle in content
    path.write_bytes(content.replace(needle, needle[:at] + bytes([needle[at] ^ 1]) + needle[at + 1 :]))


def test_a_damaged_body_comes_with_its_reason_and_the_rest_goes_on(built: Built, tmp_path: Path) -> None:
    """One payload is changed on disk: that row has no payload but a reason, its header's columns, and no others."""
    store = shutil.copytree(built.path, tmp_path / "store")
    victim = next(sent for sent in built.sealed if len(sent.payload) == 300)
    part = next(part for part in plan_scan(store) if part.sealed.start_ms <= victim.due_ms < part.sealed.end_ms)
    _damage(part.sealed.path / "data.mdb", victim.payload)
    rows = rows_of(plan_scan(store))
    damaged = [row for row in rows if row["reason"] is not None]
    assert [(row["ledger_id"], row["entry_id"], row["due_ms"]) for row in damaged] == [victim[1:4]]
    assert damaged[0]["reason"] == "body does not match its checksum"
    assert damaged[0]["payload"] is None
    assert damaged[0]["properties"] is None
    assert len(rows) == len(built.sealed)


def test_a_run_that_cannot_be_read_is_one_row_without_a_due_time(built: Built, tmp_path: Path) -> None:
    """Its header is changed on disk: the ids after it are those they were."""
    store = shutil.copytree(built.path, tmp_path / "store")
    plan = plan_scan(store)
    with closing(lmdb.open(str(plan[0].sealed.path))) as environment, environment.begin(write=True) as raw:
        key = fmt.run_key(plan[0].ranges[0].ledger_id, 0)
        value = raw.get(key)
        assert value is not None
        raw.put(key, value[:24] + bytes([value[24] ^ 1]) + value[25:])
    rows = rows_of(plan_scan(store))
    bad = [row for row in rows if row["due_ms"] is None]
    assert len(bad) == 1
    assert bad[0]["reason"] == "run header does not match its checksum"
    assert not bad[0]["dropped"]
    assert len(rows) < len(built.sealed)
    some = Wanted.of(due_from_ms=1)
    assert all(row["reason"] is None for row in rows_of(plan_scan(store, some), some))


def test_a_dropped_body_is_gone_and_no_damage(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal ends, as compaction leaves them: a row without payload, and without a reason."""
    ends = Run.ends

    def without_the_first(run: Run) -> Any:
        found = ends(run).copy()
        if run.first_entry == 0:
            found[0] = 0
        return found

    monkeypatch.setattr(Run, "ends", without_the_first)
    rows = [row for row in rows_of(plan_scan(built.path)) if row["entry_id"] == 0]
    assert rows
    assert all(row["dropped"] and row["payload"] is None and row["reason"] is None for row in rows)
    assert all(row["due_ms"] is not None for row in rows)


def test_a_scan_until_before_from_is_refused() -> None:
    """With both fields; so are tables in Python, exports and Spark."""
    with pytest.raises(InvalidArgument, match="due_until_ms=5: is before due_from_ms=6"):
        Wanted.of(due_from_ms=6, due_until_ms=5)


def test_a_sealed_generation_is_read_beside_the_process_that_has_the_store_open(tmp_path: Path) -> None:
    """No lock is taken: a directory that may not be written to is read as well."""
    with WritingProcess(tmp_path / "store") as process:
        process.do("subscribe", "t", "slow")
        process.send("t", "x", 10, HOUR_MS)
        process.do("advance", 2 * HOUR_MS)
        found = sealed_generations(tmp_path / "store")
        before = sorted(path.name for path in found[0].path.iterdir())
        with (
            open_generation(found[0], identity_of(tmp_path / "store").store_id) as environment,
            environment.read() as raw,
        ):
            assert raw.raw.stat()["entries"] > 0
        assert sorted(path.name for path in found[0].path.iterdir()) == before


def test_a_generation_that_is_gone_or_another_is_refused(built: Built, tmp_path: Path) -> None:
    """Missing, grown, swapped and foreign directories are DamagedStore, not an empty result."""
    store = shutil.copytree(built.path, tmp_path / "store")
    store_id = identity_of(store).store_id
    first, second, third = sealed_generations(store)
    shutil.rmtree(first.path)
    with pytest.raises(DamagedStore, match="deleted or replaced"), open_generation(first, store_id):
        pass
    with pytest.raises(DamagedStore, match="registered"):
        sealed_generations(store)
    with (second.path / "data.mdb").open("ab") as file:
        file.write(bytes(4096))
    with pytest.raises(DamagedStore, match="bytes, was"), open_generation(second, store_id):
        pass
    with pytest.raises(DamagedStore, match="catalog says"), open_generation(third, b"x" * 16):
        pass
    shutil.copytree(third.path, first.path)
    swapped = first._replace(file_bytes=third.file_bytes)
    with pytest.raises(DamagedStore, match="catalog says"), open_generation(swapped, store_id):
        pass


def test_a_truncated_generation_does_not_kill_its_reader(built: Built, tmp_path: Path) -> None:
    """Pages that lie past the end of the file are found before LMDB maps them."""
    store = shutil.copytree(built.path, tmp_path / "store")
    path = sealed_generations(store)[0].path / "data.mdb"
    with path.open("r+b") as file:
        file.truncate(3 * 4096)
    sealed = sealed_generations(store)[0]
    with pytest.raises(DamagedStore, match="truncated"), open_generation(sealed, identity_of(store).store_id):
        pass


def test_only_a_reader_may_do_without_locks(tmp_path: Path) -> None:
    """An environment that writes has locks."""
    with pytest.raises(BrokenInvariant, match="without locks"):
        Environment(tmp_path / "e", name="e", create=True, lock=False)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
MAPS = st.dictionaries(TEXTS, TEXTS, max_size=3)
PAYLOADS = st.one_of(st.binary(max_size=20), st.sampled_from([255, 256, 65_535, 65_536]).map(bytes))
TIMES = st.one_of(st.just(1_790_000_000_000), st.integers(0, 2**64 - 1))
FIELDS = st.tuples(TIMES, PAYLOADS, st.none() | TEXTS, st.none() | MAPS, st.none() | st.just({"retries": 2}))


def usual(fields: tuple[Any, ...]) -> bytes:
    """A body as it is written: trailing nils left out."""
    values = list(fields)
    while values[-1] is None:
        values.pop()
    return msgpack.packb(values)


BODIES = st.one_of(
    FIELDS.map(usual),
    FIELDS.map(usual).map(lambda body: body[:-1]),
    FIELDS.map(usual).map(lambda body: body + b"\xc0"),
    FIELDS.map(lambda fields: msgpack.packb(list(fields))),
    st.binary(max_size=30),
)


def pieces(bodies: list[bytes], cuts: list[int], damaged: set[int]) -> list[Piece]:
    """Runs of some of the bodies each, with a bit flipped in the damaged ones."""
    found = []
    for start, limit in zip([0, *cuts], [*cuts, len(bodies)], strict=True):
        if start == limit:
            found.append(Piece(0, None, 1, start, 0, 1, "no run"))
            continue
        key = run_key(1, start)
        part = bodies[start:limit]
        value = bytearray(PackedRun(0, np.arange(start, limit), part).sealed(key))
        at = len(value) - sum(map(len, part))
        for number, body in enumerate(part):
            if start + number in damaged and body:
                value[at + len(body) // 2] ^= 4
            at += len(body)
        found.append(Piece(0, Run("e", key, bytes(value)), 1, start, 0, limit - start, None))
    return found


def one_by_one(piece: Piece) -> list[tuple[Any, ...]]:
    """(publish_ms, payload, key, properties, extra, whether there is a reason) of each body of a run."""
    if piece.run is None:
        return [(None, None, None, None, None, True)]
    found: list[tuple[Any, ...]] = []
    for _, body in piece.run.bodies():
        if body is None:
            found.append((None, None, None, None, None, False))
        elif not isinstance(body, bytes):
            found.append((None, None, None, None, None, True))
        else:
            try:
                publish_ms, payload, key, properties, extra = decode_body(body)
                if publish_ms > 2**63 - 1:
                    raise ValueError
            except ValueError:
                found.append((None, None, None, None, None, True))
                continue
            packed = None if extra is None else msgpack.packb(extra)
            found.append((publish_ms, payload, key, properties or {}, packed, False))
    return found


@pytest.mark.series
@settings(max_examples=length("DUELOG_BODIES", 100, 300), deadline=None)
@given(st.data())
def test_bodies_by_column_are_those_one_by_one(data: st.DataObject) -> None:
    """Usual and unusual forms, dropped and damaged ones, runs that cannot be read among them."""
    bodies = data.draw(st.lists(BODIES, min_size=1, max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(bodies)), max_size=3)))
    damaged = data.draw(st.sets(st.integers(0, len(bodies) - 1), max_size=2))
    found = pieces(bodies, cuts, damaged)
    columns = read_bodies(Batch(found, (LogRange(1, "t", 1, 0, len(bodies)),)))
    columns.payload.validate(full=True)
    columns.properties.validate(full=True)
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    got = [
        (publish, payload, key, None if properties is None else dict(properties), extra, reason is not None)
        for publish, payload, key, properties, extra, reason in rows
    ]
    assert got == [row for piece in found for row in one_by_one(piece)]
