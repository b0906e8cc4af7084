"""A store is restored to a disk that its days do not fit on: those far off, or over, stay in the new prefix."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import ForkFound, InvalidArgument, ReplicaDamaged, ReplicaRefused, StoreFull
from duelog.replica.bucket import Bucket, Content
from duelog.replica.manifest import ReplicaFile, read_manifest
from duelog.replica.pruning import prune
from duelog.replica.remote_days import choose, files_by_day
from duelog.replica.restoring import Restored, restore
from duelog.store.codec.format import PartitionRecord, PartitionState
from tests.conftest import OpenStore
from tests.duelog.busy_store import BusyStore, Twin, assert_is
from tests.duelog.replica.faulty import ship, shipping_of
from tests.duelog.replica.test_tiers import CONFIG, DAY_MS, _small, away, filled, passed, received, settle
from tests.proof import length
from tests.tools.command_line import DUELOG, json_of, ok, run

__all__ = ["_small"]

RESTORES = length("DUELOG_REMOTE_RESTORES", 24, 200)
A_STORE = 4


def remote(old: str, new: str, path: Path, clock: ManualClock, most: int = 1, group: int | None = None) -> Restored:
    """Restore the copy `old` to a disk of `most` bytes."""
    return restore(Bucket(old), path, home=Bucket(new), max_local_bytes=most, now_ms=clock.now_ms(), group=group)


@pytest.mark.series
@pytest.mark.parametrize("seed", range(-(-RESTORES // A_STORE)))
def test_a_restore_at_any_group_with_days_away_is_what_the_store_had_then(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it needs the prefix before, and pruning the new one takes nothing of it; nor does another restore."""
    random = Random(seed)
    monkeypatch.setattr("duelog.replica.shipping.MANIFEST_MS", random.choice((1_000, 7_200_000)))
    old = (tmp_path / "old").as_uri()
    most = random.choice((None, 1))
    busy = BusyStore(tmp_path / "store", seed, replica=old, ship_bytes=1 << 16, max_local_bytes=most)
    moments: list[tuple[int, Twin]] = []
    for _ in range(40):
        busy.act(random.randrange(1, 4))
        if random.random() < 0.4:
            ship(busy.store)
        if random.random() < 0.2:
            settle(busy.store)
        if random.random() < 0.1:
            busy.reopen()
        moments.append((shipping_of(busy.store)._the_source().next_place() - 1, busy.twin()))
    ship(busy.store)
    busy.store.close()
    config = replace(busy.config, max_clock_jump_ms=None, max_local_bytes=1)
    chosen = [*random.sample(moments[10:], A_STORE - 1), moments[-1]]
    urls = [(tmp_path / f"new-{number}").as_uri() for number in range(A_STORE)]
    left = 0
    for number, (place, twin) in enumerate(chosen):
        clock = ManualClock(twin.now_ms)
        left += remote(old, urls[number], tmp_path / f"restored-{number}", clock, group=place).away_bytes
    assert left
    shutil.rmtree(tmp_path / "old")
    for number, (_, twin) in enumerate(chosen):
        path, mine = tmp_path / f"restored-{number}", replace(config, replica=urls[number])
        with DelayedStore.open(path, mine, clock=ManualClock(twin.now_ms)) as store:
            settle(store)
            prune(Bucket(urls[number]), twin.now_ms, 0, making=1)
        restore(Bucket(urls[number]), tmp_path / f"whole-{number}")
        assert_is(tmp_path / f"whole-{number}", twin, replace(config, replica=None, max_local_bytes=None))
        assert_is(path, twin, mine)


