"""A standby follows, and takes over when the lease has passed; the leader before is fenced, its tail set aside."""

import errno
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, SystemClock
from duelog.errors import (
    Deposed,
    DocumentChanged,
    DuelogError,
    ForkFound,
    InvalidArgument,
    NotLeader,
    NotReplicated,
    ReplicaDamaged,
    ReplicaRefused,
    ReplicaUnreachable,
    StoreFailed,
    StoreFull,
    StoreLocked,
    StoreUnavailable,
)
from duelog.opening import MARK, recover
from duelog.replica import manifest_files, set_aside
from duelog.replica.bucket import FILES, MANIFESTS, AlreadyThere, Content, Listed, log_name
from duelog.replica.following import Standby, failure_of, serve_at
from duelog.replica.identity import read_shipped
from duelog.replica.log_object import FENCE, HEARTBEAT, RESIGNED, LogObject, unpack
from duelog.replica.log_writer import LogWriter
from duelog.replica.manifest import read_manifest
from duelog.replica.pruning import made_by, prune
from duelog.replica.replica_status import aside_of
from duelog.replica.restoring import GapFound, Restoring, take_place
from duelog.replica.set_aside import AsideMessage, read_aside, send_again
from duelog.replica.shipping import Shipping
from duelog.replica.takeover import renew_ids
from duelog.store.wal.segment_file import SegmentFile
from tests.conftest import present, raising
from tests.duelog.replica.faulty import URL, FaultyBucket, log_of, manifested, restored, ship, shipping_of, waiting
from tests.duelog.side_by_side import crashed
from tests.proof import wrong_engines

LEASE_MS = 10_000
CONFIG = StoreConfig(replica=URL, lease_ms=LEASE_MS)
DAY_S = 86_400


class Elapsed:
    """A clock of leases that tests move, one for all machines."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """Machines with a directory each, of which `one` leads, on one clock of leases; and their bucket."""

    def __init__(self, bucket: FaultyBucket, path: Path, clock: ManualClock) -> None:
        self.bucket, self.path, self.clock, self.elapsed = bucket, path, clock, Elapsed()

    def lead(self, config: StoreConfig = CONFIG) -> None:
        """Open the store that leads."""
        self.leader = self.open("one", config)
        ship(self.leader)

    def open(self, name: str, config: StoreConfig = CONFIG) -> DelayedStore:
        return DelayedStore.open(self.path / name, config, clock=self.clock)

    def send(self, payload: bytes, days: int = 1) -> MessageId:
        return self.leader.topic("a").send(payload, deliver_after=DAY_S * days)

    def ship(self, payload: bytes) -> None:
        """Send, and ship."""
        self.send(payload)
        ship(self.leader)

    def follow(self, name: str) -> Standby:
        """A standby that has begun to follow."""
        address = "pulsar://two:6650"
        made = Standby(self.path / name, self.bucket, lease_ms=LEASE_MS, address=address, elapsed=self.elapsed)
        assert not made.begin()
        assert not made.step()
        return made

    def pass_lease(self, part: float = 1.01) -> None:
        """Have that part of a lease pass."""
        self.elapsed.now_s += LEASE_MS * part / 1000

    def take_over(self, follower: Standby) -> None:
        """Have the lease pass, and the standby lead."""
        self.pass_lease()
        assert follower.step()

    def close_cut_off(self) -> None:
        """Have the leader take a message that it cannot ship, and close."""
        self.bucket.is_down = True
        self.send(b"told")
        self.leader.close()
        self.bucket.is_down = False

    def waiting(self, name: str) -> set[bytes]:
        """The payloads that wait in topic a of a machine, whose store is whole."""
        with self.open(name) as store:
            assert list(store.check(deep=True)) == []
            return waiting(store)


@pytest.fixture
def bench(bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Its leader is closed at the end."""
    bench = Bench(bucket, tmp_path, clock)
    monkeypatch.setattr("duelog.replica.shipping.since_boot_s", bench.elapsed)
    bench.lead()
    yield bench
    if not bench.leader.closed:
        bench.leader.close()


def log_object(bucket: FaultyBucket, seq: int) -> LogObject:
    """The log object of a number."""
    return unpack(URL, log_name(seq), bucket.read(seq) or b"")[0]


def test_a_standby_takes_over_with_all_that_was_shipped(bench: Bench) -> None:
    """What comes after the fence is refused, also as the leader before goes on; no id is given out twice."""
    follower = bench.follow("two")
    ids: list[MessageId] = [bench.send(b"%d" % number) for number in range(3)]
    ship(bench.leader)
    assert not follower.step()
    assert follower.epoch == 1
    bench.bucket.is_down = True
    lost = bench.send(b"lost")
    with pytest.raises(ReplicaUnreachable):
        shipping_of(bench.leader).step()
    bench.bucket.is_down = False
    bench.take_over(follower)
    with bench.open("two") as second:
        assert not present(read_shipped(second.path, URL)).new_line  # the next opening passes over no more ids
        assert waiting(second) == {b"0", b"1", b"2"}
        assert second.topic("a").send(b"new", deliver_after=DAY_S) not in (*ids, lost)
        ship(second)
        with pytest.raises(Deposed, match="epoch 2"):
            shipping_of(bench.leader).step()
        assert [(each.replica_epoch, each.replica_leads) for each in (bench.leader.stats(), second.stats())] == [
            (1, False),
            (2, True),
        ]
        with pytest.raises(StoreFailed, match="another machine has taken over"):
            bench.send(b"late")
        bench.leader.close()
        assert list(second.check(deep=True)) == []
        third = bench.follow("three")
        assert third.epoch == 2
    assert third.step()  # the leader has resigned
    assert bench.waiting("three") == {b"0", b"1", b"2", b"new"}


def test_a_leader_that_renews_its_lease_is_not_followed_by_another(bench: Bench) -> None:
    """Heartbeats come where nothing is written; the one that was put is seen before a fence is."""
    follower = bench.follow("two")
    for part in [0.5] * 10 + [0.99]:
        bench.pass_lease(part)
        assert not follower.step()
        shipping_of(bench.leader).step()
        assert not follower.step()
    bench.pass_lease()
    shipping_of(bench.leader).step()  # late, and before the fence
    assert not follower.step()
    bench.leader.topic("a").send(b"x")


def test_a_leader_that_is_cut_off_tries_again_several_times_in_a_lease(bucket: FaultyBucket, tmp_path: Path) -> None:
    """However often it has failed: it leads on as soon as the bucket is back."""
    waits, enough = list[float](), threading.Event()
    config = StoreConfig(replica=URL, lease_ms=1_000)
    with DelayedStore.open(tmp_path / "store", config, clock=SystemClock()) as store:
        shipping = shipping_of(store)
        wait = shipping._wake.wait

        def noted(timeout_s: float) -> bool:
            if shipping.error is None:
                return wait(timeout_s)
            waits.append(timeout_s)
            if len(waits) == 8:
                enough.set()
            return wait(0.001)

        with patch.object(shipping._wake, "wait", noted):
            bucket.is_down = True
            assert enough.wait(60)
            bucket.is_down = False
    assert max(waits) <= 0.25


