"""The WAL cannot be written, or there is no space for it or for what it holds: what was acknowledged stands."""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from duelog import ManualClock, Message
from duelog.errors import StoreFailed, StoreFull
from duelog.sending.wal_segments import CHECKPOINT_MS
from duelog.store.env import environment as environment_module
from duelog.store.env.environment import Environment
from duelog.store.files import failpoints
from duelog.store.wal import segment_file
from tests.conftest import OpenStore, in_threads
from tests.disaster.wal_faults import CONFIG, HOURS, FailingCalls, Sent, no_room
from tests.store.wal.segments import can_write_directly, through_page_cache

pytestmark = pytest.mark.fault

Failing = Callable[..., FailingCalls]
Armed = Callable[[str, Callable[[], None]], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Failing:
    """Puts failing calls into the place of the module os, for the WAL alone; only "pwritev" is past the page cache."""

    def put(call: str, error: int | None, after: int = 0) -> FailingCalls:
        calls = FailingCalls(call, error, after)
        monkeypatch.setattr(segment_file, "os", calls)
        monkeypatch.setattr(segment_file, "sync_data", calls.fdatasync)
        if call != "pwritev":
            through_page_cache(monkeypatch)
        elif not can_write_directly(tmp_path):
            pytest.skip("the file system has no writes past the page cache")
        return calls

    return put


@pytest.fixture
def sent(open_store: OpenStore) -> Sent:
    """A store with a WAL that holds something."""
    sent = Sent(open_store(config=CONFIG))
    sent.send_some("begun")
    assert sent.has_unapplied
    return sent


@pytest.fixture
def armed() -> Iterator[Armed]:
    """Arms failpoints; they are disarmed at the end."""
    yield failpoints.arm
    failpoints.disarm()


ERRORS = (errno.EIO, errno.ENOSPC, None)
CALLS = [*(("pwrite", error) for error in ERRORS), ("fdatasync", errno.EIO), *(("pwritev", error) for error in ERRORS)]


@pytest.mark.parametrize("ending", [False, True], ids=["a group", "its end"])
@pytest.mark.parametrize(("call", "error"), CALLS)
def test_a_wal_that_cannot_be_written_closes_the_store_for_writing(
    sent: Sent, open_store: OpenStore, failing: Failing, armed: Armed, call: str, error: int | None, ending: bool
) -> None:
    """The sender fails, also the one that needs a new segment; so do later ones, until the store is opened again."""
    calls = failing(call, error)
    before = len(sent.ids)
    if ending:
        armed("wal.prepared", lambda: setattr(calls, "armed", True))
        with pytest.raises(StoreFailed):
            sent.send_some("many", 100)
        assert len(sent.ids) > before
        failpoints.disarm()
    else:
        calls.armed = True
        with pytest.raises(StoreFailed):
            sent.send("failed", 2)
    calls.armed = False
    for hours in HOURS:
        with pytest.raises(StoreFailed):
            sent.send("refused", hours)
    with pytest.raises(StoreFailed):
        sent.topic.send_batch([Message(b"refused"), Message(b"refused")])
    assert calls.failed == 1
    sent.store.close()
    store = open_store(config=CONFIG)
    sent.expect(store, () if ending else ("failed",))
    Sent(store).send_some("after")


@pytest.mark.parametrize("after", [0, 1, 5])
def test_each_of_several_senders_is_told_when_the_wal_fails(
    sent: Sent, open_store: OpenStore, failing: Failing, after: int
) -> None:
    """No send that shares the flush that failed is acknowledged; all before it are."""
    calls = failing("fdatasync", errno.EIO, after=after)
    calls.armed = True
    outcomes: dict[str, BaseException | None] = {}
    all_there = threading.Barrier(6)

    def send(number: int) -> None:
        all_there.wait()
        for step in range(8):
            text = f"thread {number} {step}"
            try:
                sent.send(text, HOURS[number % 3])
                outcomes[text] = None
            except Exception as error:
                outcomes[text] = error

    in_threads(partial(send, number) for number in range(6))
    assert len(outcomes) == 48
    failed = {text: error for text, error in outcomes.items() if error is not None}
    assert failed
    assert all(isinstance(error, StoreFailed) for error in failed.values()), failed
    calls.armed = False
    sent.store.close()
    sent.expect(open_store(config=CONFIG), tuple(failed))


def test_a_tick_without_space_for_unapplied_entries_goes_on_with_the_rest(
    sent: Sent, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Due messages are handed out, the tick raises StoreFull, and the next applies the entries when there is space."""
    reader = sent.topic.subscribe("reader")
    sent.topic.send(b"soon", deliver_after=1)
    room = no_room(sent.environment(3), monkeypatch)
    clock.advance(CHECKPOINT_MS + 1_000)
    with pytest.raises(StoreFull):
        sent.store.tick()
    assert [message.payload for message in reader.receive(9, timeout=0)] == [b"soon"]
    room()
    sent.store.tick()
    assert not sent.has_unapplied
    reader.close()


def test_maps_that_are_full_at_a_close_lose_nothing_of_the_wal(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps that may not grow: sends come to StoreFull, and everything acknowledged is there when they may."""
    monkeypatch.setattr(environment_module, "MAX_MAP_BYTES", 1 << 20)
    sent = Sent(open_store(config=CONFIG))

    def fill() -> None:
        for number in range(10_000):
            sent.send(f"fill {number}", HOURS[number % 3], 3_000)

    with pytest.raises(StoreFull):
        fill()
    assert len(sent.ids) > 100
    assert sent.has_unapplied
    sent.store.close()
    monkeypatch.setattr(environment_module, "MAX_MAP_BYTES", 1 << 30)
    sent.store = open_store(config=CONFIG)
    sent.topic = sent.store.topic("a")
    sent.send_some("after", 20)
    sent.expect(sent.store)


def test_a_store_whose_partitions_have_no_space_is_opened_and_gives_what_the_log_holds(
    sent: Sent, tmp_path: Path, open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has to be applied to be read, listed or handed out; closing leaves it in the log."""
    crashed = sent.crash(tmp_path / "crashed")
    with monkeypatch.context() as patched:
        commit = Environment.commit

        def fail(self: Environment, work: Callable[[Any], Any]) -> Any:
            if self.name.startswith("partition"):
                raise StoreFull(self.path, "no room, says the test")
            return commit(self, work)

        patched.setattr(Environment, "commit", fail)
        store = open_store(crashed, CONFIG)
        sent.expect(store)
        store.close()
    sent.expect(open_store(crashed, CONFIG))


def test_a_partition_that_failed_does_not_keep_others_from_applying(sent: Sent, clock: ManualClock) -> None:
    """Its entries stay in the log, all else is applied."""
    sent.environment(2).fail(OSError(errno.EIO, "says the test"))
    clock.advance(CHECKPOINT_MS)
    with contextlib.suppress(StoreFailed):
        sent.store.tick()
    unapplied = [hours for hours in HOURS if sent.environment(hours).has_unapplied]
    sent.store.close()
    assert unapplied == [2]


def test_an_interrupt_before_a_group_is_written_concerns_no_other_send(
    sent: Sent, tmp_path: Path, open_store: OpenStore, armed: Armed
) -> None:
    """Its messages are not there, and their ids are given out again."""
    _interrupt(sent, armed, "wal.before")
    sent.send_some("next")
    sent.expect(open_store(sent.crash(tmp_path / "crashed"), CONFIG), ("interrupted",))
    sent.expect(sent.store, ("interrupted",))


def test_an_interrupt_after_a_flush_closes_the_store_for_writing(
    sent: Sent, open_store: OpenStore, armed: Armed
) -> None:
    """Memory may not have what is on disk; opened anew, the store has it."""
    _interrupt(sent, armed, "wal.after")
    with pytest.raises(StoreFailed):
        sent.send("next", 2)
    sent.store.close()
    store = open_store(config=CONFIG)
    sent.expect(store, ("interrupted",))
    assert b"interrupted" in [bytes(message.payload) for message in store.topic("a").scheduled()]


def _interrupt(sent: Sent, armed: Armed, point: str) -> None:

    def interrupt() -> None:
        failpoints.disarm()
        raise KeyboardInterrupt

    armed(point, interrupt)
    with pytest.raises(KeyboardInterrupt):
        sent.send("interrupted", 2)


def test_a_segment_that_a_crash_left_half_made_is_removed_at_opening(open_store: OpenStore) -> None:
    """It is of the size of a segment, and may never be needed again."""
    sent = Sent(open_store(config=CONFIG))
    sent.store.close()
    unmade = sent.store.path / "wal" / "000000000099.tmp"
    unmade.write_bytes(bytes(8192))
    open_store(config=CONFIG)
    assert not unmade.exists()


@pytest.mark.parametrize("header", [b"damaged", b"\0" * 32])
def test_a_segment_that_is_applied_and_damaged_is_not_used_again(open_store: OpenStore, header: bytes) -> None:
    """Nothing in it counts, so no send may fail for it."""
    sent = Sent(open_store(config=CONFIG))
    sent.send_some("many", 100)
    sent.store.close()
    for file in sorted((sent.store.path / "wal").glob("*.wal"))[:-1]:
        with file.open("r+b") as damaged:
            damaged.write(header)
    sent.store = open_store(config=CONFIG)
    sent.topic = sent.store.topic("a")
    sent.send_some("more", 100)
    sent.expect(sent.store)
