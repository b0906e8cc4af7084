"""A standby follows, and takes over when the lease has passed; the leader before is fenced, its tail set aside."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, MessageId, StoreConfig
from duelog.errors import (
    Deposed,
    ForkFound,
    InvalidArgument,
    NotLeader,
    NotReplicated,
    ReplicaRefused,
    ReplicaUnreachable,
    StoreFailed,
)
from duelog.replica.bucket import log_name
from duelog.replica.following import Standby, failure_of
from duelog.replica.log_object import FENCE, LogObject, unpack
from duelog.replica.set_aside import aside_of, read_aside, send_again
from duelog.store.wal.segment_file import SegmentFile
from tests.duelog.replica.faulty import URL, FaultyBucket, ship, shipping_of
from tests.duelog.side_by_side import crashed

LEASE_MS = 10_000
CONFIG = StoreConfig(replica=URL, lease_ms=LEASE_MS)
DAY_S = 86_400


class Elapsed:
    """A clock of leases that tests move, one for all machines."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def elapsed(monkeypatch: pytest.MonkeyPatch) -> Elapsed:
    """The clock of leases of stores that are opened."""
    clock = Elapsed()
    monkeypatch.setattr("duelog.replica.shipping.since_boot_s", clock)
    return clock


@pytest.fixture
def leader(bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, elapsed: Elapsed) -> DelayedStore:
    """A store that leads."""
    store = DelayedStore.open(tmp_path / "one", CONFIG, clock=clock)
    ship(store)
    return store


def standby(bucket: FaultyBucket, path: Path, elapsed: Elapsed) -> Standby:
    """A standby that has begun to follow."""
    made = Standby(path, bucket, lease_ms=LEASE_MS, address="pulsar://two:6650", elapsed=elapsed)
    assert not made.begin()
    assert not made.step()
    return made


def taken_over(follower: Standby, elapsed: Elapsed) -> None:
    """Have the lease pass, and the standby lead."""
    elapsed.now_s += LEASE_MS / 1000 + 0.1
    assert follower.step()


def waiting(store: DelayedStore) -> set[bytes]:
    """The payloads that wait in topic a."""
    return {bytes(message.payload) for message in store.topic("a").scheduled()}


def log_object(bucket: FaultyBucket, seq: int) -> LogObject:
    """The log object of a number."""
    return unpack(URL, log_name(seq), bucket.read(seq) or b"")[0]


def test_a_standby_takes_over_with_all_that_was_shipped(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, elapsed: Elapsed
) -> None:
    """What comes after the fence is refused, also as the leader before goes on; no id is given out twice."""
    follower = standby(bucket, tmp_path / "two", elapsed)
    ids: list[MessageId] = [leader.topic("a").send(b"%d" % number, deliver_after=DAY_S) for number in range(3)]
    ship(leader)
    assert not follower.step()
    assert follower.epoch == 1
    bucket.is_down = True
    lost = leader.topic("a").send(b"lost", deliver_after=DAY_S)
    with pytest.raises(ReplicaUnreachable):
        shipping_of(leader).step()
    bucket.is_down = False
    taken_over(follower, elapsed)
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as second:
        assert waiting(second) == {b"0", b"1", b"2"}
        assert second.topic("a").send(b"new", deliver_after=DAY_S) not in (*ids, lost)
        ship(second)
        with pytest.raises(Deposed, match="epoch 2"):
            shipping_of(leader).step()
        assert [(each.replica_epoch, each.replica_leads) for each in (leader.stats(), second.stats())] == [
            (1, False),
            (2, True),
        ]
        with pytest.raises(StoreFailed, match="another machine has taken over"):
            leader.topic("a").send(b"late", deliver_after=DAY_S)
        leader.close()
        assert list(second.check(deep=True)) == []
        third = standby(bucket, tmp_path / "three", elapsed)
        assert third.epoch == 2
    assert third.step()  # the leader has resigned
    with DelayedStore.open(tmp_path / "three", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"0", b"1", b"2", b"new"}
        assert list(store.check(deep=True)) == []


def test_a_leader_that_renews_its_lease_is_not_followed_by_another(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed
) -> None:
    """Heartbeats come where nothing is written; the one that was put is seen before a fence is."""
    follower = standby(bucket, tmp_path / "two", elapsed)
    for _ in range(10):
        elapsed.now_s += LEASE_MS / 2000
        shipping_of(leader).step()
        assert not follower.step()
    elapsed.now_s += LEASE_MS / 1000 + 1
    shipping_of(leader).step()  # late, and before the fence
    assert not follower.step()
    leader.topic("a").send(b"x")
    leader.close()