def test_a_leader_says_at_once_where_clients_find_it(bench: Bench) -> None:
    """By an object of its own, once, though its lease need not be renewed yet: clients of standbys wait for that."""
    before = bench.bucket.numbers()[-1]
    serve_at(bench.leader, "pulsar://one:6650")
    for _ in range(2):
        shipping_of(bench.leader).step()
    assert bench.bucket.numbers()[-1] == before + 1
    assert log_object(bench.bucket, before + 1).maker.address == "pulsar://one:6650"


def test_an_idle_leader_puts_nothing_but_heartbeats(bench: Bench) -> None:
    """One in each third of the lease, for minutes; its upkeep writes nothing that would have to be shipped."""
    first = bench.bucket.numbers()[-1] + 1
    objects = sum(len(bench.bucket.listing(folder)) for folder in (MANIFESTS, FILES))
    for _ in range(600):
        bench.elapsed.now_s += 0.5
        bench.clock.advance(500)
        bench.leader.tick()
        shipping_of(bench.leader).step()
    kinds = [log_object(bench.bucket, seq).kind for seq in bench.bucket.numbers(first)]
    assert set(kinds) == {HEARTBEAT}
    assert len(kinds) <= 300 / (LEASE_MS / 3_000)
    assert sum(len(bench.bucket.listing(folder)) for folder in (MANIFESTS, FILES)) == objects


def test_a_leader_refuses_work_before_its_lease_has_passed(bench: Bench) -> None:
    """From 0.8 of it after the last success on, whatever keeps it from the bucket; and goes on once it is there."""
    with bench.leader.topic("a").subscribe("s") as consumer:
        bench.leader.topic("a").send(b"x")
        bench.bucket.is_down = True
        bench.pass_lease(0.79)
        bench.leader.topic("a").send(b"x")
        assert bench.leader.stats().replica_leads
        bench.pass_lease(0.02)
        assert not bench.leader.stats().replica_leads
        with pytest.raises(NotLeader, match="not renewed in time"):
            bench.leader.topic("a").send(b"x")
        with pytest.raises(NotLeader):
            consumer.receive(1, timeout=0)
        bench.bucket.is_down = False
        ship(bench.leader)
        bench.leader.topic("a").send(b"x")
        assert consumer.receive(5, timeout=0)


def test_a_lease_counts_from_the_first_try_of_what_renewed_it(bench: Bench) -> None:
    """A standby has seen that one. Before, both led for a while: it counted from the try whose answer came."""
    follower = bench.follow("two")
    bench.pass_lease(0.4)
    bench.bucket.faults = iter(("lost",))
    cut_off = patch.object(bench.bucket, "read", raising(ReplicaUnreachable(URL, "is cut off")))
    with cut_off, pytest.raises(ReplicaUnreachable):
        shipping_of(bench.leader).step()
    assert not follower.step()
    bench.pass_lease(0.5)
    bench.bucket.faults = iter((None, "down"))
    with suppress(ReplicaUnreachable):
        shipping_of(bench.leader).step()
    bench.pass_lease(0.6)
    assert not bench.leader.stats().replica_leads
    assert follower.step()


def test_of_two_standbys_one_leads_and_the_other_follows_it(bench: Bench) -> None:
    """Also where both put their fence at once."""
    two, three = (bench.follow(name) for name in ("two", "three"))
    bench.pass_lease()
    fenced = []

    def between(name: str) -> None:
        bench.bucket.before_creation = lambda name: None
        fenced.append(three.step())

    bench.bucket.before_creation = between
    assert (two.step(), fenced) == (False, [True])
    assert two.leader is not None
    assert two.leader.address == "pulsar://two:6650"
    bench.open("three").close()


def test_a_fence_whose_answer_is_lost_is_found(bench: Bench) -> None:
    """It leads by the next look, without another fence; its lease counts from when that was put."""
    follower = bench.follow("two")
    bench.bucket.faults = iter(("lost",))
    bench.pass_lease()
    with pytest.raises(ReplicaUnreachable):
        follower.step()
    bench.pass_lease(0.4)
    assert follower.step()
    assert follower.epoch == 2
    follower.beat()
    assert [each.kind for each in log_of(bench.bucket)][-2:] == [FENCE, HEARTBEAT]


def test_a_leader_that_takes_longer_than_the_lease_to_open_is_not_followed_by_another(bench: Bench) -> None:
    """It puts heartbeats from its fence on. Before, two machines with large stores fenced each other for ever."""
    bench.ship(b"1")
    two, three = (bench.follow(name) for name in ("two", "three"))
    slow, begun, begin = list[str](), list[Shipping](), Shipping.begin

    def slowly(what: str, renew: Callable[[], object], work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any, **named: Any) -> Any:
            if what not in slow:
                slow.append(what)
                for _ in range(5):
                    bench.pass_lease(0.4)
                    renew()
                    objects = bench.bucket.numbers()
                    renew()  # it is not time again
                    assert bench.bucket.numbers() == objects
                    assert not three.step()
            return work(*arguments, **named)

        return done

    def begins(shipping: Shipping, *arguments: Any, **named: Any) -> None:
        begun.append(shipping)
        begin(shipping, *arguments, **named)

    def ships() -> None:
        begun[0].step()

    with (
        patch.object(Restoring, "finish", slowly("make", two.beat, Restoring.finish)),
        patch("duelog.engine.recover", slowly("recover", two.beat, recover)),
        patch.object(Shipping, "begin", begins),
        patch.object(manifest_files, "renew_ids", slowly("renew", ships, renew_ids)),
    ):
        bench.take_over(two)
        store = bench.open("two")
    with store:
        assert slow == ["make", "recover", "renew"]
        assert (three.epoch, waiting(store)) == (2, {b"1"})
        objects = len(log_of(bench.bucket))
        two.beat()
        creations = bench.bucket.creations
        two.beat()
        assert bench.bucket.creations == creations  # the store has put its own under the number
        two.opened()
        bench.pass_lease(0.4)
        two.beat()
        assert len(log_of(bench.bucket)) == objects
        bench.pass_lease(0.1)
        ship(store)
        assert not three.step()


def test_a_leader_that_is_open_puts_nothing_that_comes_from_its_opening(bench: Bench) -> None:
    """Not even where its log was pruned, and numbers of it are free again."""
    two = bench.follow("two")
    bench.take_over(two)
    bench.pass_lease(0.4)
    two.beat()
    with bench.open("two") as store:
        two.opened()
        store.topic("a").send(b"1", deliver_after=DAY_S)
        ship(store)
        manifested(store)
        first = bench.bucket.manifests()[-1]
        bench.bucket.delete([log_name(seq) for seq in bench.bucket.numbers() if seq < first])
        bench.pass_lease(0.4)
        two.beat()
        assert bench.bucket.numbers()[0] == first


