"""What is shipped, how doubts are settled, who is refused, and what a bucket that is down does to a store: nothing."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self
from unittest.mock import patch

import pytest

from duelog import DelayedStore, Finding, ManualClock, Message, StoreConfig, SystemClock
from duelog.errors import ClockJumped, ForkFound, InvalidArgument, ReplicaRefused, ReplicaUnreachable
from duelog.metrics import OF_REPLICA
from duelog.replica import identity, pruning
from duelog.replica.bucket import FILES, LOG, MANIFESTS, Bucket, Content, check_url, log_name, manifest_name
from duelog.replica.log_object import unpack
from duelog.replica.manifest import MAIN_START, Manifest, read_manifest
from duelog.replica.manifest_files import ManifestFiles
from duelog.replica.pruning import made_by, prune
from duelog.replica.shipping import Draft, Shipping
from duelog.store.errors import ReplicaDamaged, StoreFull
from duelog.tools.repair.repair_store import repair_store
from tests.conftest import START_MS, OpenStore, present
from tests.duelog.replica.faulty import (
    URL,
    FaultyBucket,
    log_of,
    manifested,
    random_faults,
    restored,
    ship,
    shipping_of,
    waiting,
)
from tests.duelog.side_by_side import crashed
from tests.duelog.upkeep.test_clock_rules import WallClock
from tests.proof import length

CONFIG = StoreConfig(replica=URL, wal_bytes=24 << 10)
PUTS = length("DUELOG_REPLICA_PUTS", 300, 10_000)


def of_copy(bucket: Bucket, path: Path, **moment: int) -> set[bytes]:
    """The payloads that wait in a restored copy."""
    restored(bucket, path, **moment)
    with DelayedStore.open(path, clock=ManualClock(START_MS)) as store:
        assert list(store.check(deep=True)) == []
        return waiting(store)


def shipped(store: DelayedStore, payload: bytes) -> None:
    """Send to a day to come, and ship."""
    store.topic("a").send(payload, deliver_after=86_400)
    ship(store)


@pytest.mark.series
def test_puts_that_go_wrong_put_each_group_into_the_log_once(bucket: FaultyBucket, store: DelayedStore) -> None:
    """Answers are lost, come late, or refuse what the client itself put: no group is missing, none is there twice."""
    bucket.faults = random_faults(7)
    places = set()
    while bucket.creations < PUTS:
        store.topic("a").send(b"x", deliver_after=100)
        places.add(shipping_of(store)._the_source().next_place() - 1)
        ship(store)
    shipped = [group.position for each in log_of(bucket) for group in each.raw]
    assert len(set(shipped)) == len(shipped)
    assert places <= set(shipped)


@pytest.mark.parametrize("fault", ["lost", "late", "twice"])
def test_a_put_whose_answer_is_lost_is_not_put_again(fault: str, bucket: FaultyBucket, store: DelayedStore) -> None:
    """The number is read back: the same bytes are there, or come meanwhile."""
    ship(store)
    before = len(bucket.numbers())
    bucket.faults = iter([fault])
    shipped(store, b"x")
    assert len(log_of(bucket)) == before + 1
    assert shipping_of(store).state().error is None


@pytest.mark.parametrize("who", ["another", "a copy of its machine as it ran"])
def test_a_number_that_another_writer_took_is_a_fork(
    who: str, bucket: FaultyBucket, store: DelayedStore, tmp_path: Path
) -> None:
    """Nothing is shipped any more, the store goes on, and every reader that comes later sees what was there."""
    shipped(store, b"1")
    last = log_of(bucket)[-1]
    taken = last._replace(seq=last.seq + 1, owner=who if who == "another" else last.owner)
    bucket.put(log_name(last.seq + 1), taken.pack())
    store.topic("a").send(b"2", deliver_after=100)
    with pytest.raises(ForkFound, match=log_name(last.seq + 1)):
        shipping_of(store).step()
    assert shipping_of(store).state().ended
    store.topic("a").send(b"3", deliver_after=100)
    shipping_of(store).step()
    assert len(bucket.numbers()) == last.seq + 1
    with pytest.raises(ForkFound, match="two writers"):
        restored(bucket, tmp_path / "restored")


def test_a_copy_of_the_directory_is_refused(bucket: FaultyBucket, tmp_path: Path, clock: ManualClock) -> None:
    """The original was opened since: only one of the two ships."""
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        store.topic("a").send(b"1", deliver_after=100)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        store.topic("a").send(b"2", deliver_after=100)
    with pytest.raises(ForkFound, match="shipped from elsewhere"):
        DelayedStore.open(tmp_path / "copy", CONFIG, clock=clock)
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"1", b"2"}


def test_a_directory_that_lies_behind_its_copy_is_refused(
    bucket: FaultyBucket, store: DelayedStore, tmp_path: Path, clock: ManualClock
) -> None:
    """A file system was set back: what the copy has would get the ids of other messages."""
    shipped(store, b"1")
    before = crashed(store, tmp_path / "before")
    shipped(store, b"2")
    with pytest.raises(ForkFound, match="older than its copy"):
        DelayedStore.open(before, CONFIG, clock=clock)


def test_two_stores_do_not_share_a_prefix(bucket: FaultyBucket, open_store: OpenStore, tmp_path: Path) -> None:
    """Nor does a store ship to what is no copy at all."""
    open_store(config=CONFIG)
    with pytest.raises(ReplicaRefused, match="is the copy of store"):
        open_store(tmp_path / "other", CONFIG)
    for content, says in ((b"{}", "cannot be read"), (b'{"format": 9, "crc": 1}', "checksum")):
        bucket.put(identity.STORE, content)
        with pytest.raises(ReplicaRefused, match=says):
            open_store(tmp_path / "third", CONFIG)


def test_a_restored_store_ships_to_a_new_prefix_only(
    bucket: FaultyBucket, store: DelayedStore, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the old one it would add another history."""
    shipped(store, b"1")
    restored(bucket, tmp_path / "restored")
    with pytest.raises(ForkFound, match="new prefix"):
        open_store(tmp_path / "restored", CONFIG)
    another = FaultyBucket()
    monkeypatch.setattr("duelog.replica.shipping.Bucket", lambda url: another)
    again = open_store(tmp_path / "restored", CONFIG)
    shipped(again, b"2")
    assert of_copy(another, tmp_path / "twice") == {b"1", b"2"}


