"""Parts of one piece of work side by side: each runs once, errors wait for the others, closing waits for all."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import pytest

from duelog.sending.crew import Crew, run_in_turn
from duelog.store.errors import ClosedError


def test_values_come_in_the_order_of_the_jobs_whoever_ran_them() -> None:
    """More jobs than threads, each run once."""
    crew = Crew(3, "test")
    ran: list[int] = []

    def square(at: int) -> int:
        ran.append(at)
        return at * at

    try:
        for count in (1, 2, 20):
            ran.clear()
            jobs = [functools.partial(square, at) for at in range(count)]
            assert crew.run(jobs) == [at * at for at in range(count)]
            assert sorted(ran) == list(range(count))
    finally:
        crew.close()


def test_jobs_do_run_side_by_side() -> None:
    """Every job waits for all of them to have begun, which none would survive alone."""
    crew = Crew(6, "test")
    together = threading.Barrier(7, timeout=30)
    try:
        crew.run([together.wait] * 7)
    finally:
        crew.close()


def test_the_first_error_by_order_is_raised_once_all_have_ended() -> None:
    """The job behind it has run to its end by then, and the crew goes on after it."""
    crew = Crew(4, "test")
    second_failed = threading.Event()
    ended: list[str] = []

    def fails_later() -> None:
        assert second_failed.wait(30)
        raise ValueError("first")

    def fails_at_once() -> None:
        second_failed.set()
        raise KeyError("second")

    def goes_on() -> None:
        assert second_failed.wait(30)
        ended.append("third")

    try:
        with pytest.raises(ValueError, match="first"):
            crew.run([lambda: None, fails_later, fails_at_once, goes_on])
        assert ended == ["third"]
        assert crew.run([lambda: 1, lambda: 2]) == [1, 2]
        with pytest.raises(ValueError, match="own"):
            crew.run([lambda: int("own"), lambda: 2])
    finally:
        crew.close()


def test_a_job_that_raises_what_is_no_exception_ends_neither_its_thread_nor_the_wait() -> None:
    """SystemExit in a lent job reaches who asked."""
    crew = Crew(1, "test")

    def leave() -> None:
        raise SystemExit(3)

    try:
        for _ in range(2):
            with pytest.raises(SystemExit):
                crew.run([lambda: None, leave])
        assert crew.run([lambda: 1, lambda: 2]) == [1, 2]
    finally:
        crew.close()


def test_closing_waits_for_what_was_begun_and_refuses_the_rest() -> None:
    """A job that is running when the crew is closed runs to its end, and its caller gets its value."""
    crew = Crew(2, "test")
    running, go_on = threading.Event(), threading.Event()
    found: list[list[int]] = []

    def slow() -> int:
        running.set()
        assert go_on.wait(30)
        return 2

    caller = threading.Thread(target=lambda: found.append(crew.run([lambda: 1, slow, lambda: 3])))
    caller.start()
    assert running.wait(30)
    closer = threading.Thread(target=crew.close)
    closer.start()
    go_on.set()
    caller.join(30)
    closer.join(30)
    assert found == [[1, 2, 3]]
    assert not closer.is_alive()
    with pytest.raises(ClosedError):
        crew.run([lambda: 1, lambda: 2])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


class _Watched(SimpleQueue[Any]):
    """Tells how often somebody came to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Semaphore(0)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.came.release()
        return super().get(block, timeout)


def test_nothing_of_a_job_is_kept_by_a_thread_that_waits_for_the_next() -> None:
    """A batch of messages must not stay in memory until another one comes."""

    class Batch:
        def __call__(self) -> int:
            return 1

    crew = Crew(1, "test")
    queue = crew._queue = _Watched()
    try:
        jobs = [Batch() for _ in range(2)]
        kept = [weakref.ref(job) for job in jobs]
        crew.run(jobs)
        del jobs
        assert queue.came.acquire(timeout=30)
        assert queue.came.acquire(timeout=30)  # it has come for the next
        gc.collect()
        assert [ref() for ref in kept] == [None] * 2
    finally:
        crew.close()


def test_in_turn_is_the_same_in_one_thread() -> None:
    """All of them run although one fails."""
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        run_in_turn([lambda: ran.append(1), fail, lambda: ran.append(3)])
    assert ran == [1, 3]
    assert run_in_turn([lambda: 1, lambda: 2]) == [1, 2]