def test_a_machine_that_begins_lists_of_the_log_what_is_behind_the_newest_manifest(bench: Bench) -> None:
    """Before, it listed all: a week of log, a minute, and the lease of a leader that was begun again had passed."""
    for number in range(3):
        bench.ship(b"%d" % number)
    manifested(bench.leader)
    bench.leader.close()
    listed, pages = list[tuple[str, str | None]](), bench.bucket._pages

    def noted(folder: str, offset: str | None) -> Iterator[list[Listed]]:
        listed.append((folder, offset))
        return pages(folder, offset)

    with patch.object(bench.bucket, "_pages", noted):
        assert Standby(bench.path / "one", bench.bucket, lease_ms=LEASE_MS, elapsed=bench.elapsed).begin()
    newest = bench.bucket.manifests()[-1]
    assert [offset for folder, offset in listed if folder == "log"] == [log_name(newest - 1)]


def test_a_standby_that_cannot_set_a_tail_aside_says_that_its_disk_is_full(bench: Bench) -> None:
    """So it waits for space. Before, the error of the system ended its process."""
    ship(bench.leader)
    follower = bench.follow("two")
    bench.close_cut_off()
    bench.take_over(follower)
    full = patch("duelog.replica.set_aside.write_file", raising(OSError(errno.ENOSPC, "No space left on device")))
    with full, pytest.raises(StoreFull):
        bench.follow("one")
    bench.follow("one")
    assert [bytes(each.message.payload) for each in read_aside(bench.path / "one")[1]] == [b"told"]


@pytest.mark.parametrize("lost", range(1, 5))
def test_a_tail_is_listed_though_an_object_of_the_log_before_it_is_lost(bench: Bench, lost: int) -> None:
    """The one before it says of what epoch it was."""
    for number in range(4):
        bench.ship(b"%d" % number)
    follower = bench.follow("two")
    bench.close_cut_off()
    bench.take_over(follower)
    bench.bucket.delete([log_name(lost)])
    with pytest.raises(ReplicaDamaged):
        bench.follow("one")
    assert [bytes(each.message.payload) for each in read_aside(bench.path / "one")[1]] == [b"told"]


def test_a_tail_whose_fence_was_pruned_is_kept_whole(bench: Bench) -> None:
    """Before, where the log began with the fence behind that, it counted as shipped, and was removed."""
    bench.ship(b"1")
    bench.close_cut_off()
    for name in ("two", "three"):
        bench.take_over(bench.follow(name))
    fences = [each.seq for each in log_of(bench.bucket) if each.kind == FENCE]
    bench.bucket.delete([log_name(seq) for seq in bench.bucket.numbers() if seq < fences[1]])
    with pytest.raises(ReplicaDamaged):
        bench.follow("one")
    assert read_aside(bench.path / "one") == {1: []}
    with DelayedStore.open(bench.path / "one.diverged" / "1" / "store", clock=bench.clock) as store:
        assert waiting(store) == {b"1", b"told"}


@pytest.mark.parametrize("fault", ["lost", "late", "down", "twice"])
def test_a_heartbeat_of_an_opening_that_gets_no_answer_is_put_once(bench: Bench, fault: str) -> None:
    """And one that came between the look and the first put of the store that was opened is no fork."""
    bench.ship(b"1")
    two = bench.follow("two")
    bench.take_over(two)
    bench.bucket.faults = iter((fault, None, fault))
    for _ in range(6):
        bench.pass_lease(0.4)
        two.beat()
    kinds = [each.kind for each in log_of(bench.bucket)]
    assert set(kinds[kinds.index(FENCE) + 1 :]) == {HEARTBEAT}
    assert len(kinds) >= kinds.index(FENCE) + 4

    def between(name: str) -> None:
        if name == log_name(len(kinds) + 1):
            bench.bucket.before_creation = lambda name: None
            bench.pass_lease(0.4)
            two.beat()

    bench.bucket.before_creation = between
    with bench.open("two") as store:
        store.topic("a").send(b"2", deliver_after=DAY_S)
        ship(store)
        assert [each.kind for each in log_of(bench.bucket)][len(kinds)] == HEARTBEAT
    assert bench.waiting("two") == {b"1", b"2"}


def test_a_store_that_goes_on_behind_its_heartbeat_is_deposed_by_a_fence_there(bench: Bench) -> None:
    """It looks who has made the last object, which need not be the heartbeat."""
    bench.ship(b"1")
    two, three = (bench.follow(name) for name in ("two", "three"))
    bench.take_over(two)
    first = len(log_of(bench.bucket)) + 1

    def between(name: str) -> None:
        if name == log_name(first):
            bench.bucket.before_creation = lambda name: None
            bench.pass_lease(0.4)
            two.beat()
            assert not three.step()
            bench.take_over(three)

    bench.bucket.before_creation = between
    with pytest.raises(Deposed):
        ship(bench.open("two"))
    found = [(each.seq, each.kind, each.epoch) for each in log_of(bench.bucket)]
    assert found[-2:] == [(first, HEARTBEAT, 2), (first + 1, FENCE, 3)]
    assert bench.waiting("three") == {b"1"}


def test_a_store_that_goes_on_behind_its_heartbeat_is_deposed_where_that_came_behind_pruning(bench: Bench) -> None:
    """It stood still while another led. The log object of the newest manifest is still there, and says so."""
    bench.ship(b"1")
    two, three = (bench.follow(name) for name in ("two", "three"))
    bench.take_over(two)
    first = len(log_of(bench.bucket)) + 1
    _, late = present(two._writer).heartbeat(bench.clock.now_ms())

    def between(name: str) -> None:
        if name == log_name(first):
            bench.bucket.before_creation = lambda name: None
            assert not three.step()
            bench.take_over(three)
            with bench.open("three") as leader:
                manifested(leader)
            assert prune(bench.bucket, bench.clock.now_ms() + 10 * 86_400_000, 86_400_000).log_objects >= first
            bench.bucket.append(first, late)

    bench.bucket.before_creation = between
    with pytest.raises(Deposed):
        ship(bench.open("two"))