def test_a_leader_refuses_work_before_its_lease_has_passed(
    leader: DelayedStore, bucket: FaultyBucket, elapsed: Elapsed
) -> None:
    """From 0.8 of it after the last success on, whatever keeps it from the bucket; and goes on once it is there."""
    with leader.topic("a").subscribe("s") as consumer:
        leader.topic("a").send(b"x")
        bucket.is_down = True
        elapsed.now_s += LEASE_MS * 0.79 / 1000
        leader.topic("a").send(b"x")
        assert leader.stats().replica_leads
        elapsed.now_s += LEASE_MS * 0.02 / 1000
        assert not leader.stats().replica_leads
        with pytest.raises(NotLeader, match="not renewed in time"):
            leader.topic("a").send(b"x")
        with pytest.raises(NotLeader):
            consumer.receive(1, timeout=0)
        bucket.is_down = False
        ship(leader)
        leader.topic("a").send(b"x")
        assert consumer.receive(5, timeout=0)
    leader.close()


def test_of_two_standbys_one_leads_and_the_other_follows_it(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """Also where both put their fence at once."""
    two, three = (standby(bucket, tmp_path / name, elapsed) for name in ("two", "three"))
    elapsed.now_s += LEASE_MS / 1000 + 1
    fenced = []

    def between(name: str) -> None:
        bucket.before_creation = lambda name: None
        fenced.append(three.step())

    bucket.before_creation = between
    assert (two.step(), fenced) == (False, [True])
    assert two.leader is not None
    assert two.leader.address == "pulsar://two:6650"
    DelayedStore.open(tmp_path / "three", CONFIG, clock=clock).close()
    leader.close()


def test_a_fence_whose_answer_is_lost_is_found(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed
) -> None:
    """It leads by the next look, without another fence."""
    follower = standby(bucket, tmp_path / "two", elapsed)
    bucket.faults = iter(("lost",))
    elapsed.now_s += LEASE_MS / 1000 + 1
    with pytest.raises(ReplicaUnreachable):
        follower.step()
    assert follower.step()
    assert follower.epoch == 2
    leader.close()


def test_a_standby_whose_fence_came_late_follows_on(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """Others have led, and pruned what lies behind it. Before, its process failed."""
    two, three = (standby(bucket, tmp_path / name, elapsed) for name in ("two", "three"))
    elapsed.now_s += LEASE_MS / 1000 + 1
    assert three.step()
    fence = bucket.numbers()[-1]
    with DelayedStore.open(tmp_path / "three", CONFIG, clock=clock) as store:
        store.topic("a").send(b"later", deliver_after=DAY_S)
        ship(store)
        shipping_of(store).make_manifest()
        ship(store)
        bucket.delete([log_name(fence)])
        assert not two.step()
        assert not two.step()
        assert two.epoch >= 2
    leader.close()


def test_a_standby_that_is_cut_off_amid_its_reading_applies_what_it_has_read(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before, it went on behind it: sends, cancels and acknowledgements that were told as replicated were lost."""
    follower = standby(bucket, tmp_path / "two", elapsed)
    for number in range(3):
        leader.topic("a").send(b"%d" % number, deliver_after=DAY_S)
        ship(leader)
    get, last = bucket.get, log_name(bucket.numbers()[-1])

    def cut_off(name: str) -> bytes | None:
        if name == last:
            raise ReplicaUnreachable(URL, "is cut off")
        return get(name)

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "get", cut_off)
        with pytest.raises(ReplicaUnreachable):
            follower.step()
    assert not follower.step()
    taken_over(follower, elapsed)
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"0", b"1", b"2"}
    leader.close()


def test_a_standby_that_is_killed_begins_again(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """With what it left beside; killed between its fence and its opening, it fences once more."""
    leader.topic("a").send(b"1", deliver_after=DAY_S)
    ship(leader)
    killed = standby(bucket, tmp_path / "two", elapsed)
    killed._put_fence(killed._log.before)  # type: ignore[union-attr, arg-type]
    again = standby(bucket, tmp_path / "two", elapsed)
    assert again.epoch == 2
    taken_over(again, elapsed)
    assert again.epoch == 3
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"1"}
        assert list(store.check(deep=True)) == []
    leader.close()


@pytest.mark.parametrize("unmarked", [False, True], ids=["moved", "unmarked"])
def test_a_store_that_a_kill_leaves_on_its_way_to_its_place_is_in_nobodys_way(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch, unmarked: bool,
) -> None:  # fmt: skip
    """It is done again, or opened. Before, what lay beside had lost its mark, and was refused."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    leader.topic("a").send(b"1", deliver_after=DAY_S)
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    with monkeypatch.context() as patch:
        if unmarked:
            patch.setattr(Path, "unlink", killed)
        else:
            patch.setattr("duelog.replica.following.move", killed)
        with pytest.raises(KeyboardInterrupt):
            taken_over(follower, elapsed)
    assert (tmp_path / "two" / "STORE").exists() == unmarked
    if not unmarked:
        taken_over(standby(bucket, tmp_path / "two", elapsed), elapsed)
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"1"}
    leader.close()


def test_a_deposed_leader_sets_its_tail_aside_and_follows(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """What it had told and not shipped is listed, and sent again on request, once however often."""
    leader.topic("a").send(b"shipped", deliver_after=DAY_S)
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    bucket.is_down = True
    told = [leader.topic("a").send(b"told-%d" % day, deliver_after=DAY_S * day) for day in range(1, 4)]
    leader.topic("a").send_payloads([b"batch"] * 5, deliver_after=DAY_S)
    leader.close()
    bucket.is_down = False
    taken_over(follower, elapsed)
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as second:
        with pytest.raises(Deposed):
            DelayedStore.open(tmp_path / "one", CONFIG, clock=clock)
        back = standby(bucket, tmp_path / "one", elapsed)
        assert back.epoch == 2
        ((epoch, tail),) = read_aside(tmp_path / "one").items()
        assert [each.message_id for each in tail[:3]] == list(map(str, told))
        assert [bytes(each.message.payload) for each in tail[3:]] == [b"batch"] * 5
        for _ in range(2):
            assert send_again(second, epoch, tail) == 8
        assert waiting(second) == {b"shipped", b"told-1", b"told-2", b"told-3", b"batch"}
        assert second.stats().pending == 9


def test_a_leader_that_had_shipped_everything_leaves_nothing_aside(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """Its directory is what the copy has; it goes, and the standby that it is now begins with the copy."""
    leader.topic("a").send(b"shipped", deliver_after=DAY_S)
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    taken_over(follower, elapsed)
    with pytest.raises(Deposed):
        shipping_of(leader).step()
    leader.close()
    standby(bucket, tmp_path / "one", elapsed)
    assert not (tmp_path / "one").exists()
    assert not aside_of(tmp_path / "one").exists()


def test_a_removal_of_a_deposed_directory_that_is_killed_keeps_no_standby_from_beginning(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it lay in the way, and was refused: it was neither a store nor an empty directory."""
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    leader.close()
    taken_over(follower, elapsed)

    def killed(path: Path) -> None:
        if path.exists():
            (path / "STORE").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("duelog.replica.set_aside.remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            standby(bucket, tmp_path / "one", elapsed)
    for _ in range(2):
        standby(bucket, tmp_path / "one", elapsed)
    assert not (tmp_path / "one").exists()


def test_a_tail_behind_a_fence_that_was_pruned_is_kept(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """The log that is left begins behind it: nothing says any more what was not shipped. Before, it was removed."""
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    bucket.is_down = True
    leader.topic("a").send(b"told", deliver_after=DAY_S)
    leader.close()
    bucket.is_down = False
    taken_over(follower, elapsed)
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as second:
        second.topic("a").send(b"later", deliver_after=DAY_S)
        ship(second)
        shipping_of(second).make_manifest()
        ship(second)
        fence = next(seq for seq in bucket.numbers() if log_object(bucket, seq).kind == FENCE)
        bucket.delete([log_name(seq) for seq in bucket.numbers() if seq <= fence])
        standby(bucket, tmp_path / "one", elapsed)
    with DelayedStore.open(aside_of(tmp_path / "one") / "1" / "store", clock=clock) as store:
        assert waiting(store) == {b"told"}


def test_what_was_set_aside_is_not_replaced(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed
) -> None:
    """By the same directory that comes again from a backup: which of the two is to stay is for a person to say."""
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    bucket.is_down = True
    leader.topic("a").send(b"told", deliver_after=DAY_S)
    leader.close()
    bucket.is_down = False
    shutil.copytree(tmp_path / "one", tmp_path / "backup")
    taken_over(follower, elapsed)
    standby(bucket, tmp_path / "one", elapsed)
    shutil.move(tmp_path / "backup", tmp_path / "one")
    with pytest.raises(ReplicaRefused, match="in the way"):
        standby(bucket, tmp_path / "one", elapsed)
    assert (aside_of(tmp_path / "one") / "1" / "store" / "STORE").exists()
    assert (tmp_path / "one" / "STORE").exists()


def test_a_tail_that_was_given_up_leaves_the_whole_directory_aside(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """Its log does not say what was not shipped, so that nothing may be removed."""
    leader.topic("a").send(b"shipped", deliver_after=DAY_S)
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    bucket.is_down = True
    leader.topic("a").send(b"told", deliver_after=DAY_S)
    leader.close()
    for kept in (tmp_path / "one" / "wal").glob("*.kept"):
        kept.unlink()
    bucket.is_down = False
    taken_over(follower, elapsed)
    standby(bucket, tmp_path / "one", elapsed)
    assert read_aside(tmp_path / "one") == {1: []}
    with DelayedStore.open(aside_of(tmp_path / "one") / "1" / "store", clock=clock) as store:
        assert waiting(store) == {b"shipped", b"told"}


def test_a_leader_that_is_killed_ships_on_if_it_is_back_within_the_lease(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """With what it had not shipped; the standby goes on following it."""
    follower = standby(bucket, tmp_path / "two", elapsed)
    leader.topic("a").send(b"1", deliver_after=DAY_S)
    killed = crashed(leader, tmp_path / "killed")
    elapsed.now_s += LEASE_MS * 0.9 / 1000
    with DelayedStore.open(killed, CONFIG, clock=clock) as again:
        ship(again)
        elapsed.now_s += LEASE_MS * 0.9 / 1000
        assert not follower.step()
        assert follower.epoch == 1
        shipping_of(again).step()
        again.topic("a").send(b"2", deliver_after=DAY_S)
        ship(again)
    assert follower.step()  # it was closed in order
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as second:
        assert waiting(second) == {b"1", b"2"}
    with pytest.raises(ForkFound):
        shipping_of(leader).step()
    leader.close()


def test_a_leader_whose_disk_fails_resigns_and_a_standby_leads_at_once(
    leader: DelayedStore,
    bucket: FaultyBucket,
    tmp_path: Path,
    clock: ManualClock,
    elapsed: Elapsed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It writes nothing more, so nobody has to wait for its lease to pass."""
    leader.topic("a").send(b"told", deliver_after=DAY_S)
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    leader.topic("a").send(b"told, not shipped", deliver_after=DAY_S)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFile, "write_through", fails)
        with pytest.raises(StoreFailed):
            leader.topic("a").send(b"lost", deliver_after=DAY_S)
    leader.close()
    assert follower.step()
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"told", b"told, not shipped"}


def test_a_leader_that_hands_over_has_shipped_all_and_writes_no_more(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, elapsed: Elapsed
) -> None:
    """So the standby need not wait for its lease, and nothing of it is set aside."""
    follower = standby(bucket, tmp_path / "two", elapsed)
    leader.topic("a").send(b"told", deliver_after=DAY_S)
    leader.hand_over()
    with pytest.raises(StoreFailed, match="handed over"):
        leader.topic("a").send(b"late", deliver_after=DAY_S)
    assert isinstance(failure_of(leader), Deposed)
    assert follower.step()
    leader.close()
    assert standby(bucket, tmp_path / "one", elapsed).epoch == 2
    assert not aside_of(tmp_path / "one").exists()
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"told"}


def test_a_leader_that_cannot_ship_says_that_it_has_not_handed_over(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """It may lead again, or another does once the lease has passed; a store without a lease has nobody to hand to."""
    bucket.is_down = True
    leader.topic("a").send(b"told", deliver_after=DAY_S)
    with pytest.raises(NotReplicated, match="could not ship"):
        leader.hand_over()
    leader.close()
    bucket.is_down = False
    with DelayedStore.open(tmp_path / "one", CONFIG, clock=clock) as store:
        assert waiting(store) == {b"told"}
    with DelayedStore.open(tmp_path / "alone", clock=clock) as alone:
        with pytest.raises(InvalidArgument, match="lease_ms"):
            alone.hand_over()
        alone.topic("a").send(b"goes on")


def test_a_replicated_send_is_never_told_behind_the_fence(
    bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """The deposed leader says that it is not replicated, and the standby does not have it."""
    config = StoreConfig(replica=URL, lease_ms=LEASE_MS, durability="replicated", replicated_timeout_ms=100)
    leader = DelayedStore.open(tmp_path / "one", config, clock=clock)
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    leader.topic("a").send(b"told", deliver_after=DAY_S)
    follower.step()
    elapsed.now_s += LEASE_MS * 0.7 / 1000
    follower._seen_s -= LEASE_MS  # its clock runs fast: what is replicated is safe all the same
    assert follower.step()
    with pytest.raises(NotReplicated):
        leader.topic("a").send(b"late", deliver_after=DAY_S)
    leader.close()
    with DelayedStore.open(tmp_path / "two", config, clock=clock) as store:
        assert waiting(store) == {b"told"}


def test_a_leader_that_ships_nothing_tells_no_id_that_the_next_one_tells(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """Its takeover commit is in the copy before it tells any."""
    leader.topic("a").send(b"x", deliver_after=DAY_S)
    ship(leader)
    told: list[MessageId] = []
    for name in ("two", "three", "four"):
        follower = standby(bucket, tmp_path / name, elapsed)
        taken_over(follower, elapsed)
        store = DelayedStore.open(tmp_path / name, CONFIG, clock=clock)
        told += [store.topic(topic).send(b"x", deliver_after=DAY_S * day) for topic in ("a", name) for day in (0, 1, 2)]
        bucket.is_down = True
        store.close()
        bucket.is_down = False
    assert len(told) == len(set(told))
    leader.close()


def test_no_more_ids_are_told_than_a_takeover_passes_over(
    leader: DelayedStore, bucket: FaultyBucket, elapsed: Elapsed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch beyond that waits for the copy, whatever the durability; without the bucket its ids are not told."""
    monkeypatch.setattr("duelog.replica.shipping.ENTRIES", 100)
    topic = leader.topic("a")
    topic.send_payloads([b""] * 50, deliver_after=DAY_S)
    bucket.is_down = True
    with pytest.raises(NotReplicated):
        topic.send_payloads([b""] * 200, deliver_after=DAY_S)
    bucket.is_down = False
    topic.send_payloads([b""] * 500, deliver_after=DAY_S)
    assert not shipping_of(leader).is_far_behind
    leader.close()


def test_what_was_written_before_the_lease_passed_is_not_told_as_never_done(
    bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in doubt (NotReplicated), where NotLeader says that nothing was done."""
    config = StoreConfig(replica=URL, lease_ms=LEASE_MS, durability="replicated", replicated_timeout_ms=100)
    leader = DelayedStore.open(tmp_path / "one", config, clock=clock)
    ship(leader)
    sender = leader._engine.sending.sender
    send_one = sender.send_one

    def slowly(*arguments: Any) -> MessageId:
        message_id = send_one(*arguments)
        bucket.is_down = True
        elapsed.now_s += LEASE_MS / 1000
        return message_id

    monkeypatch.setattr(sender, "send_one", slowly)
    with pytest.raises(NotReplicated):
        leader.topic("a").send(b"x", deliver_after=DAY_S)
    with pytest.raises(NotLeader):
        leader.topic("a").send(b"x", deliver_after=DAY_S)
    bucket.is_down = False
    leader.close()


def test_a_late_put_of_a_stalled_leader_counts_after_a_look(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed, clock: ManualClock
) -> None:
    """Its number was taken, read and pruned meanwhile, so it is created; and the look finds who leads."""
    leader.topic("a").send(b"1", deliver_after=DAY_S)
    ship(leader)
    follower = standby(bucket, tmp_path / "two", elapsed)
    taken_over(follower, elapsed)
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as second:
        second.topic("a").send(b"2", deliver_after=DAY_S)
        ship(second)
        shipping_of(second).make_manifest()
        ship(second)
        stalled = shipping_of(leader)._seq
        bucket.delete([f"log/{number:016d}" for number in bucket.numbers() if number <= stalled + 2])
        with pytest.raises(Deposed):
            shipping_of(leader).step()
    leader.close()


def test_a_directory_that_another_leads_by_the_same_epoch_is_a_fork(
    leader: DelayedStore, bucket: FaultyBucket, tmp_path: Path, elapsed: Elapsed
) -> None:
    """A copy of a directory does not follow: it is said that there are two."""
    import shutil  # noqa: PLC0415

    leader.close()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with DelayedStore.open(tmp_path / "one", CONFIG) as store:
        store.topic("a").send(b"")
        with pytest.raises(ForkFound):
            Standby(tmp_path / "copy", bucket, lease_ms=LEASE_MS, elapsed=elapsed).begin()
