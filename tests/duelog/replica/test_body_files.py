"""Large runs of a store with a copy: their bodies are written once, to body files, and each group is shipped with them.

They are shipped whatever becomes of the file meanwhile: it has a second name until the groups that name it are shipped.
"""

import errno
import os
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.errors import DuelogError, ReplicaDamaged, ReplicaRefused, StoreFull
from duelog.replica import log_tail, manifest
from duelog.replica.bucket import log_name
from duelog.replica.log_object import unpack
from duelog.replica.log_tail import KeptLog, LogTail
from duelog.replica.manifest_files import ManifestFiles
from duelog.replica.shipping import Shipping
from duelog.store.config import MIB
from duelog.store.files.directory import disk_parts, occupied_bytes
from duelog.store.wal import write_batch
from duelog.store.wal.segment import RawGroup, SegmentReader
from tests.cleanup.compacting import plan_compaction
from tests.conftest import OpenStore, applied, present, raising
from tests.duelog.replica.faulty import URL, FaultyBucket, log_of, manifested, restored, ship, shipping_of
from tests.duelog.side_by_side import crashed
from tests.duelog.store_state import payloads_after, records
from tests.model.driver import armed

HOUR_MS = 3_600_000
ALONE = StoreConfig(partition_ms=HOUR_MS, run_entries=8, ledger_max_entries=40)
CONFIG = replace(ALONE, replica=URL)
LARGE = [b"%04d" % number * 100 for number in range(20)]
SENT = sorted(LARGE * 2)


@pytest.fixture
def store(open_store: OpenStore, bucket: FaultyBucket) -> DelayedStore:
    """A store with a copy, a topic "t" that "s" has subscribed to, and a partition whose directory is made."""
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    store.topic("t").cancel(store.topic("t").send(b".", deliver_after=7_200))
    ship(applied(store))
    return store


def send(store: DelayedStore) -> int:
    """Send a large run to the main log, and one to the partition; the place of the group."""
    store.topic("t").send_batch([Message(body, deliver_after=hour * 3_600) for hour in (0, 2) for body in LARGE])
    return place(store)


def place(store: DelayedStore) -> int:
    """The place of the last group."""
    return shipping_of(store)._the_source().next_place() - 1


def received(store: DelayedStore, clock: ManualClock) -> list[bytes]:
    """All that the subscription gets in five hours, sorted; it is acknowledged, trimmed and deleted."""
    found = [body for hour in range(5) for body in payloads_after(store, clock, HOUR_MS * (hour > 0))]
    clock.advance(HOUR_MS)
    return sorted(found)


def of_copy(bucket: FaultyBucket, path: Path, now_ms: int, group: int | None = None) -> list[bytes]:
    """What the subscription gets of a copy that is restored, and is sound."""
    restored(bucket, path, group=group)
    clock = ManualClock(now_ms)
    with DelayedStore.open(path, ALONE, clock=clock) as copy:
        assert list(copy.check(deep=True)) == []
        return received(copy, clock)


def open_files() -> list[str]:
    """The files of stores that this process has open, or mapped."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the system does not say which files are open")
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one by which it was listed
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(each for each in found if each.endswith((".wal", ".kept", ".bodies")))


def kept(store: DelayedStore) -> list[str]:
    """The second names of body files."""
    return sorted(path.name for path in (store.path / "wal").rglob("*.bodies"))


def delete_topic(store: DelayedStore, clock: ManualClock) -> None:
    """Have the files of the main log go, and with the hours those of the partition."""
    store.delete_topic("t")
    store.topic("t").subscribe("s").close()
    received(store, clock)


def compacted(store: DelayedStore, clock: ManualClock) -> None:
    """Have a generation without body files take the place of the partition's."""
    clock.advance(4 * HOUR_MS)
    store.tick()
    partitions = store._engine.storage.partitions
    with partitions.lease(next(iter(partitions))) as partition:
        plan = plan_compaction(store._engine.storage.main, partition)
        staged = stage_generation(store.path, partition.environment, plan)
    hand_over(store.path, staged)
    assert store.tick().adopted == 1