def test_a_leader_that_is_deposed_before_it_is_open_follows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its store is made, and as it is opened. It puts nothing behind the fence of the other."""
    bench.ship(b"1")
    two, three = (bench.follow(name) for name in ("two", "three"))
    with monkeypatch.context() as patched:
        finish = Restoring.finish

        def deposed(restoring: Restoring, number: int) -> None:
            patched.undo()
            finish(restoring, number)
            assert not three.step()
            bench.take_over(three)
            two.beat()

        patched.setattr(Restoring, "finish", deposed)
        bench.pass_lease()
        assert not two.step()
    assert not (bench.path / "two").exists()
    assert not two.step()
    assert two.epoch == 3
    bench.take_over(two)
    bench.take_over(bench.follow("four"))
    objects = len(log_of(bench.bucket))
    two.beat()
    with pytest.raises(Deposed):
        bench.open("two")
    two.beat()
    assert len(log_of(bench.bucket)) == objects
    assert bench.follow("two").epoch == 5


def test_a_standby_that_cannot_make_the_store_that_leads_leaves_the_lease_to_others(bench: Bench) -> None:
    """Its disk may be full: it renews nothing, and follows whoever can."""
    bench.ship(b"1")
    two, three = (bench.follow(name) for name in ("two", "three"))
    bench.pass_lease()
    with (
        patch.object(Restoring, "finish", raising(StoreFull(bench.path, "the disk is full"))),
        pytest.raises(StoreFull),
    ):
        two.step()
    assert not three.step()
    objects = len(log_of(bench.bucket))
    bench.pass_lease(0.5)
    two.beat()
    assert len(log_of(bench.bucket)) == objects
    bench.take_over(three)
    assert not two.step()
    assert bench.waiting("three") == {b"1"}


def test_a_standby_whose_fence_came_late_follows_on(bench: Bench) -> None:
    """Others have led, and pruned what lies behind it. Before, its process failed."""
    two, three = (bench.follow(name) for name in ("two", "three"))
    bench.pass_lease()
    assert three.step()
    fence = bench.bucket.numbers()[-1]
    with bench.open("three") as store:
        store.topic("a").send(b"later", deliver_after=DAY_S)
        ship(store)
        manifested(store)
        bench.bucket.delete([log_name(fence)])
        assert not two.step()
        assert not two.step()
        assert two.epoch >= 2


def test_a_fence_that_is_created_where_others_have_led_and_pruned_does_not_lead(bench: Bench) -> None:
    """Its put was on its way meanwhile, and nothing is left behind it but a manifest."""
    two, three = (bench.follow(name) for name in ("two", "three"))
    bench.pass_lease()
    opened = list[DelayedStore]()

    def between(name: str) -> None:
        bench.bucket.before_creation = lambda name: None
        assert three.step()
        opened.append(bench.open("three"))
        opened[0].topic("a").send(b"1", deliver_after=DAY_S)
        ship(opened[0])
        opened[0]._engine.writer().apply_all()
        manifested(opened[0])
        bench.bucket.delete([log_name(seq) for seq in bench.bucket.numbers()])

    bench.bucket.before_creation = between
    assert not two.step()
    assert [log_object(bench.bucket, seq).kind for seq in bench.bucket.numbers()] == [FENCE]
    with opened[0] as store:
        store.topic("a").send(b"2", deliver_after=DAY_S)
        ship(store)
        assert not two.step()
        assert two.epoch == 2
    assert two.step()  # it has resigned
    assert bench.waiting("two") == {b"1", b"2"}


def test_a_standby_that_is_cut_off_amid_its_reading_applies_what_it_has_read(bench: Bench) -> None:
    """Before, it went on behind it: sends, cancels and acknowledgements that were told as replicated were lost."""
    follower = bench.follow("two")
    for number in range(3):
        bench.ship(b"%d" % number)
    get, last = bench.bucket.get, log_name(bench.bucket.numbers()[-1])

    def cut_off(name: str) -> bytes | None:
        if name == last:
            raise ReplicaUnreachable(URL, "is cut off")
        return get(name)

    with patch.object(bench.bucket, "get", cut_off), pytest.raises(ReplicaUnreachable):
        follower.step()
    assert not follower.step()
    bench.take_over(follower)
    assert bench.waiting("two") == {b"0", b"1", b"2"}


@pytest.mark.parametrize("step", ["wal.part", "wal.applied", "wal.released"])
def test_a_standby_whose_disk_is_full_goes_on_with_what_it_has_read(bench: Bench, step: str) -> None:
    """As it begins and as it follows, once there is space, and fetches no file again; until then it does not lead.

    Before, its process ended, and begun again it fetched them all.
    """
    topics, left = [f"topic-{number}" for number in range(3)], list[str]()

    def send(number: int) -> None:
        for day in range(1, 4):
            for topic in topics:
                bench.leader.topic(topic).send(b"%d" % number, deliver_after=DAY_S * day)
        ship(bench.leader)

    def full(name: str) -> None:
        if name in left:
            left.remove(name)
            raise StoreFull(bench.path, "no space to write")

    def fails() -> None:
        left.extend([step] * 2)
        with patch("duelog.sending.wal_segments.reach", full):
            while left:
                with pytest.raises(StoreFull):
                    follower.step()

    send(1)
    manifested(bench.leader)
    send(2)
    follower = Standby(bench.path / "two", bench.bucket, lease_ms=LEASE_MS, elapsed=bench.elapsed)
    assert not follower.begin()
    download, fetched = bench.bucket.download, list[str]()

    def fetch(name: str) -> Iterator[bytes] | None:
        fetched.append(name)
        return download(name)

    with patch.object(bench.bucket, "download", fetch):
        for number in range(3, 6):
            fails()
            bench.pass_lease(0.4)
            send(number)
            assert not follower.step()
            send(10 * number)
        bench.pass_lease()
        fails()
        assert not follower.step()
        bench.take_over(follower)
    assert len(set(fetched)) == len(fetched)
    with bench.open("two") as store:
        assert list(store.check(deep=True)) == []
        for topic in topics:
            payloads = sorted(int(message.payload) for message in store.topic(topic).scheduled())
            assert payloads == sorted([1, 2, 3, 4, 5, 30, 40, 50] * 3)


def test_a_standby_that_finds_nothing_behind_the_manifest_knows_who_leads(bench: Bench) -> None:
    """By the object that it stands at; it waits for that one's lease, and leads."""
    bench.ship(b"1")
    bench.leader._engine.writer().apply_all()
    manifested(bench.leader)
    newest = read_manifest(bench.bucket, bench.bucket.manifests()[-1])
    assert bench.bucket.numbers()[-1] == newest.seq == newest.first - 1
    follower = bench.follow("two")
    assert (follower.epoch, present(follower.leader).lease_ms) == (1, LEASE_MS)
    bench.take_over(follower)
    assert bench.waiting("two") == {b"1"}


@pytest.mark.parametrize(("free", "error"), [(0, StoreFull), (1 << 30, StoreUnavailable)])
def test_a_write_of_a_standby_that_is_cut_short_is_a_full_disk_where_there_is_no_space(
    bench: Bench, free: int, error: type[DuelogError]
) -> None:
    """LMDB calls it an error of the disk; with space it is one, and ends the process."""
    follower = bench.follow("two")
    bench.ship(b"1")
    space = SimpleNamespace(f_bavail=free, f_frsize=1)
    cut_short = raising(StoreUnavailable(bench.path, "Input/output error", errno.EIO))
    with (
        patch("duelog.store.files.system_errors.os.statvfs", lambda path: space),
        patch("duelog.replica.restoring.recover", cut_short),
        pytest.raises(error),
    ):
        follower.step()
    assert not follower.step()
    bench.take_over(follower)
    assert bench.waiting("two") == {b"1"}


