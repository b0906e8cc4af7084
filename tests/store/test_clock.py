"""Clocks: waiting by one, moving one by hand, a store's time; a queue of keys by time, a logger kept from flooding."""

import logging
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.clock import Clock, ManualClock, StoreClock, SystemClock
from duelog.store.errors import InvalidArgument
from duelog.store.limited_log import LimitedLog
from duelog.store.timer_queue import TimerQueue

PATIENCE_S = 20.0  # a thread that has not ended after this hangs


class Waiter:
    """A thread that waits in a loop, as the scheduler does, until the clock shows a time or it is told to stop."""

    def __init__(self, clock: Clock, until_ms: int | None, condition: threading.Condition | None = None) -> None:
        self.condition = condition or threading.Condition()
        self.clock = clock
        self.until_ms = until_ms
        self.stopped = False
        self.woken_ms: int | None = None
        self.holds = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.holds.wait(PATIENCE_S)

    def _run(self) -> None:
        with self.condition:
            self.holds.set()
            while not self.stopped and (self.until_ms is None or self.clock.now_ms() < self.until_ms):
                self.clock.wait(self.condition, self.until_ms)
            self.woken_ms = self.clock.now_ms()

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.condition.notify_all()

    def ended(self) -> bool:
        self.thread.join(PATIENCE_S)
        return not self.thread.is_alive()


class StubCondition(threading.Condition):
    """A condition whose waits take no time: they are noted, and run what the test has put in their place."""

    def __init__(self, notified: bool = False) -> None:
        super().__init__()
        self.notified = notified
        self.timeouts: list[float | None] = []
        self.clock_ns = 0
        self.wakes_early_ns = [0]

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        if timeout is not None:
            early_ns = self.wakes_early_ns.pop(0) if self.wakes_early_ns else 0
            self.clock_ns += round(timeout * 1e9) - early_ns
        return self.notified


def test_setting_a_manual_clock_wakes_all_waiters() -> None:
    """Each waiter has its condition, or shares one; every one is notified by one set(), and all are forgotten."""
    clock = ManualClock(0)
    waiters = [Waiter(clock, until_ms) for until_ms in (1, 50, 100)]
    waiters += [Waiter(clock, 100, waiters[0].condition) for _ in range(3)]
    clock.set(100)
    assert all(waiter.ended() for waiter in waiters)
    assert not clock._waiting, "the clock kept a condition that no thread waits on"


def test_no_wakeup_is_lost_when_moves_and_waits_race() -> None:
    """A waiter and a mover that take turns 300 times never hang: each step's wait ends by that step's move."""
    clock = ManualClock(0)
    condition = threading.Condition()
    arrived = threading.Semaphore(0)

    def run() -> None:
        for step in range(1, 301):
            with condition:
                arrived.release()
                while clock.now_ms() < step:
                    clock.wait(condition, step)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for _ in range(300):
        assert arrived.acquire(timeout=PATIENCE_S)
        clock.advance(1)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_manual_clock_waits_without_end_until_notified() -> None:
    """until_ms=None ends by a notification, and moves of the clock do not end the caller's loop."""
    clock = ManualClock(0)
    waiter = Waiter(clock, None)
    clock.advance(10**9)
    assert waiter.woken_ms is None
    waiter.stop()
    assert waiter.ended()


def test_a_time_that_has_come_is_not_waited_for() -> None:
    """With the wall clock set back, what is due by the mark of a store is due now."""
    for clock in (ManualClock(5), StoreClock(ManualClock(0), mark_ms=5)):
        condition = StubCondition()
        with condition:
            clock.wait(condition, 5)
            clock.wait(condition, 4)
        assert condition.timeouts == []


def test_a_manual_clock_can_be_set_back() -> None:
    """set() goes both ways; advance() only on."""
    clock = ManualClock(1_000)
    clock.set(10)
    assert clock.now_ms() == 10
    assert clock.advance(0) == 10


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "5"])
def test_a_manual_clock_takes_whole_milliseconds_only(value: object) -> None:
    """Bad times are refused with field and value, and leave the clock as it was."""
    clock = ManualClock(7)
    calls: list[tuple[Any, str]] = [(clock.advance, "ms"), (clock.set, "ms"), (ManualClock, "now_ms")]
    for call, field in calls:
        with pytest.raises(InvalidArgument) as caught:
            call(value)
        assert (caught.value.field, caught.value.value) == (field, value)
    assert clock.now_ms() == 7


def test_a_system_wait_that_ends_early_goes_on_to_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits to the nanosecond where the millisecond begins, and again if the condition woke short of it."""
    condition = StubCondition()
    condition.clock_ns = 10_000_400_000  # 10,000.4 ms
    condition.wakes_early_ns = [30_000, 10]
    monkeypatch.setattr(time, "time_ns", lambda: condition.clock_ns)
    with condition:
        SystemClock().wait(condition, 10_002)
    assert condition.timeouts == pytest.approx([0.0016, 0.00003, 0.00000001])
    assert condition.clock_ns == 10_002_000_000


def test_a_notified_system_wait_ends_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notification returns to the caller's loop at once."""
    condition = StubCondition(notified=True)
    condition.wakes_early_ns = [1_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: condition.clock_ns)
    with condition:
        SystemClock().wait(condition, 5)
    assert len(condition.timeouts) == 1