def consumed(store: DelayedStore, clock: ManualClock) -> None:
    """Have all be acknowledged, the main log be trimmed and the partition be deleted."""
    with store.topic("t").subscribe("s") as reader:
        for _ in range(3):
            store.topic("t").send_payloads([b"rolls the ledger"] * 40)
            reader.ack(reader.receive(1_000))
    assert received(store, clock) == sorted(LARGE)


REMOVERS = {"consumed": consumed, "topic deleted": delete_topic, "compacted": compacted}


def test_bodies_are_written_once_and_shipped_in_their_groups(
    store: DelayedStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """Before, a store with a copy wrote them to its log and to LMDB; the copy's form is what it was."""
    send(store)
    applied(store)
    files = [path for path in store.path.rglob("*") if path.is_file() and path.suffix != ".mdb"]
    holding = [path for path in files if LARGE[3] in path.read_bytes()]
    assert {path.suffix for path in holding} == {".bodies"}
    # Not the bytes of its files: what the memory of a page held before is in them (meminit=False).
    tables = [rows for rows in records(store).values() if isinstance(rows, dict)]
    assert not any(LARGE[3] in value for rows in tables for value in rows.values())
    assert len({path.stat().st_ino for path in holding}) == 2
    segments = [path for path in (store.path / "wal").iterdir() if path.is_file()]
    assert disk_parts(store.path)["wal"] == sum(map(occupied_bytes, segments))
    ship(store)
    assert b"".join(bytes(raw.content) for raw in log_of(bucket)[-1].raw).count(LARGE[3]) == 2
    assert of_copy(bucket, tmp_path / "restored", clock.now_ms()) == SENT
    assert not list((tmp_path / "restored").rglob("*.bodies"))


def test_a_group_that_was_just_appended_names_its_bodies_as_one_that_is_read_back_does(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are mapped as they are shipped: its writer says where they lie, several runs of a file at once."""
    groups, heard = list[RawGroup](), Shipping.appended

    def appended(shipping: Shipping, group: RawGroup) -> None:
        groups.append(group)
        heard(shipping, group)

    monkeypatch.setattr(Shipping, "appended", appended)
    logs = [(topic, hour) for topic in "tu" for hour in (0, 2)]
    named = [(topic, hour, f"{topic}{hour}".encode() + body) for body in LARGE for topic, hour in logs]
    store.send_batch([(topic, Message(body, deliver_after=3_600 * hour)) for topic, hour, body in named])
    (written,) = (group for group in groups if group.apart)
    assert len(written.apart) == len(logs) < len(written._replace(apart=()).bodies_apart())
    tail = LogTail(store.path, shipping_of(store)._store_id, written.position)
    (read,) = tail.take(written.position + 1, MIB)
    tail.close()
    heard_of = LogTail(store.path, shipping_of(store)._store_id, written.position)
    heard_of.heard(written)
    (kept,) = heard_of.take(written.position + 1, MIB)
    heard_of.close()
    assert b"".join(kept.bodies) == b"".join(read.bodies)
    assert kept._replace(bodies=()) == read._replace(bodies=()) == written._replace(apart=())
    assert kept.size == read.size == written.size


@pytest.mark.parametrize("seed", range(4))
def test_every_group_is_in_the_copy_though_descriptors_run_out_as_the_log_is_read(
    seed: int, store: DelayedStore, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had been read before was in no object, and the copy went on behind it without a word.

    So it did behind the first group of a segment: the file was read on where that ends.
    """
    source, opened, heard, written = random.Random(seed), os.open, Shipping.appended, list[int]()

    def appended(shipping: Shipping, group: RawGroup) -> None:
        written.extend([group.position] if group.row_count else [])
        heard(shipping, group)

    def scarce(*arguments: Any, **options: Any) -> int:
        if source.random() < 0.4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(*arguments, **options)

    monkeypatch.setattr(Shipping, "appended", appended)
    for _ in range(30):
        for _ in range(source.randrange(1, 4)):
            source.choice((send, lambda store: store.topic("t").send(b"small", deliver_after=7_200)))(store)
        if source.random() < 0.5:
            applied(store)
        with monkeypatch.context() as patched, suppress(DuelogError):
            patched.setattr(os, "open", scarce)
            shipping_of(store).step()
    ship(store)
    assert [raw.position for made in log_of(bucket) for raw in made.raw][-len(written) :] == written


def test_groups_that_wait_for_the_bucket_take_no_more_memory_than_they_may(
    store: DelayedStore, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are read back, in their order."""
    monkeypatch.setattr(log_tail, "_HEARD_BYTES", 10_000)
    tail, first = present(shipping_of(store)._tail), place(store) + 1
    for _ in range(40):
        store.topic("t").send(b"x" * 1_000, deliver_after=7_200)
        assert tail._heard_bytes == sum(len(group.content) for group in tail._heard) <= 10_000
    ship(store)
    shipped = [raw.position for made in log_of(bucket) for raw in made.raw]
    assert shipped[shipped.index(first) :] == list(range(first, place(store) + 1))


def test_every_group_is_in_the_copy_though_an_interrupt_comes_as_the_log_was_read(
    store: DelayedStore, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read was in no object, and the copy went on behind it, where the program ships by `tick` itself."""
    first, take = send(store), LogTail.take

    def interrupted(tail: LogTail, until: int, most_bytes: int) -> NoReturn:
        take(tail, until, most_bytes)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LogTail, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shipping_of(store).step()
    second = send(store)
    ship(store)
    assert [raw.position for made in log_of(bucket) for raw in made.raw][-2:] == [first, second]


def test_what_a_copy_needs_is_put_aside_without_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that had none left stopped its store there: the checkpoint was done, and its segments half moved."""
    directory = tmp_path / "wal"
    directory.mkdir()
    for number in (1, 2, 3):
        (directory / f"{number:012d}.wal").write_bytes(b"x" * number)
    (tmp_path / "7.bodies").write_bytes(b"bodies")
    log = KeptLog(tmp_path, MIB)
    log.keep_bodies(tmp_path / "7.bodies")
    (tmp_path / "7.bodies").unlink()
    with monkeypatch.context() as patched:
        for name in ("open", "scandir", "listdir"):
            patched.setattr(os, name, raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        assert log.keep([1, 2]) == []
        assert log.bytes == 1 + 2 + len(b"bodies")
        log.passed(2)
        (directory / "000000000003.wal").rename(directory / "000000000003.kept")  # by a call that was broken off
        assert log.keep([3]) == [1]
        log.passed_bodies(2, lambda: 1)
        log.passed_bodies(2, lambda: 1)
    assert {path.name for path in directory.iterdir() if path.is_file()} == {
        "000000000001.wal",
        "000000000002.kept",
        "000000000003.kept",
    }
    assert (KeptLog(tmp_path, MIB).bytes, log.bytes) == (5, 5)


def test_a_segment_that_was_given_up_is_no_error_of_a_call_that_is_made_again(tmp_path: Path) -> None:
    """An interrupt came behind that. The file was looked for, and the store stopped."""
    directory = tmp_path / "wal"
    directory.mkdir()
    (directory / "000000000001.wal").write_bytes(b"x" * (MIB + 1))
    log, remove_all = KeptLog(tmp_path, MIB), KeptLog._remove_all

    def interrupted(log: KeptLog) -> NoReturn:
        remove_all(log)
        raise KeyboardInterrupt

    with patch.object(KeptLog, "_remove_all", interrupted), pytest.raises(KeyboardInterrupt):
        log.keep([1])
    assert log.keep([1]) == []
    assert (log.bytes, log.lost) == (0, True)


def test_no_file_is_left_open_by_a_log_that_cannot_be_read(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shipping tries it again and again: each try left a descriptor."""
    place, opened = send(store), open_files()
    monkeypatch.setattr(SegmentReader, "read", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        LogTail(store.path, shipping_of(store)._store_id, place + 1)
    assert open_files() == opened


def test_bodies_are_mapped_once_for_an_object_and_until_it_is_stored(tmp_path: Path, clock: ManualClock) -> None:
    """Each map is a descriptor, and keeps its file on disk. Each group had its own, until the object after it."""
    config = replace(CONFIG, replica=(tmp_path / "copy").as_uri())
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store:
        send(store)
        shipping = shipping_of(store)
        shipping.step()
        opened, append = open_files(), shipping.bucket.append
        for _ in range(20):
            send(store)

        def counted(*arguments: Any) -> None:
            mapped.append([each for each in open_files() if each.endswith(".bodies")])
            append(*arguments)

        mapped = list[list[str]]()
        with patch.object(shipping.bucket, "append", counted):
            shipping.step()
        (files,) = mapped
        assert len(files) == len(set(files)) > 0
        assert open_files() == opened


def test_a_store_that_ships_has_one_file_of_its_log_open_for_that(store: DelayedStore, bucket: FaultyBucket) -> None:
    """Whether it goes on in the next segment, looks for the end once more, or has lost what it was to read next.

    Once it is closed it has none.
    """
    shipping, counts = shipping_of(store), set[int]()
    for attach in (none, Shipping._attach_again, give_up):
        for _ in range(3):
            applied(store)
            attach(shipping)
            send(store)
            ship(store)
            counts.add(sum(not each.endswith(".bodies") for each in open_files()))
    assert max(counts) - min(counts) <= 1  # none where it has been told of all that it ships
    store.close()
    assert open_files() == []


def none(_: Shipping) -> None:
    """Do nothing."""


def give_up(shipping: Shipping) -> None:
    """Have the log be given up, as where it takes more than `replica_keep_bytes`."""
    shipping.kept.lost = True


def test_a_body_file_that_goes_behind_the_look_stays_for_the_group_that_was_written_meanwhile(tmp_path: Path) -> None:
    """The place is that of the next group, and the one before it may name the file."""
    (tmp_path / "wal").mkdir()
    first = tmp_path / "7.bodies"
    first.write_bytes(b"bodies")
    log = KeptLog(tmp_path, MIB)
    log.keep_bodies(first)

    def written() -> int:
        first.unlink(missing_ok=True)
        return 1

    log.passed_bodies(1, written)
    assert (tmp_path / "wal" / "bodies" / first.name).exists()
    log.passed_bodies(1, written)
    assert not (tmp_path / "wal" / "bodies" / first.name).exists()


def test_bodies_that_are_shipped_in_a_wrong_order_are_told_by_who_reads_the_copy(
    store: DelayedStore, bucket: FaultyBucket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no checksum in the object: those in their runs say whose they are."""
    apart = RawGroup.bodies_apart
    monkeypatch.setattr(RawGroup, "bodies_apart", lambda group: apart(group._replace(apart=()))[::-1])
    send(store)
    ship(store)
    log_of(bucket)
    assert "body does not match its checksum" in caplog.text


def test_a_flipped_bit_of_bodies_in_the_copy_is_told(
    store: DelayedStore, bucket: FaultyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    """They have no checksum in the object: those in their runs cover them."""
    send(store)
    ship(store)
    name = log_name(log_of(bucket)[-1].seq)
    content = present(bucket.get(name))
    for at in range(content.index(LARGE[0]), len(content), 97):
        caplog.clear()
        unpack(URL, name, content[:at] + bytes((content[at] ^ 1 << at % 8,)) + content[at + 1 :])
        assert name in caplog.text
        assert "body does not match its checksum" in caplog.text
    caplog.clear()
    with pytest.raises(ReplicaDamaged):
        unpack(URL, name, content[:-1])
    whole = unpack(URL, name, content)[1]
    assert sum(bytes(row.value).count(LARGE[3]) for group in whole for row in group.rows()) == 2


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("remover", REMOVERS)
def test_bodies_that_are_removed_before_they_are_shipped_are_in_the_copy(
    remover: str,
    is_kept: bool,
    store: DelayedStore,
    bucket: FaultyBucket,
    tmp_path: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong engine gives them no second name: its copy has a hole, and cannot be restored as of the send."""
    if not is_kept:
        monkeypatch.setattr(KeptLog, "keep_bodies", lambda *_: None)
        store.close()
        store = DelayedStore.open(store.path, CONFIG, clock=clock)
        ship(store)
    sent_ms, sent = clock.now_ms(), send(store)
    applied(store)
    files = set(store.path.rglob("*.bodies"))
    REMOVERS[remover](store, clock)
    assert not files <= set(store.path.rglob("*.bodies"))
    if not is_kept:
        ship(applied(store))
        with pytest.raises(ReplicaRefused):
            of_copy(bucket, tmp_path / "restored", sent_ms, sent)
        store.close()
        return
    ship(store)
    assert of_copy(bucket, tmp_path / "restored", sent_ms, sent) == SENT
    ship(store)  # there is nothing to ship: it looks for files that are there for the copy alone
    assert all(path.stat().st_nlink > 1 for path in (store.path / "wal").rglob("*.bodies"))


def test_a_crash_before_they_are_shipped_leaves_the_bodies_of_what_was_trimmed(
    store: DelayedStore, open_store: OpenStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """Opening removes the files that no run names, and the copy has them from their second names."""
    sent_ms, sent = clock.now_ms(), send(store)
    consumed(store, clock)
    applied(store)
    again = open_store(crashed(store, tmp_path / "again"), CONFIG)
    assert kept(again)
    ship(again)
    assert of_copy(bucket, tmp_path / "restored", sent_ms, sent) == SENT
    ship(again)
    assert kept(again) == []


def test_bodies_of_a_group_that_a_crash_lost_are_not_shipped_for_those_that_the_ledger_gets_then(
    open_store: OpenStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """Opening removes their file, which no run names; its second name would be in the way of the next one's."""
    store, left = open_store(config=CONFIG), list[Path]()
    store.topic("t").subscribe("s").close()
    ship(applied(store))
    with armed("wal.before", lambda: left.append(crashed(store, tmp_path / "killed"))):
        store.topic("t").send_payloads([b"lost" * 150] * 20)
    again = open_store(left[0], CONFIG)
    again.topic("t").send_payloads(LARGE)
    ship(again)
    assert of_copy(bucket, tmp_path / "restored", clock.now_ms()) == LARGE


def test_removed_bodies_beyond_replica_keep_bytes_are_given_up(
    open_store: OpenStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As segments are that cannot be shipped: the copy goes on with a new manifest, and the disk has its space."""
    monkeypatch.setattr(write_batch, "LARGE_BYTES", 96 << 10)
    store = open_store(config=replace(CONFIG, replica_keep_bytes=MIB, ship_bytes=64 << 10))
    topic = store.topic("t")
    with topic.subscribe("s") as reader:
        ship(applied(store))
        bucket.is_down = True
        for _ in range(4):
            topic.send_payloads([b"x" * 20_000] * 40)
            reader.ack(reader.receive(1_000), durable=True)
            applied(store)
            store.tick()
    applied(store)
    assert shipping_of(store).kept.lost
    assert shipping_of(store).kept.bytes < MIB
    bucket.is_down = False
    topic.send_payloads(LARGE, deliver_after=60)
    ship(applied(store))
    ship(store)
    assert shipping_of(store).figures.manifests == 2
    assert of_copy(bucket, tmp_path / "restored", clock.now_ms()) == sorted(LARGE)


def test_a_file_system_with_one_name_for_a_file_keeps_the_store_going(
    store: DelayedStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies are read where they are, as of a store that had none of a copy when they were sent."""
    monkeypatch.setattr(os, "link", raising(PermissionError()))
    sent = send(store)
    assert kept(store) == []
    ship(store)
    assert of_copy(bucket, tmp_path / "restored", clock.now_ms(), sent) == SENT


def test_a_store_that_gets_a_copy_has_the_bodies_of_before(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files of the manifest, and what is not applied in its log; a version that knows no body files refuses it."""
    store = open_store(config=ALONE)
    store.topic("t").subscribe("s").close()
    store.topic("t").cancel(store.topic("t").send(b".", deliver_after=7_200))
    for _ in range(2):
        store.topic("t").send_batch([Message(body, deliver_after=7_200) for body in LARGE])
        applied(store)
    store.topic("t").send_batch([Message(body, deliver_after=7_200) for body in LARGE])
    store = open_store(crashed(store, tmp_path / "killed"), CONFIG)
    ship(store)
    ship(store)
    assert of_copy(bucket, tmp_path / "restored", clock.now_ms()) == sorted(LARGE * 3)
    assert list((tmp_path / "restored").rglob("*.bodies"))
    monkeypatch.setattr(manifest, "FORMATS", (1,))
    with pytest.raises(ReplicaRefused, match="format 2"):
        restored(bucket, tmp_path / "by the version before")


@pytest.mark.parametrize("cuts", [True, False])
def test_a_body_file_that_grows_while_a_manifest_is_made_is_what_it_was(
    cuts: bool,
    store: DelayedStore,
    bucket: FaultyBucket,
    tmp_path: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong engine puts what is there by then: its size is not that of the manifest, which is passed over."""
    send(store)
    applied(store)
    put, grown = bucket.put, list[str]()

    def meanwhile(name: str, content: Any) -> None:
        if name.startswith("files/"):
            grown.append(name)
            send(store)
        put(name, content)

    monkeypatch.setattr(bucket, "put", meanwhile)
    if not cuts:
        monkeypatch.setattr(ManifestFiles, "_copy_bodies", lambda made, _, file, path: made._put(file, path))
    manifested(store)
    assert grown
    monkeypatch.undo()
    assert bool(restored(bucket, tmp_path / "restored").passed_over) == (not cuts)


def test_bodies_of_an_append_that_failed_as_a_manifest_was_made_are_not_those_that_come_in_their_place(
    store: DelayedStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """A file with both is of one length: known by that, the next manifest had the ones before."""

    def fails() -> None:
        manifested(store)
        raise OSError(errno.ENOSPC, "no room, says the test")

    send(store)
    ship(applied(store))
    with armed("bodies.written", fails), pytest.raises(StoreFull):
        store.topic("t").send_payloads([b"lost" * 100] * 20)
    store.topic("t").send_payloads(LARGE)
    applied(store)
    manifested(store)
    assert of_copy(bucket, tmp_path / "restored", clock.now_ms()) == sorted(LARGE * 3)


def test_damage_in_a_body_file_comes_to_the_copy_as_damage(
    store: DelayedStore, bucket: FaultyBucket, tmp_path: Path
) -> None:
    """The checksum of a body is that of its sender: who reads the copy finds the one that is damaged."""
    send(store)
    for path in store.path.glob("main/bodies/*"):
        content = bytearray(path.read_bytes())
        content[content.index(LARGE[3]) + 50] ^= 1
        path.write_bytes(content)
    ship(store)
    store.close()
    restored(bucket, tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored", ALONE, clock=ManualClock(0)) as copy:
        assert [found.code for found in copy.check(deep=True)] == ["corrupt-entry"]