def test_a_standby_that_is_cut_off_behind_what_it_has_read_waits_for_the_lease_of_that(bench: Bench) -> None:
    """The leader had just put it. Before, the standby had read it and not noted when, and fenced at once."""
    follower = bench.follow("two")
    bench.pass_lease(0.6)
    bench.ship(b"1")
    bench.ship(b"2")
    cut_off = patch.object(bench.bucket, "span", raising(ReplicaUnreachable(URL, "is cut off")))
    with cut_off, pytest.raises(ReplicaUnreachable):
        follower.step()
    bench.pass_lease(0.6)
    assert not follower.step()
    bench.send(b"3")


def test_a_standby_lists_nothing_while_objects_come_one_by_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the next number, which costs a fraction; of many that have come, the rest is listed and read ahead."""
    follower = bench.follow("two")
    folders: list[str] = []
    pages = bench.bucket._pages

    def noted(folder: str, offset: str | None) -> Iterator[list[Listed]]:
        folders.append(folder)
        return pages(folder, offset)

    monkeypatch.setattr(bench.bucket, "_pages", noted)
    for number in range(3):
        bench.ship(b"%d" % number)
        assert not follower.step()
        assert not follower.step()
    assert folders == []
    for number in range(3, 8):
        bench.ship(b"%d" % number)
    assert not follower.step()
    assert folders == ["log"]
    bench.take_over(follower)
    assert bench.waiting("two") == {b"%d" % number for number in range(8)}


def test_a_standby_puts_no_fence_in_place_of_an_object_that_is_missing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which one is missing, as long as no newer manifest makes up for it, and fetches no file meanwhile.

    Before, it fetched all files of the newest manifest twice a second.
    """
    follower = bench.follow("two")
    for number in range(3):
        bench.ship(b"%d" % number)
    missing = bench.bucket.numbers()[-2]
    content = bench.bucket.read(missing)
    assert content is not None
    bench.bucket.delete([log_name(missing)])
    assert not follower.step()
    bench.pass_lease()
    download, fetched = bench.bucket.download, list[str]()

    def fetch(name: str) -> Iterator[bytes] | None:
        fetched.append(name)
        return download(name)

    monkeypatch.setattr(bench.bucket, "download", fetch)
    with pytest.raises(ReplicaDamaged, match=log_name(missing)):
        follower.step()
    files = len(fetched)
    assert files
    with pytest.raises(ReplicaDamaged, match=log_name(missing)):
        follower.step()
    assert (bench.bucket.read(missing), len(fetched)) == (None, files)
    bench.bucket.append(missing, content)
    assert not follower.step()
    bench.take_over(follower)
    assert bench.waiting("two") == {b"0", b"1", b"2"}


def test_a_standby_that_is_killed_begins_again(bench: Bench) -> None:
    """With what it left beside; killed between its fence and its opening, it fences once more."""
    bench.ship(b"1")
    killed = bench.follow("two")
    killed._put_fence(killed._log.before)  # type: ignore[union-attr, arg-type]
    present(killed._place).close()  # as the kernel does
    again = bench.follow("two")
    assert again.epoch == 2
    bench.take_over(again)
    assert again.epoch == 3
    assert bench.waiting("two") == {b"1"}


def test_a_restore_that_was_killed_as_it_removed_what_another_left_is_begun_again(
    bench: Bench,
) -> None:
    """Its mark went with the rest, in any order: what was left was taken for a stranger's. So was an empty one."""
    ship(bench.leader)
    target, staged = bench.path / "r", bench.path / "r.restoring"
    take_place("DIR", target, staged, "").close()
    (staged / "main").mkdir()

    def killed(path: Path) -> None:
        (path / MARK).unlink(missing_ok=True)
        raise KeyboardInterrupt

    with patch("duelog.replica.restoring.remove_tree", killed), pytest.raises(KeyboardInterrupt):
        restored(bench.bucket, target)
    restored(bench.bucket, target)
    staged.with_name("again.restoring").mkdir()
    restored(bench.bucket, bench.path / "again")


def test_of_two_processes_in_one_directory_the_second_is_refused(bench: Bench) -> None:
    """The first follows on, and leads. Before, the second removed what the first was making, and both went on there."""
    follower = bench.follow("two")
    with pytest.raises(InvalidArgument, match="another process is making"):
        bench.follow("two")
    with closing(take_place("DIR", bench.path / "r", bench.path / "r.restoring", "")):
        with pytest.raises(InvalidArgument, match="another process is making"):
            restored(bench.bucket, bench.path / "r")
        assert (bench.path / "r.restoring").exists()
    restored(bench.bucket, bench.path / "r")
    bench.ship(b"1")
    assert not follower.step()
    bench.take_over(follower)
    assert bench.waiting("two") == {b"1"}


def test_a_standby_waits_for_the_manifest_behind_a_gap(bench: Bench) -> None:
    """Groups that were given up are not in the log; the store as it is by now is. Before, its process ended."""
    follower = bench.follow("two")
    shipping = shipping_of(bench.leader)
    bench.bucket.is_down = True
    bench.send(b"given up")
    bench.leader._engine.writer().apply_all()
    bench.send(b"shipped")
    shipping.kept.keep([])
    shipping.kept._remove_all()
    shipping.kept.lost = True
    manifests, shipping._manifests = shipping._manifests, None
    bench.bucket.is_down = False
    ship(bench.leader)
    for _ in range(2):
        with pytest.raises(GapFound):
            follower.step()
    shipping._manifests, shipping._draft_at_s = manifests, 0
    ship(bench.leader)
    assert not follower.step()
    bench.take_over(follower)
    assert bench.waiting("two") == {b"given up", b"shipped"}


@pytest.mark.parametrize("unmarked", [False, True], ids=["moved", "unmarked"])
def test_a_store_that_a_kill_leaves_on_its_way_to_its_place_is_in_nobodys_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, unmarked: bool
) -> None:
    """It is done again, or opened. Before, what lay beside had lost its mark, and was refused."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    bench.ship(b"1")
    follower = bench.follow("two")
    with monkeypatch.context() as patch:
        if unmarked:
            patch.setattr(Path, "unlink", killed)
        else:
            patch.setattr("duelog.replica.following.move", killed)
        with pytest.raises(KeyboardInterrupt):
            bench.take_over(follower)
    assert (bench.path / "two" / "STORE").exists() == unmarked
    present(follower._place).close()  # as the kernel does
    if not unmarked:
        bench.take_over(bench.follow("two"))
    assert bench.waiting("two") == {b"1"}


def test_a_deposed_leader_sets_its_tail_aside_and_follows(bench: Bench) -> None:
    """What it had told and not shipped is listed, and sent again on request, once however often."""
    bench.ship(b"shipped")
    follower = bench.follow("two")
    bench.bucket.is_down = True
    told = [bench.send(b"told-%d" % day, day) for day in range(1, 4)]
    bench.leader.topic("a").send_payloads([b"batch"] * 5, deliver_after=DAY_S)
    bench.leader.close()
    bench.bucket.is_down = False
    bench.take_over(follower)
    with bench.open("two") as second:
        with pytest.raises(Deposed):
            bench.open("one")
        back = bench.follow("one")
        assert back.epoch == 2
        ((epoch, tail),) = read_aside(bench.path / "one").items()
        assert [each.message_id for each in tail[:3]] == list(map(str, told))
        assert [bytes(each.message.payload) for each in tail[3:]] == [b"batch"] * 5
        for _ in range(2):
            assert send_again(second, epoch, tail) == 8
        assert waiting(second) == {b"shipped", b"told-1", b"told-2", b"told-3", b"batch"}
        assert second.stats().pending == 9
        second.hand_over()
    assert back.step()
    with bench.open("one") as again:
        assert again.stats().replica_diverged == 1


def test_a_leader_that_had_shipped_everything_leaves_nothing_aside(bench: Bench) -> None:
    """Its directory is what the copy has; it goes, and the standby that it is now begins with the copy."""
    bench.ship(b"shipped")
    follower = bench.follow("two")
    bench.take_over(follower)
    with pytest.raises(Deposed):
        shipping_of(bench.leader).step()
    bench.leader.close()
    bench.follow("one")
    assert not (bench.path / "one").exists()
    assert not aside_of(bench.path / "one").exists()


def test_a_directory_that_a_process_has_open_is_not_set_aside(bench: Bench) -> None:
    """It may be stopped amid a send: what it writes and tells then would be in nobody's list, and removed."""
    ship(bench.leader)
    follower = bench.follow("two")
    bench.take_over(follower)
    with pytest.raises(StoreLocked):
        bench.follow("one")
    assert bench.leader.path.exists()
    bench.leader.close()
    bench.follow("one")
    assert not bench.leader.path.exists()