def test_what_came_after_the_manifest_is_in_the_rest_of_a_day(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """Sends and cancels of the log behind it need nothing of the day's objects, which each come once it begins."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    store = open_store(config=replace(CONFIG, replica=old, max_local_bytes=None))
    topic = store.topic("t")
    topic.subscribe("s").close()
    ids = topic.send_batch([Message(b"before %d" % n, deliver_after=5 * 3600 + n) for n in range(300)])
    settle(store)
    topic.send_batch([Message(b"after %d" % n, deliver_after=5 * 3600 + n) for n in range(300)])
    assert topic.cancel(ids[0])
    ship(store)
    store.close()
    restored = remote(old, new, tmp_path / "restored", clock)
    shutil.rmtree(tmp_path / "old")
    assert restored.away_bytes
    assert not list((restored.path / "partitions").glob("*/g*"))
    copy = open_store(restored.path, replace(CONFIG, replica=new))
    assert len(away(copy)) == 1
    passed(copy, clock, 7)
    expected = [b"before %d" % n for n in range(1, 300)] + [b"after %d" % n for n in range(300)]
    assert received(copy) == sorted(expected)


def test_a_store_six_times_the_disk_is_restored_to_it(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """The disk holds three of its twenty days; all come in time."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    store = open_store(config=replace(CONFIG, replica=old))
    store.topic("t").subscribe("s").close()
    for day in range(20):
        body = bytes(50_000)
        store.topic("t").send_batch(
            [Message(body + b"%d %d" % (day, n), deliver_after=(day + 3) * 3600 + n) for n in range(40)]
        )
        settle(store)
    store.close()
    manifest = read_manifest(Bucket(old), Bucket(old).manifests()[-1])
    day_bytes = max(sum(file.size for file in files) for files in files_by_day(manifest).values())
    whole = sum(file.size for file in manifest.files)
    disk = 3 * day_bytes
    assert disk < whole / 6
    with patch("duelog.store.files.system_errors.free_bytes", lambda path: disk):
        with pytest.raises(StoreFull, match=f"to restore: {whole} bytes needed"):
            restore(Bucket(old), tmp_path / "restored")
        path = remote(old, new, tmp_path / "restored", clock).path
    shutil.rmtree(tmp_path / "old")
    assert sum(file.stat().st_size for file in (path / "partitions").rglob("data.mdb")) < disk
    copy = open_store(path, replace(CONFIG, replica=new))
    assert len(away(copy)) == 20
    passed(copy, clock, 24)
    assert len(received(copy)) == 800


def test_days_that_are_over_go_before_far_ones_and_one_that_has_begun_stays() -> None:
    """The last of those that are over first, then the farthest; only as many as are too much."""
    now_ms, size = 100 * DAY_MS, 1_000

    def day(number: int) -> int:
        return number * DAY_MS

    def record(number: int, state: PartitionState) -> PartitionRecord:
        return PartitionRecord(day(number + 1), 1, state, 0, 0)

    records = {day(n): record(n, PartitionState.CLOSED) for n in (90, 91)}
    records |= {day(n): record(n, PartitionState.OPEN) for n in (99, 100, 101, 105, 200)}
    records[day(92)] = record(92, PartitionState.DELETING)
    numbers = (90, 91, 92, 99, 100, 105, 200, 300)  # of the last the registration is in the log
    days = {day(n): [_file(day(n), size)] for n in numbers}
    order: list[int] = []
    for kept in range(len(days) - 1, -1, -1):
        chosen = choose(days, records, kept * size, now_ms)
        order += [start_ms // DAY_MS for start_ms in chosen - {each * DAY_MS for each in order}]
    assert order == [91, 90, 300, 200, 105]


def _file(start_ms: int, size: int) -> ReplicaFile:
    return ReplicaFile(start_ms, 1, 1, "files/x.mdb", size, 0)


@pytest.mark.kill
def test_a_restore_that_is_killed_as_days_are_left_away_is_given_again(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """To the same prefix, where some files lie already."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    store = open_store(config=replace(CONFIG, replica=old, partition_ms=DAY_MS))
    store.topic("t").subscribe("s").close()
    for day in range(5):
        store.topic("t").send(b"%d" % day, deliver_after=(day + 1) * 1_000_000_000)
    settle(store)
    store.close()
    target = tmp_path / "restored"
    command = [*DUELOG, "restore", old, str(target), "--replica", new, "--max-local-bytes", "1"]
    for point in ("away.staged:1", "away.gone:2", "away.staged:4", "wal.applied:1", "wal.released:1"):
        child = subprocess.run(command, env={**os.environ, "DUELOG_FAILPOINT": point}, capture_output=True, check=False)
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert not target.exists()
    ok("restore", old, target, "--replica", new, "--max-local-bytes", "1", "--check")
    shutil.rmtree(tmp_path / "old")
    copy = open_store(target, replace(CONFIG, replica=new))
    assert len(away(copy)) == 5
    clock.advance(6_000_000_000 * 1_000)
    for _ in range(4):
        copy.tick()
    assert received(copy) == [b"%d" % day for day in range(5)]


@pytest.mark.fault
def test_a_damaged_file_of_a_far_day_is_named_and_nothing_is_left(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """As of any other day."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    store = filled(open_store, replace(CONFIG, replica=old))
    store.close()
    file = read_manifest(Bucket(old), Bucket(old).manifests()[-1]).files[-1]
    content = (tmp_path / "old" / file.name).read_bytes()
    (tmp_path / "old" / file.name).write_bytes(content[:-1] + bytes((content[-1] ^ 1,)))
    for number in Bucket(old).manifests()[:-1]:
        (tmp_path / "old" / "snap" / f"{number:016d}").unlink()
    with pytest.raises(ReplicaDamaged, match=f"{old}.*{file.name} does not match"):
        remote(old, new, tmp_path / "restored", clock)
    assert [path.name for path in tmp_path.iterdir() if "restored" in path.name] == []


@pytest.mark.fault
def test_a_file_that_the_new_prefix_does_not_have_whole_is_named(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read back from there: from then on it is the only one."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    filled(open_store, replace(CONFIG, replica=old)).close()
    put = Bucket.put

    def put_half(bucket: Bucket, name: str, content: Content | Path) -> None:
        put(bucket, name, content.read_bytes()[:-4_096] if isinstance(content, Path) else content)

    monkeypatch.setattr(Bucket, "put", put_half)
    with pytest.raises(ReplicaDamaged, match=f"{new}: files/.* does not match"):
        remote(old, new, tmp_path / "restored", clock)


def test_a_prefix_that_is_in_use_is_refused_before_any_file_is_read(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """That of the copy itself, one of another store, and one that has a log of this store."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    store = filled(open_store, replace(CONFIG, replica=old))
    store.close()
    with pytest.raises(InvalidArgument, match="expected a new prefix"):
        remote(old, old, tmp_path / "restored", clock)
    other = DelayedStore.open(tmp_path / "other", StoreConfig(partition_ms=DAY_MS, replica=new), clock=clock)
    other.close()
    with pytest.raises(ReplicaRefused, match="is the copy of store"):
        remote(old, new, tmp_path / "restored", clock)
    shutil.rmtree(tmp_path / "new")
    first = remote(old, new, tmp_path / "restored", clock).path
    ship(copy := open_store(first, replace(CONFIG, replica=new)))
    copy.close()
    with pytest.raises(ForkFound):
        remote(old, new, tmp_path / "again", clock)
    assert run("restore", old, tmp_path / "again", "--max-local-bytes", 1).exit_code == 2
    assert not (tmp_path / "again").exists()


def test_the_command_says_how_much_stays_away(open_store: OpenStore, clock: ManualClock, tmp_path: Path) -> None:
    """Of days that are far by the system's clock."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    store = open_store(config=replace(CONFIG, replica=old))
    store.topic("t").send(b"x", deliver_after=10 * 365 * 86_400)
    settle(store)
    store.close()
    answer = json_of("restore", old, tmp_path / "restored", "--replica", new, "--max-local-bytes", 1)
    assert answer["away_bytes"] > 0
