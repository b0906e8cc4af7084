"""Parts of one piece of work side by side: each runs once, errors wait for the others, closing waits for all."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import pytest

from duelog.sending.worker_pool import WorkerPool, run_in_turn
from duelog.store.errors import ClosedError


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """Six threads, closed after the test."""
    made = WorkerPool(6, "test")
    yield made
    made.close()


def test_jobs_run_side_by_side_and_their_values_come_in_order(pool: WorkerPool) -> None:
    """Every job waits for all of them to have begun, which none would survive alone; more jobs than threads run too."""
    together = threading.Barrier(7, timeout=30)
    assert sorted(pool.run([together.wait] * 7)) == list(range(7))
    assert pool.run([functools.partial(pow, at, 2) for at in range(20)]) == [at * at for at in range(20)]


def test_the_first_error_by_order_is_raised_once_all_have_ended(pool: WorkerPool) -> None:
    """The job behind it has run to its end by then, also where the error is no Exception, and the pool goes on."""
    second_failed = threading.Event()
    ended: list[str] = []

    def fails_later() -> None:
        assert second_failed.wait(30)
        raise SystemExit("first")

    def fails_at_once() -> None:
        second_failed.set()
        raise KeyError("second")

    def goes_on() -> None:
        assert second_failed.wait(30)
        ended.append("third")

    with pytest.raises(SystemExit, match="first"):
        pool.run([lambda: None, fails_later, fails_at_once, goes_on])
    assert ended == ["third"]
    with pytest.raises(ValueError, match="own"):
        pool.run([lambda: int("own"), lambda: 2])
    assert pool.run([lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.parametrize("threads", [0, 2])
def test_where_no_thread_can_be_started_each_job_runs_once(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The calling thread runs what no other has begun, and a job that was submitted in vain is not run later."""
    ran: list[int] = []
    start, left = threading.Thread.start, iter(range(threads))

    def refuse(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        pool.run([functools.partial(ran.append, at) for at in range(5)])
    pool.run([functools.partial(ran.append, at) for at in range(5, 10)])
    pool.close()
    assert sorted(ran) == [*range(10)]


def test_closing_waits_for_what_was_begun_and_refuses_the_rest(pool: WorkerPool) -> None:
    """A job that is running when the pool is closed runs to its end, and its caller gets its value."""
    running, go_on = threading.Event(), threading.Event()
    found: list[list[int]] = []

    def slow() -> int:
        running.set()
        assert go_on.wait(30)
        return 2

    caller = threading.Thread(target=lambda: found.append(pool.run([lambda: 1, slow, lambda: 3])))
    caller.start()
    assert running.wait(30)
    closer = threading.Thread(target=pool.close)
    closer.start()
    go_on.set()
    caller.join(30)
    closer.join(30)
    assert found == [[1, 2, 3]]
    assert not closer.is_alive()
    with pytest.raises(ClosedError):
        pool.run([lambda: 1, lambda: 2])


def test_in_turn_all_jobs_run_although_one_fails() -> None:
    """The error is raised after the last of them."""
    ran: list[int] = []
    with pytest.raises(ValueError, match="second"):
        run_in_turn([lambda: ran.append(1), lambda: int("second"), lambda: ran.append(3)])
    assert ran == [1, 3]