def test_a_removal_of_a_deposed_directory_that_is_killed_keeps_no_standby_from_beginning(bench: Bench) -> None:
    """Half of it lay in the way, and was refused: it was neither a store nor an empty directory."""
    ship(bench.leader)
    follower = bench.follow("two")
    bench.leader.close()
    bench.take_over(follower)

    def killed(path: Path) -> None:
        if path.exists():
            (path / "STORE").unlink()
            raise KeyboardInterrupt

    with patch("duelog.replica.set_aside.remove_tree", killed), pytest.raises(KeyboardInterrupt):
        bench.follow("one")
    for _ in range(2):
        bench.follow("one")
    assert not (bench.path / "one").exists()


def test_a_bucket_that_does_not_answer_leaves_the_tail_until_it_does(bench: Bench) -> None:
    """Before, the directory was set aside with an empty list: nothing of it was sent again."""
    ship(bench.leader)
    follower = bench.follow("two")
    bench.close_cut_off()
    bench.take_over(follower)
    cut_off = patch("duelog.replica.set_aside.read_object", raising(ReplicaUnreachable(URL, "is cut off")))
    with cut_off, pytest.raises(ReplicaUnreachable):
        bench.follow("one")
    assert read_aside(bench.path / "one") == {}
    bench.follow("one")
    assert [bytes(each.message.payload) for each in read_aside(bench.path / "one")[1]] == [b"told"]


def test_what_was_cancelled_or_replaced_in_a_tail_is_not_sent_again(bench: Bench) -> None:
    """But what took its place is; of a message that the copy has, that one stays. Before, it was the other way."""
    topic = bench.leader.topic("a")
    shipped = topic.send(b"shipped", deliver_after=DAY_S)
    ship(bench.leader)
    follower = bench.follow("two")
    bench.bucket.is_down = True
    assert topic.cancel(bench.send(b"cancelled"))
    topic.reschedule(bench.send(b"moved"), deliver_after=2 * DAY_S)
    topic.reschedule(shipped, deliver_after=2 * DAY_S)
    for payload in (b"first", b"second", b"third"):
        topic.send(payload, deliver_after=DAY_S, dedup_key="k", replace=True)
    bench.leader.close()
    bench.bucket.is_down = False
    bench.take_over(follower)
    bench.follow("one")
    assert [bytes(each.message.payload) for each in read_aside(bench.path / "one")[1]] == [b"moved", b"third"]


def test_tails_of_one_epoch_of_two_prefixes_are_both_sent_again(bench: Bench) -> None:
    """Before, the second counted as sent, since a producer of the same name had sent its numbers."""
    for ledger_id in (1, 7):
        message = Message(b"%d" % ledger_id, deliver_after=DAY_S)
        for _ in range(2):
            assert send_again(bench.leader, 1, [AsideMessage("a", f"{ledger_id}:0", 0, message)]) == 1
    assert waiting(bench.leader) == {b"1", b"7"}
    assert bench.leader.stats().pending == 2


def test_a_tail_behind_a_fence_that_was_pruned_is_kept(bench: Bench) -> None:
    """The log that is left begins behind it: nothing says any more what was not shipped. Before, it was removed."""
    ship(bench.leader)
    follower = bench.follow("two")
    bench.close_cut_off()
    bench.take_over(follower)
    with bench.open("two") as second:
        second.topic("a").send(b"later", deliver_after=DAY_S)
        ship(second)
        manifested(second)
        fence = next(seq for seq in bench.bucket.numbers() if log_object(bench.bucket, seq).kind == FENCE)
        bench.bucket.delete([log_name(seq) for seq in bench.bucket.numbers() if seq <= fence])
        bench.follow("one")
    with DelayedStore.open(aside_of(bench.path / "one") / "1" / "store", clock=bench.clock) as store:
        assert waiting(store) == {b"told"}


def test_what_was_set_aside_is_not_replaced(bench: Bench) -> None:
    """By the same directory that comes again from a backup: which of the two is to stay is for a person to say."""
    ship(bench.leader)
    follower = bench.follow("two")
    bench.close_cut_off()
    shutil.copytree(bench.path / "one", bench.path / "backup")
    bench.take_over(follower)
    bench.follow("one")
    shutil.move(bench.path / "backup", bench.path / "one")
    with pytest.raises(ReplicaRefused, match="in the way"):
        bench.follow("one")
    assert (aside_of(bench.path / "one") / "1" / "store" / "STORE").exists()
    assert (bench.path / "one" / "STORE").exists()


def test_a_tail_that_was_given_up_leaves_the_whole_directory_aside(bench: Bench) -> None:
    """Its log does not say what was not shipped, so that nothing may be removed."""
    bench.ship(b"shipped")
    follower = bench.follow("two")
    bench.close_cut_off()
    for kept in (bench.path / "one" / "wal").glob("*.kept"):
        kept.unlink()
    bench.take_over(follower)
    bench.follow("one")
    assert read_aside(bench.path / "one") == {1: []}
    with DelayedStore.open(aside_of(bench.path / "one") / "1" / "store", clock=bench.clock) as store:
        assert waiting(store) == {b"shipped", b"told"}