def test_a_bucket_that_is_down_stops_nothing(
    bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, open_store: OpenStore
) -> None:
    """The store opens, sends and closes; what was not shipped is kept beside the log until it is."""
    bucket.is_down = True
    sent = set()
    for round_ in range(3):
        store = open_store(config=CONFIG)
        for number in range(60):
            sent.add(b"%d-%d" % (round_, number))
            store.topic("a").send(b"%d-%d" % (round_, number), deliver_after=1000 + 86_400 * (number % 5))
            store._engine.writer().apply_all() if number % 20 == 19 else None
        assert isinstance(shipping_of(store).error, ReplicaUnreachable)
        store.close()
    assert list((tmp_path / "store" / "wal").glob("*.kept"))
    bucket.is_down = False
    store = open_store(config=CONFIG)
    ship(store)
    assert shipping_of(store).error is None
    assert of_copy(bucket, tmp_path / "restored") == sent
    assert len(list((tmp_path / "store" / "wal").glob("*.kept"))) <= 3


def test_a_log_that_outgrows_its_space_goes_on_behind_a_gap(
    bucket: FaultyBucket, open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gap is told; what is before it and what is behind it can be restored, and nothing else is given for it."""
    store = open_store(config=StoreConfig(replica=URL, wal_bytes=64 << 10, replica_keep_bytes=1 << 20))
    shipped(store, b"first")
    first = log_of(bucket)[-1].end - 1
    bucket.is_down = True
    for number in range(40):
        store.topic("a").send(b"%d" % number + bytes(50_000), deliver_after=100)
    assert shipping_of(store).kept.lost
    bucket.is_down = False
    drafts, shipping = shipping_of(store)._manifests, shipping_of(store)
    shipping._manifests = None
    ship(store)
    assert "goes on with a new manifest" in caplog.text
    with pytest.raises(ReplicaRefused, match=f"never shipped.*--group {first} restores"):
        restored(bucket, tmp_path / "in-gap")
    assert of_copy(bucket, tmp_path / "before", group=first) == {b"first"}
    shipping._manifests, shipping._draft_at_s = drafts, 0
    ship(store)
    assert of_copy(bucket, tmp_path / "behind") == waiting(store)


def test_a_manifest_that_was_being_made_as_the_log_was_given_up_is_not_put(
    bucket: FaultyBucket, open_store: OpenStore, tmp_path: Path
) -> None:
    """A restore from it would need groups that were never shipped: the one after it is put."""
    store = open_store(config=StoreConfig(replica=URL, wal_bytes=64 << 10, replica_keep_bytes=1 << 20))
    shipped(store, b"first")
    shipping, manifests = shipping_of(store), bucket.manifests()
    draft = present(shipping._manifests).draft

    def given_up_meanwhile(before: Manifest | None) -> Draft | None:
        made = draft(before)
        bucket.is_down = True
        for number in range(40):
            store.topic("a").send(b"%d" % number + bytes(50_000), deliver_after=100)
        bucket.is_down = False
        shipping._ship()
        return made

    with patch.object(shipping._manifests, "draft", given_up_meanwhile):
        manifested(store)
    assert bucket.manifests() == manifests
    ship(store)
    assert of_copy(bucket, tmp_path / "behind") == waiting(store)


def test_a_file_that_the_bucket_has_is_not_uploaded_again(
    bucket: FaultyBucket, store: DelayedStore, clock: ManualClock
) -> None:
    """Of ten days only those that were sent to, and the main one, which says where the log begins."""
    store.topic("a").send_batch([Message(b"x", deliver_after=86_400 * day + 1) for day in range(10)])
    store._engine.writer().apply_all()
    clock.advance(timedelta(hours=2))
    ship(store)
    before = {each.name for each in bucket.listing(FILES)}
    store.topic("a").send(b"y", deliver_after=86_400 * 5)
    store._engine.writer().apply_all()
    clock.advance(timedelta(hours=2))
    ship(store)
    fresh = {each.name for each in bucket.listing(FILES)} - before
    newest = read_manifest(bucket, bucket.manifests()[-1])
    assert len(newest.files) == 11
    day_5_ms = START_MS // 86_400_000 * 86_400_000 + 5 * 86_400_000
    assert [file.start_ms for file in newest.files if file.name in fresh] == [MAIN_START, day_5_ms]


def test_every_moment_of_the_retention_can_be_restored_and_the_rest_goes(
    bucket: FaultyBucket, open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """Manifests, log objects and files before it are removed with a new manifest; the newest stays for ever."""
    store = open_store(config=StoreConfig(replica=URL, replica_retention_ms=timedelta(days=2)))
    ends: list[int] = []
    for day in range(8):
        shipped(store, b"%d" % day)
        ends.append(shipping_of(store).state().place - 1)
        clock.advance(timedelta(days=1))
    assert bucket.manifests()[0] > 3
    assert bucket.numbers()[0] >= read_manifest(bucket, bucket.manifests()[0]).first - 1
    named = {file.name for seq in bucket.manifests() for file in read_manifest(bucket, seq).files}
    assert {each.name for each in bucket.listing(FILES)} == named
    for day in (5, 6, 7):
        assert of_copy(bucket, tmp_path / str(day), group=ends[day]) == {b"%d" % each for each in range(day + 1)}
    with pytest.raises(ReplicaRefused, match="no manifest at or before"):
        restored(bucket, tmp_path / "old", group=ends[0])


def test_a_file_of_a_manifest_that_is_being_made_is_pruned_by_its_maker_alone(
    bucket: FaultyBucket, store: DelayedStore, clock: ManualClock
) -> None:
    """No manifest names it yet: `duelog replica prune`, and a leader of another epoch, leave it there for a day."""
    shipped(store, b"1")
    young = f"{FILES}/main-1-1-00000000{made_by(1)}"
    bucket.put(young, b"")
    for making in (None, 2):
        prune(bucket, clock.now_ms(), 0, making=making)
        assert bucket.get(young) == b""
    prune(bucket, clock.now_ms(), 0, making=1)
    assert bucket.get(young) is None


def test_a_leader_that_stood_still_for_days_as_it_pruned_removes_nothing_of_the_next_one(
    bucket: FaultyBucket, store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the manifests that it had read none named those files, and by its clock they were old."""
    shipped(store, b"1")
    name, read = f"{FILES}/main-1-1-00000000{made_by(2)}", pruning.read_manifests

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(days=2)

    def stands_still(of: Bucket) -> tuple[list[Manifest], list[ReplicaDamaged]]:
        found = read(of)
        bucket.put(name, b"")
        monkeypatch.setattr(pruning, "datetime", Later)
        return found

    monkeypatch.setattr(pruning, "read_manifests", stands_still)
    prune(bucket, clock.now_ms(), 0, making=1)
    assert bucket.get(name) == b""


def test_a_clock_far_ahead_prunes_nothing(bucket: FaultyBucket, tmp_path: Path) -> None:
    """It stops firing, too. Before, the next manifest had every other removed, and all before it of the log."""
    wall = WallClock(START_MS)
    with DelayedStore.open(tmp_path / "store", StoreConfig(replica=URL, background=False), clock=wall) as store:
        store.tick()
        for payload in (b"1", b"2"):
            store.topic("a").send(payload, deliver_after=86_400)
            store.save_manifest()
        kept = bucket.manifests()
        shipping = shipping_of(store)
        wall.set(START_MS + 400 * 86_400_000)
        with pytest.raises(ClockJumped):
            present(shipping._manifests).prune(present(shipping.manifest), wall.now_ms())
        wall.set(START_MS)
    assert bucket.manifests()[: len(kept)] == kept
    assert bucket.numbers()[0] == 1


def test_a_moment_is_restored_by_its_time(
    bucket: FaultyBucket, store: DelayedStore, clock: ManualClock, tmp_path: Path
) -> None:
    """Groups that were written by then, and none that came after."""
    times = []
    for number in range(5):
        shipped(store, b"%d" % number)
        times.append(clock.now_ms())
        clock.advance(1_000)
    assert of_copy(bucket, tmp_path / "restored", at_ms=times[2] + 500) == {b"0", b"1", b"2"}
    with pytest.raises(ReplicaRefused, match="no manifest at or before"):
        restored(bucket, tmp_path / "early", at_ms=START_MS - 1)


def test_a_damaged_file_is_passed_over_for_the_manifest_before(
    bucket: FaultyBucket, store: DelayedStore, clock: ManualClock, tmp_path: Path
) -> None:
    """It is named, and the log makes up for it; with no manifest whole nothing is restored."""
    shipped(store, b"1")
    clock.advance(timedelta(hours=2))
    store.topic("a").send(b"2", deliver_after=86_400)
    store.topic("b").send(b"")
    store._engine.writer().apply_all()
    clock.advance(timedelta(hours=2))
    ship(store)
    newest = read_manifest(bucket, bucket.manifests()[-1])
    (main,) = [file.name for file in newest.files if "main" in file.name]
    bucket.put(main, present(bucket.get(main))[:-1] + b"?")
    assert main in restored(bucket, tmp_path / "restored").passed_over[0]
    with DelayedStore.open(tmp_path / "restored", clock=clock) as again:
        assert waiting(again) == {b"1", b"2"}
    bucket.delete([file.name for seq in bucket.manifests() for file in read_manifest(bucket, seq).files])
    with pytest.raises(ReplicaDamaged, match="is missing"):
        restored(bucket, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_damaged_log_object_is_named_and_what_is_before_it_can_be_had(
    damage: str, bucket: FaultyBucket, store: DelayedStore, tmp_path: Path, clock: ManualClock
) -> None:
    """Nothing is restored as if it were not there, but on request."""
    for number in range(4):
        shipped(store, b"%d" % number)
    objects = log_of(bucket)
    name, before = log_name(objects[-2].seq), objects[-3].end - 1
    if damage == "missing":
        bucket.delete([name])
    else:
        content = present(bucket.get(name))
        bucket.put(name, content[:150] + bytes((content[150] ^ 1,)) + content[151:])
    with pytest.raises(ReplicaDamaged, match=f"{name} .*--group {before} restores"):
        restored(bucket, tmp_path / "restored")
    assert of_copy(bucket, tmp_path / "restored", group=before) == {b"0", b"1"}


def test_groups_before_a_damaged_one_of_the_same_object_can_be_had(
    bucket: FaultyBucket, store: DelayedStore, tmp_path: Path
) -> None:
    """Each group has a checksum of its own."""
    shipped(store, b"-")
    for number in range(4):
        store.topic("a").send(b"%d" % number, deliver_after=86_400)
    ship(store)
    name, group = log_name(log_of(bucket)[-1].seq), log_of(bucket)[-1].raw[-2]
    content = present(bucket.get(name))
    at = content.index(bytes(group.content)) + len(group.content) - 1
    bucket.put(name, content[:at] + bytes((content[at] ^ 1,)) + content[at + 1 :])
    with pytest.raises(ReplicaDamaged, match=f"{name} .*in group {group.position}; --group {group.position - 1} rest"):
        restored(bucket, tmp_path / "restored")
    assert of_copy(bucket, tmp_path / "restored", group=group.position - 1) == {b"-", b"0", b"1"}


def test_a_restore_that_does_not_fit_the_disk_reads_no_file(
    bucket: FaultyBucket, store: DelayedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how many bytes it needs, and leaves nothing."""
    manifested(store)
    manifest, read = present(shipping_of(store).manifest), list[str]()
    needed, download = sum(file.size for file in manifest.files), bucket.download

    def noted(name: str) -> Iterator[bytes] | None:
        read.append(name)
        return download(name)

    monkeypatch.setattr(bucket, "download", noted)
    short = patch("duelog.store.files.system_errors.free_bytes", lambda path: needed - 1)
    with short, pytest.raises(StoreFull, match=f"to restore: {needed} bytes needed"):
        restored(bucket, tmp_path / "restored")
    assert (read, [path for path in tmp_path.iterdir() if "restor" in path.name]) == ([], [])
    restored(bucket, tmp_path / "restored")
    assert sorted(read) == sorted(file.name for file in manifest.files)


def test_any_flipped_bit_of_a_log_object_is_seen(bucket: FaultyBucket, store: DelayedStore) -> None:
    """Its checksum covers all of it."""
    shipped(store, b"x")
    content = present(bucket.read(bucket.numbers()[-1]))
    for at in range(0, len(content), 7):
        with pytest.raises(ReplicaDamaged):
            unpack(URL, "log/1", content[:at] + bytes((content[at] ^ 1 << at % 8,)) + content[at + 1 :])


def test_groups_are_flushed_before_they_are_shipped(bucket: FaultyBucket, open_store: OpenStore) -> None:
    """With "relaxed" a power cut would else take back what the copy has."""
    store = open_store(config=StoreConfig(replica=URL, durability="relaxed", relaxed_ms=60_000))
    store.topic("a").send(b"x", deliver_after=86_400)
    store.topic("a").send(b"y", deliver_after=86_400)
    active = present(store._engine.writer().segments._wal.active)
    flushed = []
    bucket.before_creation = lambda name: flushed.append(active.is_flushed) if name.startswith(LOG) else None
    assert not active.is_flushed
    ship(store)
    assert flushed == [True]


def test_a_thread_ships_what_is_sent(bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `ship_ms`, whether it has just shipped or was idle, or at the close; a manifest is made beside it."""
    put, made = threading.Event(), threading.Event()

    def created(name: str) -> None:
        if name.startswith(LOG):
            put.set()

    def put_manifest(name: str, content: Content | Path) -> None:
        original(name, content)
        if name.startswith(MANIFESTS):
            made.set()

    bucket.before_creation, original = created, bucket.put
    monkeypatch.setattr(bucket, "put", put_manifest)
    with DelayedStore.open(tmp_path / "store", StoreConfig(replica=URL, ship_ms=1), clock=SystemClock()) as store:
        for payload in (b"1", b"2", b"3"):
            put.clear()
            store.topic("a").send(payload, deliver_after=86_400)
            assert put.wait(30)
            assert made.wait(30)
        store.topic("a").send(b"4", deliver_after=86_400)
    restored(bucket, tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored") as again:
        assert waiting(again) == {b"1", b"2", b"3", b"4"}


def test_a_child_closes_what_it_has_inherited_whatever_the_parents_threads_hold(
    bucket: FaultyBucket, tmp_path: Path
) -> None:
    """A replicated send is told with the lock in hand: each second child that was forked then waited for ever."""
    held, forked = threading.Event(), threading.Event()
    with DelayedStore.open(tmp_path / "store", StoreConfig(replica=URL), clock=SystemClock()) as store:
        engine = store._engine
        shipping, tiers, scheduler = shipping_of(store), present(engine.tiers), present(engine.waking.scheduler)

        def hold() -> None:
            with shipping._wake, tiers._wake, scheduler._condition.lock:
                held.set()
                forked.wait()

        holding = threading.Thread(target=hold)
        holding.start()
        held.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            store.close()
            os._exit(7)
        forked.set()
        holding.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_idle_store_puts_nothing(bucket: FaultyBucket, store: DelayedStore, clock: ManualClock) -> None:
    """For a day after its last send: no object of the log, no manifest, no file."""
    store.topic("a").send(b"1", deliver_after=2 * 86_400)
    ship(store)
    shipping_of(store).make_manifest()
    ship(store)
    objects = [each for folder in (LOG, MANIFESTS, FILES) for each in bucket.listing(folder)]
    for _ in range(24 * 60):
        clock.advance(60_000)
        store.tick()
        shipping_of(store).step()
    assert [each for folder in (LOG, MANIFESTS, FILES) for each in bucket.listing(folder)] == objects


def test_a_put_is_told_how_often_it_was_tried_in_vain(bucket: FaultyBucket, store: DelayedStore) -> None:
    """So that it gets longer. Another object begins with none."""
    tries, append = list[int](), bucket.append

    def noted(seq: int, content: Content, tried: int = 0) -> None:
        tries.append(tried)
        append(seq, content, tried)

    ship(store)
    bucket.faults = iter(("down", "down", None, "down"))
    with patch.object(bucket, "append", noted):
        for _ in range(2):
            store.topic("a").send(b"", deliver_after=86_400)
            ship(store)
    assert tries == [0, 1, 2, 0, 1]


class LyingBucket(FaultyBucket):
    """A bucket that takes no notice of conditions."""

    def create(self, name: str, content: Content, tries: int = 0) -> None:
        """Replace what is there."""
        self.put(name, content)


def test_a_bucket_that_lies_about_conditions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_store: OpenStore
) -> None:
    """By the probe, and by a store that is opened."""
    with pytest.raises(ReplicaRefused, match="lies about conditions: 8 of 8"):
        identity.probe(LyingBucket(), rounds=3, creators=8)
    monkeypatch.setattr("duelog.replica.shipping.Bucket", lambda url: LyingBucket())
    with pytest.raises(ReplicaRefused, match="second writer"):
        open_store(config=CONFIG)
    honest = FaultyBucket()
    identity.probe(honest, rounds=3, creators=8)
    assert honest.listing("probe") == []


def test_credentials_are_neither_taken_in_a_url_nor_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an error says has none of what the environment keeps secret."""
    for url in ("s3://AKIA:hidden@bucket/x", "s3://bucket/x?secret_access_key=hidden"):
        with pytest.raises(InvalidArgument) as caught:
            check_url("replica", url)
        assert "hidden" not in str(caught.value)
    for bad in ("bucket/x", "s3://bucket", "https://bucket/x", 5):
        with pytest.raises(InvalidArgument):
            check_url("replica", bad)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-in-a-path")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9/hidden-in-a-path")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(ReplicaUnreachable) as unreachable:
        Bucket("s3://bucket/x").get("STORE")
    assert "hidden" not in str(unreachable.value)


def test_a_store_without_a_copy_loads_nothing_of_it() -> None:
    """Neither obstore nor the room."""
    code = (
        "import sys, tempfile, duelog\n"
        "with tempfile.TemporaryDirectory() as path, duelog.DelayedStore.open(path) as store:\n"
        "    store.topic('a').send(b'')\n"
        "print([name for name in sys.modules if 'obstore' in name or 'duelog.replica' in name])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_figures_tell_how_far_the_copy_is_behind(
    bucket: FaultyBucket, store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """Statistics and metrics have the same figures; a store without a copy has none."""
    ship(store)
    bucket.is_down = True
    store.topic("a").send(b"x", deliver_after=86_400)
    with pytest.raises(ReplicaUnreachable):
        shipping_of(store).step()
    clock.advance(5_000)
    stats, metrics = store.stats(), present(store._engine.metrics)
    assert stats.replica_lag_ms == 5_000
    assert present(stats.replica_lag_bytes) > present(stats.replica_lag_groups) > 0
    assert (stats.replica_puts, stats.replica_failures, stats.replica_manifest_age_ms) == (0, 1, 5_000)
    assert "is down" in present(stats.replica_error)
    assert (stats.replica_epoch, stats.replica_leads) == (1, True)
    values = {name: [each.value for each in metrics.observe(name)] for name in OF_REPLICA}
    behind = [5.0], [stats.replica_lag_bytes], [stats.replica_lag_groups]
    assert tuple(values.values()) == (*behind, [0], [0.0], [1], [5.0], [1], [True], [0], [0])
    bucket.is_down = False
    ship(store)
    stats = store.stats()
    assert (stats.replica_lag_ms, stats.replica_lag_bytes, stats.replica_puts, stats.replica_error) == (0, 0, 1, None)
    assert stats.replica_lag_groups == 0
    assert present(stats.replica_put_seconds) > 0
    plain = open_store(tmp_path / "plain")
    assert plain.stats().replica_lag_ms is None
    assert present(plain._engine.metrics).observe(OF_REPLICA[0]) == []


def test_a_store_whose_log_is_not_begun_has_one_manifest(
    bucket: FaultyBucket, store: DelayedStore, open_store: OpenStore, tmp_path: Path
) -> None:
    """It can be restored, empty as it is."""
    for _ in range(3):
        ship(store)
    assert (bucket.manifests(), bucket.numbers()) == ([0], [])
    restored(bucket, tmp_path / "restored")
    assert open_store(tmp_path / "restored").stats().topics == 0


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_shipped_between_an_instant_and_its_manifest_is_restored(
    begun: bool, bucket: FaultyBucket, store: DelayedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest is put long after its instant, where its files are large."""
    if begun:
        store.topic("a").send(b"0", deliver_after=86_400)
        store._engine.writer().apply_all()
    make = ManifestFiles.draft

    def draft(files: ManifestFiles, before: Manifest | None) -> Draft | None:
        made = make(files, before)
        for number in (b"1", b"2"):
            store.topic("a").send(number, deliver_after=86_400)
            shipping_of(store)._ship()
        return made

    monkeypatch.setattr(ManifestFiles, "draft", draft)
    ship(store)
    assert len(bucket.numbers()) >= 2
    assert of_copy(bucket, tmp_path / "restored") == waiting(store)


def test_a_repaired_store_ships_to_its_prefix_no_more(
    bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What repair changes is in no group of the log: a restore would lack it."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        store.topic("a").send(b"x", deliver_after=86_400)
    damage = Finding("error", "lost-record", "main", "is missing", "repair")
    monkeypatch.setattr("duelog.tools.repair.repair_store.check_store", lambda path, deep: [damage])
    assert any("new prefix" in action for action in repair_store(path, tmp_path / "discarded.jsonl").actions)
    with pytest.raises(ForkFound, match="was repaired"):
        DelayedStore.open(path, CONFIG, clock=clock)


def test_a_store_that_is_opened_again_and_again_is_no_fork(
    bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """Openings that ship nothing do not make the one forgotten that shipped last."""
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        store.topic("a").send(b"1", deliver_after=86_400)
    for _ in range(4):
        DelayedStore.open(tmp_path / "store", CONFIG, clock=clock).close()
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        shipped(store, b"2")
    assert of_copy(bucket, tmp_path / "restored") == {b"1", b"2"}


def test_a_damaged_end_of_the_log_does_not_keep_a_store_from_being_opened(
    bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """Shipping says what is wrong; the store sends."""
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        store.topic("a").send(b"1", deliver_after=86_400)
    bucket.put(log_name(bucket.numbers()[-1]), b"?")
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        store.topic("a").send(b"2", deliver_after=86_400)
        assert "is no log object" in present(store.stats().replica_error)


def test_a_restore_from_files_alone_says_which_groups_it_has(
    bucket: FaultyBucket, store: DelayedStore, open_store: OpenStore, tmp_path: Path, clock: ManualClock
) -> None:
    """All that was shipped, though it read none; restored with that group it is the same."""
    store.topic("a").send(b"1", deliver_after=86_400)
    store._engine.writer().apply_all()
    ship(store)
    found = restored(bucket, tmp_path / "restored")
    assert found.groups == 0
    assert found.place >= shipping_of(store).state().place - 1
    restored(bucket, tmp_path / "again", group=found.place)
    assert waiting(open_store(tmp_path / "again")) == {b"1"}


def test_a_manifest_that_is_about_to_be_made_does_not_break_a_close(
    bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is made and not begun, or running; the close waits for it in either case."""
    starting, closing = threading.Event(), threading.Event()
    stop = Shipping.stop_manifests

    class Slow(threading.Thread):
        """A thread for manifests that is started as the close looks for it."""

        def start(self) -> None:
            """Begin, once the close is under way."""
            if self.name == "duelog-manifest":
                starting.set()
                closing.wait(0.2)
            super().start()

    def stopping(shipping: Shipping) -> None:
        closing.set()
        stop(shipping)

    monkeypatch.setattr("duelog.replica.shipping.threading.Thread", Slow)
    monkeypatch.setattr(Shipping, "stop_manifests", stopping)
    store = DelayedStore.open(tmp_path / "store", StoreConfig(replica=URL))
    assert starting.wait(30)
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("duelog-manifest")]


def test_the_main_environment_is_copied_again_where_only_its_record_of_the_log_has_changed(
    bucket: FaultyBucket, store: DelayedStore, tmp_path: Path
) -> None:
    """A checkpoint without a row for it moves the segment that it names: a restore would look for one that is gone."""
    ship(store)
    for number in range(3):
        store.topic("a").send(b"%d" % number, deliver_after=86_400)
        if number:
            store._engine.writer().apply_all()
        manifested(store)
        assert of_copy(bucket, tmp_path / f"restored-{number}") == waiting(store)
    files = [file for seq in bucket.manifests() for file in read_manifest(bucket, seq).files]
    mains = {file.content: file.name for file in files if file.start_ms == MAIN_START}
    assert len(set(mains.values())) == len(mains)  # two had the same, and the later one replaced the other


def test_manifests_are_made_though_the_clock_was_set_back(
    bucket: FaultyBucket, store: DelayedStore, clock: ManualClock
) -> None:
    """An hour is counted by a clock that does not go back, too."""
    shipping, elapsed_s = shipping_of(store), 1e6
    shipping.writer.elapsed = lambda: elapsed_s
    ship(store)
    clock.set(START_MS - 86_400_000)
    for manifests in (1, 2, 3):
        shipped(store, b"x")
        assert shipping.figures.manifests == manifests
        elapsed_s += 3_600


def test_a_damaged_manifest_keeps_nothing_from_being_shipped(bucket: FaultyBucket, store: DelayedStore) -> None:
    """Also behind a put that took long, which looks whether another leads. Before, none was shipped until a restart."""
    shipped(store, b"1")
    manifested(store)
    bucket.put(manifest_name(bucket.manifests()[-1]), b"?")
    shipping, elapsed = shipping_of(store), itertools.count(1_000_000, 100)
    shipping.writer.elapsed = lambda: next(elapsed)
    shipped(store, b"2")
    assert shipping.error is None


@pytest.mark.parametrize("ships", ["the same", "the one before", "none"])
def test_a_put_of_a_killed_process_that_comes_late_is_no_fork(
    bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, ships: str
) -> None:
    """A later opening of the directory finds its own groups under the number, and goes on behind them.

    Before, only one of the opening that had shipped last was known. ships: which opening had shipped by then.
    """
    if ships == "the one before":
        with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
            shipped(store, b"1")
    store = DelayedStore.open(tmp_path / "store", CONFIG, clock=clock)
    if ships == "the same":
        shipped(store, b"1")
    store.topic("a").send(b"2", deliver_after=86_400)
    bucket.faults = iter(("late",))
    with pytest.raises(ReplicaUnreachable):
        shipping_of(store).step()
    late, bucket._late = bucket._late, []
    with DelayedStore.open(crashed(store, tmp_path / "killed"), CONFIG, clock=clock) as between:
        killed = crashed(between, tmp_path / "killed again")
        bucket.is_down = True
    bucket.is_down = False
    with DelayedStore.open(killed, CONFIG, clock=clock) as again:
        again.topic("a").send(b"3", deliver_after=86_400)
        bucket._late = late
        bucket.arrive()
        ship(again)
        assert of_copy(bucket, tmp_path / "restored") == {b"2", b"3"} | ({b"1"} if ships != "none" else set())
    store.topic("a").send(b"4", deliver_after=86_400)
    with pytest.raises(ForkFound):
        shipping_of(store).step()
    store.close()