def test_a_long_wait_is_cut_so_that_a_stepped_clock_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real wait is longer than a minute, with or without a deadline, by the system clock or another real one."""

    class Other(Clock):
        def now_ms(self) -> int:
            return 0

    monkeypatch.setattr(time, "time_ns", lambda: 0)
    for clock in (SystemClock(), Other()):
        condition = StubCondition()
        with condition:
            clock.wait(condition, 3_600_000)
            clock.wait(condition, None)
            clock.wait(condition, 0)
        assert condition.timeouts == [60.0, 60.0]
    with condition:
        Other().wait(condition, 250)
    assert condition.timeouts[2:] == [0.25]


@given(st.lists(st.tuples(st.sampled_from(["set", "raise"]), st.integers(0, 1_000)), max_size=40))
@settings(max_examples=60)
def test_the_store_clock_never_shows_less_than_it_was_raised_to(steps: list[tuple[str, int]]) -> None:
    """Whatever the wrapped clock does, the mark is the maximum raised to, and now is the maximum of both."""
    wrapped = ManualClock(0)
    clock = StoreClock(wrapped, mark_ms=10)
    twin = 10
    for step, ms in steps:
        if step == "set":
            wrapped.set(ms)
        else:
            twin = max(twin, ms)
            assert clock.raise_to(ms) == twin
        assert clock.mark_ms == twin
        assert clock.now_ms() == max(twin, wrapped.now_ms())
        assert clock.wrapped is wrapped


def test_the_store_clock_waits_by_the_wrapped_clock() -> None:
    """A waiter on the store's clock wakes when the wrapped clock is advanced."""
    wrapped = ManualClock(0)
    waiter = Waiter(StoreClock(wrapped, mark_ms=500), 1_000)
    wrapped.advance(1_000)
    assert waiter.ended()
    assert waiter.woken_ms == 1_000


def test_only_a_clock_that_goes_by_itself_leads() -> None:
    """A clock that is moved by hand has none; the store's is as the one it wraps."""
    assert SystemClock.lead_ms > 0
    assert ManualClock(0).lead_ms == 0
    assert StoreClock(SystemClock()).lead_ms == SystemClock.lead_ms
    assert StoreClock(ManualClock(0)).lead_ms == 0


KEY = st.integers(0, 4)
TIME = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), KEY, TIME),
        st.tuples(st.just("replace"), KEY, TIME),
        st.tuples(st.just("discard"), KEY, st.none()),
        st.tuples(st.just("pop_due"), st.none(), TIME),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_key_comes_up_once_at_the_last_time_it_was_given(steps: list[tuple[str, int, int]]) -> None:
    """The first of keys with one time is the one that got it first; pushing never makes a key later."""
    queue: TimerQueue[int] = TimerQueue()
    twin: dict[int, tuple[int, int]] = {}  # key -> time, number of the step that gave it
    for number, (step, key, at_ms) in enumerate(steps):
        if step == "push":
            earlier = key not in twin or at_ms < twin[key][0]
            assert queue.push(key, at_ms) == earlier
            if earlier:
                twin[key] = at_ms, number
        elif step == "replace":
            queue.replace(key, at_ms)
            twin[key] = at_ms, number
        elif step == "discard":
            queue.discard(key)
            twin.pop(key, None)
        elif step == "clear":
            queue.clear()
            twin.clear()
        else:
            first = min(twin, key=twin.__getitem__, default=None)
            due = first if first is not None and twin[first][0] <= at_ms else None
            assert queue.pop_due(at_ms) == due
            if due is not None:
                del twin[due]
        queue._check()
        assert len(queue) == len(twin)
        assert [queue.due_ms(key) for key in range(5)] == [twin.get(key, (None, 0))[0] for key in range(5)]
        found = queue.next()
        if twin:
            first = min(twin, key=twin.__getitem__)
            assert found == (twin[first][0], first)
        else:
            assert found is None


def test_a_key_that_is_moved_without_end_takes_no_space() -> None:
    """Entries that were replaced go, also those that never come to the top of the heap."""
    queue: TimerQueue[str] = TimerQueue()
    queue.replace("first", 0)
    for at_ms in range(1, 10_000):
        queue.replace("moved", at_ms)
        queue._check()
        assert len(queue._heap) < 100
    assert (queue.pop_due(10_000), queue.pop_due(10_000), queue.pop_due(10_000)) == ("first", "moved", None)


class Seconds:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Seconds:
    """It stands at 0."""
    return Seconds()


@pytest.fixture
def limited(clock: Seconds) -> LimitedLog:
    """Three of each text in a minute."""
    return LimitedLog(logging.getLogger("duelog.test"), most=3, clock=clock)


def test_a_loop_logs_so_many_and_then_how_many_were_left_out(
    limited: LimitedLog, clock: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    """A minute later it is said again, with the number of those that were not."""
    for number in range(1_000):
        limited.log(logging.ERROR, "failed: %d", number)
    assert caplog.messages == ["failed: 0", "failed: 1", "failed: 2"]
    clock.now = 59.9
    limited.log(logging.ERROR, "failed: %d", 1_000)
    clock.now = 60.0
    limited.log(logging.ERROR, "failed: %d", 1_001)
    limited.log(logging.ERROR, "failed: %d", 1_002)
    assert caplog.messages[3:] == ["failed: 1001 (998 like it were not logged)", "failed: 1002"]


def test_one_text_does_not_silence_another(limited: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    """Each has its own number, and its level and traceback."""
    for _ in range(9):
        limited.log(logging.WARNING, "one")
    limited.log(logging.ERROR, "other", error=ValueError("x"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["ERROR"]
    assert caplog.records[-1].exc_info is not None


def test_what_no_handler_wants_is_not_counted(limited: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    """Once the level is lowered, all of it is logged."""
    for _ in range(9):
        limited.log(logging.DEBUG, "detail")
    with caplog.at_level(logging.DEBUG, "duelog.test"):
        limited.log(logging.DEBUG, "detail")
    assert caplog.messages == ["detail"]