def test_a_leader_that_is_killed_ships_on_if_it_is_back_within_the_lease(bench: Bench) -> None:
    """With what it had not shipped; the standby goes on following it."""
    follower = bench.follow("two")
    bench.send(b"1")
    killed = crashed(bench.leader, bench.path / "killed")
    (killed / "STORE").unlink()
    (killed / "STORE").hardlink_to(bench.leader.path / "STORE")  # it is the same directory
    bench.pass_lease(0.9)
    with DelayedStore.open(killed, CONFIG, clock=bench.clock) as again:
        ship(again)
        bench.pass_lease(0.9)
        assert not follower.step()
        assert follower.epoch == 1
        shipping_of(again).step()
        again.topic("a").send(b"2", deliver_after=DAY_S)
        ship(again)
    assert follower.step()  # it was closed in order
    assert bench.waiting("two") == {b"1", b"2"}
    with pytest.raises(ForkFound):
        shipping_of(bench.leader).step()


def test_a_copy_of_the_directory_of_a_leader_is_refused_once_the_leader_renews_its_lease(bench: Bench) -> None:
    """It puts nothing before the lease has passed. Before, its first put ended the leader in its place."""
    bench.ship(b"1")
    crashed(bench.leader, bench.path / "copy")
    read, next_one = bench.bucket.read, bench.bucket.numbers()[-1] + 1

    def renewed(seq: int) -> bytes | None:
        if seq == next_one and read(seq) is None:
            bench.pass_lease(0.4)
            shipping_of(bench.leader).step()
            return None
        return read(seq)

    with (
        patch.object(bench.bucket, "read", renewed),
        pytest.raises(ForkFound, match="is a copy, and the original lead"),
    ):
        bench.open("copy")
    bench.ship(b"2")
    assert bench.leader.stats().replica_leads


def test_a_directory_that_was_moved_by_copying_leads_once_the_lease_has_passed(bench: Bench) -> None:
    """Where nothing leads that it is a copy of."""
    bench.ship(b"1")
    crashed(bench.leader, bench.path / "moved")
    read, begun_s = bench.bucket.read, bench.elapsed.now_s

    def passing(seq: int) -> bytes | None:
        bench.pass_lease(0.3)
        return read(seq)

    with patch.object(bench.bucket, "read", passing):
        store = bench.open("moved")
    with store:
        assert bench.elapsed.now_s >= begun_s + LEASE_MS / 1000
        assert waiting(store) == {b"1"}
        store.topic("a").send(b"2", deliver_after=DAY_S)


def test_a_copy_of_a_directory_that_was_closed_in_order_leads_without_a_wait(bench: Bench) -> None:
    """Its leader has given the lease up, so that nobody leads by it."""
    bench.ship(b"1")
    bench.leader.close()
    shutil.copytree(bench.path / "one", bench.path / "moved")
    begun_s = bench.elapsed.now_s
    with patch("duelog.replica.shipping.find_object", lambda bucket, seq: bench.pass_lease(0.3)):
        store = bench.open("moved")
    with store:
        assert (bench.elapsed.now_s, waiting(store)) == (begun_s, {b"1"})


def test_a_leader_whose_disk_fails_resigns_and_a_standby_leads_at_once(bench: Bench) -> None:
    """It writes nothing more, so nobody has to wait for its lease to pass."""
    bench.ship(b"told")
    follower = bench.follow("two")
    bench.send(b"told, not shipped")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with patch.object(SegmentFile, "write_through", fails), pytest.raises(StoreFailed):
        bench.send(b"lost")
    bench.leader.close()
    assert follower.step()
    assert bench.waiting("two") == {b"told", b"told, not shipped"}


def test_a_leader_that_hands_over_has_shipped_all_and_writes_no_more(bench: Bench) -> None:
    """So the standby need not wait for its lease, and nothing of it is set aside."""
    follower = bench.follow("two")
    bench.send(b"told")
    bench.leader.hand_over()
    with pytest.raises(StoreFailed, match="handed over"):
        bench.send(b"late")
    assert isinstance(failure_of(bench.leader), Deposed)
    assert follower.step()
    bench.leader.close()
    assert bench.follow("one").epoch == 2
    assert not aside_of(bench.path / "one").exists()
    assert bench.waiting("two") == {b"told"}


def test_a_leader_that_cannot_ship_says_that_it_has_not_handed_over(bench: Bench) -> None:
    """It may lead again, or another does once the lease has passed; a store without a lease has nobody to hand to."""
    bench.bucket.is_down = True
    bench.send(b"told")
    with pytest.raises(NotReplicated, match="could not ship"):
        bench.leader.hand_over()
    bench.leader.close()
    bench.bucket.is_down = False
    assert bench.waiting("one") == {b"told"}
    with DelayedStore.open(bench.path / "alone", clock=bench.clock) as alone:
        with pytest.raises(InvalidArgument, match="lease_ms"):
            alone.hand_over()
        alone.topic("a").send(b"goes on")


def test_a_leader_that_could_not_ship_all_does_not_resign(bench: Bench) -> None:
    """Though the bucket answers again by the end of its close: what is left is shipped when it is opened again."""
    bench.send(b"told")
    bench.bucket.faults = iter(("down",))
    bench.leader.close()
    assert log_object(bench.bucket, bench.bucket.numbers()[-1]).kind != RESIGNED
    bench.lead()
    bench.leader.close()
    follower = Standby(bench.path / "two", bench.bucket, lease_ms=LEASE_MS, elapsed=bench.elapsed)
    assert (follower.begin(), follower.step()) == (False, True)  # it has resigned
    assert bench.waiting("two") == {b"told"}


def test_a_leader_whose_thread_could_not_ship_all_does_not_resign(bucket: FaultyBucket, tmp_path: Path) -> None:
    """Nor does one whose thread ships, where the bucket answers again as that ends."""
    end = Shipping.end

    def ends(shipping: Shipping) -> None:
        bucket.is_down = False
        end(shipping)

    store = DelayedStore.open(tmp_path / "store", CONFIG, clock=SystemClock())
    bucket.is_down = True
    store.topic("a").send(b"told", deliver_after=DAY_S)
    with patch.object(Shipping, "end", ends):
        store.close()
    assert RESIGNED not in [each.kind for each in log_of(bucket)]


def test_a_replicated_send_is_never_told_behind_the_fence(bench: Bench) -> None:
    """The deposed leader says that it is not replicated, and the standby does not have it."""
    config = StoreConfig(replica=URL, lease_ms=LEASE_MS, durability="replicated", replicated_timeout_ms=100)
    bench.leader.close()
    bench.lead(config)
    follower = bench.follow("two")
    bench.send(b"told")
    follower.step()
    bench.pass_lease(0.7)
    follower._seen_s -= LEASE_MS  # its clock runs fast: what is replicated is safe all the same
    assert follower.step()
    with pytest.raises(NotReplicated):
        bench.send(b"late")
    assert bench.waiting("two") == {b"told"}


def test_a_leader_that_ships_nothing_tells_no_id_that_the_next_one_tells(bench: Bench) -> None:
    """Its takeover commit is in the copy before it tells any."""
    bench.ship(b"x")
    told: list[MessageId] = []
    for name in ("two", "three", "four"):
        follower = bench.follow(name)
        bench.take_over(follower)
        store = bench.open(name)
        told += [store.topic(topic).send(b"x", deliver_after=DAY_S * day) for topic in ("a", name) for day in (0, 1, 2)]
        bench.bucket.is_down = True
        store.close()
        bench.bucket.is_down = False
    assert len(told) == len(set(told))


def test_a_version_of_a_document_that_was_not_shipped_is_given_to_no_other(bench: Bench) -> None:
    """Who read that one, and puts in its place, would replace another that it never saw."""
    bench.leader.documents.put("a", b"shipped")
    ship(bench.leader)
    follower = bench.follow("two")
    bench.bucket.is_down = True
    lost = bench.leader.documents.put("a", b"lost")
    bench.leader.close()
    bench.bucket.is_down = False
    bench.take_over(follower)
    with bench.open("two") as second:
        second.documents.put("a", b"another")
        with pytest.raises(DocumentChanged):
            second.documents.put("a", b"in its place", expected=lost)


def test_no_more_ids_are_told_than_a_takeover_passes_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch beyond that waits for the copy, whatever the durability; without the bucket its ids are not told."""
    monkeypatch.setattr("duelog.replica.shipping.ENTRIES", 100)
    topic = bench.leader.topic("a")
    topic.send_payloads([b""] * 50, deliver_after=DAY_S)
    bench.bucket.is_down = True
    with pytest.raises(NotReplicated):
        topic.send_payloads([b""] * 200, deliver_after=DAY_S)
    bench.bucket.is_down = False
    topic.send_payloads([b""] * 500, deliver_after=DAY_S)
    assert not shipping_of(bench.leader).is_far_behind


def test_what_was_written_before_the_lease_passed_is_not_told_as_never_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in doubt (NotReplicated), where NotLeader says that nothing was done."""
    config = StoreConfig(replica=URL, lease_ms=LEASE_MS, durability="replicated", replicated_timeout_ms=100)
    bench.leader.close()
    bench.lead(config)
    sender = bench.leader._engine.sending.sender
    send_one = sender.send_one

    def slowly(*arguments: Any) -> MessageId:
        message_id = send_one(*arguments)
        bench.bucket.is_down = True
        bench.pass_lease(1)
        return message_id

    monkeypatch.setattr(sender, "send_one", slowly)
    with pytest.raises(NotReplicated):
        bench.send(b"x")
    with pytest.raises(NotLeader):
        bench.send(b"x")
    bench.bucket.is_down = False


def test_a_late_put_of_a_stalled_leader_counts_after_a_look(bench: Bench) -> None:
    """Its number was taken, read and pruned meanwhile, so it is created; and the look finds who leads."""
    bench.ship(b"1")
    follower = bench.follow("two")
    bench.take_over(follower)
    with bench.open("two") as second:
        second.topic("a").send(b"2", deliver_after=DAY_S)
        ship(second)
        manifested(second)
        stalled = shipping_of(bench.leader).writer.seq
        bench.bucket.delete([f"log/{number:016d}" for number in bench.bucket.numbers() if number <= stalled + 2])
        with pytest.raises(Deposed):
            shipping_of(bench.leader).step()


def test_a_directory_that_another_leads_by_the_same_epoch_is_a_fork(bench: Bench) -> None:
    """A copy of a directory does not follow: it is said that there are two."""
    bench.leader.close()
    shutil.copytree(bench.path / "one", bench.path / "copy")
    with DelayedStore.open(bench.path / "one", CONFIG) as store:
        store.topic("a").send(b"")
        with pytest.raises(ForkFound):
            Standby(bench.path / "copy", bench.bucket, lease_ms=LEASE_MS, elapsed=bench.elapsed).begin()


def test_a_new_leader_takes_no_file_of_the_one_before_for_its_own(bench: Bench) -> None:
    """A standby numbers what it applies its own way: a file with the same last place may lack the group behind it."""
    numbers = itertools.count()

    def ship_more(count: int) -> None:
        for _ in range(count):
            bench.ship(b"%d" % next(numbers))
            bench.leader._engine.writer().apply_all()

    bench.send(b"%d" % next(numbers), days=2)  # in a day that nothing is appended to afterwards
    ship_more(1)
    manifested(bench.leader)
    follower = bench.follow("two")
    ship_more(2)
    bench.ship(b"%d" % next(numbers))
    assert not follower.step()
    ship_more(1)
    manifested(bench.leader)
    bench.ship(b"%d" % next(numbers))
    assert not follower.step()
    bench.take_over(follower)
    with bench.open("two") as second:
        manifested(second)
        newest = read_manifest(bench.bucket, bench.bucket.manifests()[-1])
        assert {made_by(2) in file.name for file in newest.files} == {True}
    restored(bench.bucket, bench.path / "restored")
    with DelayedStore.open(bench.path / "restored", clock=bench.clock) as store:
        assert waiting(store) == {b"%d" % number for number in range(next(numbers))}


def overwriting(bucket: FaultyBucket, seq: int, content: Content, tries: int = 0) -> None:
    """Put a log object, whether its number is taken or not."""
    try:
        bucket.create(log_name(seq), content)
    except AlreadyThere:
        bucket.put(log_name(seq), content)


def none(*_: object) -> None:
    """Do nothing."""


WRONG: dict[str, tuple[object, str, object, Callable[[Bench], None]]] = {
    "a fence takes the place of another": (
        FaultyBucket, "append", overwriting, test_of_two_standbys_one_leads_and_the_other_follows_it
    ),
    "a standby waits for no lease": (
        Standby, "_has_passed", lambda *_: True, test_a_leader_that_renews_its_lease_is_not_followed_by_another
    ),
    "a leader puts nothing until it is open": (
        Standby, "beat", none, test_a_leader_that_takes_longer_than_the_lease_to_open_is_not_followed_by_another
    ),
    "a leader goes on behind its lease": (
        Shipping, "leads", True, test_a_leader_refuses_work_before_its_lease_has_passed
    ),
    "a put that came late counts": (
        LogWriter, "_look", none, test_a_late_put_of_a_stalled_leader_counts_after_a_look
    ),
    "nobody waits for the copy": (
        Shipping, "wait_for", none, test_a_replicated_send_is_never_told_behind_the_fence
    ),
    "ids go on where those of the copy end": (
        manifest_files, "renew_ids", none, test_a_leader_that_ships_nothing_tells_no_id_that_the_next_one_tells
    ),
    "a copy of a directory leads at once": (
        Shipping, "_refuse_copy", none,
        test_a_copy_of_the_directory_of_a_leader_is_refused_once_the_leader_renews_its_lease,
    ),
    "what was not shipped counts as shipped": (
        set_aside, "_unshipped", none, test_a_tail_that_was_given_up_leaves_the_whole_directory_aside
    ),
}  # fmt: skip
"""By the rule that is broken: what is in whose place, and the test that finds it."""


@pytest.mark.parametrize("rule", wrong_engines(WRONG, "a fence takes the place of another"))
def test_a_wrong_engine_is_found_out(rule: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these tests can fail."""
    owner, name, wrong, finds_it = WRONG[rule]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, DuelogError, pytest.fail.Exception)):
        finds_it(bench)
