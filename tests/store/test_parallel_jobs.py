"""Jobs of several threads: all are done, errors are told, and an interrupt leaves no thread at work."""

import _thread
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from duelog.store.parallel_jobs import Jobs
from tests.conftest import raising
from tests.store.commits import PATIENCE_S, until


def test_each_job_is_done_once_however_many_threads_there_are() -> None:
    """Also with none but the caller's."""
    for threads in (0, 1, 4, 40):
        done: list[int] = []
        jobs = Jobs([partial(done.append, number) for number in range(20)])
        jobs.start(threads)
        jobs.finish()
        jobs.finish()
        assert sorted(done) == list(range(20))


def test_a_job_that_failed_is_tried_again_by_the_caller_and_the_others_are_done() -> None:
    """Its error is raised once the rest is done; a later call tries it once more."""
    failures, done = [OSError("first"), OSError("second")], list[str]()

    def fail() -> None:
        if failures:
            raise failures.pop(0)
        done.append("late")

    jobs = Jobs([fail, lambda: done.append("other")])
    for _ in range(2):
        with pytest.raises(OSError, match=r"first|second"):
            jobs.finish()
    assert done == ["other"]
    jobs.finish()
    assert done == ["other", "late"]


def test_without_threads_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has none left: the caller does all of it."""
    monkeypatch.setattr(_thread, "start_new_thread", raising(RuntimeError("can't start new thread")))
    told, done = list[int](), list[int]()
    jobs = Jobs([lambda: done.append(1)], lambda: told.append(1))
    jobs.start(4)
    assert (told, jobs.are_tried, done) == ([1], True, [])
    jobs.finish()
    assert done == [1]


def test_an_interrupt_while_a_thread_is_started_keeps_nothing_from_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has begun, and its caller does not know it: what both take is done once."""
    start = _thread.start_new_thread

    def interrupted(function: Callable[[], None], arguments: tuple[Any, ...]) -> None:
        start(function, arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", interrupted)
    done: list[int] = []
    jobs = Jobs([partial(done.append, number) for number in range(200)])
    with pytest.raises(KeyboardInterrupt):
        jobs.start(2)
    jobs.finish()
    assert sorted(done) == list(range(200))


def test_cancelling_waits_for_what_has_begun_and_lets_nothing_else_begin() -> None:
    """However often it is interrupted."""
    begun, go, done = threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        begun.set()
        assert go.wait(PATIENCE_S)
        done.append(1)

    jobs = Jobs([slow, lambda: done.append(2)])

    def cancel() -> None:
        assert begun.wait(PATIENCE_S)
        jobs.cancel()
        done.append(3)

    canceller = threading.Thread(target=cancel)
    with jobs._jobs[1].lock:  # the thread is at the first
        jobs.start(1)
        canceller.start()
        until(lambda: jobs._cancelled)
        assert done == []
        go.set()
    canceller.join(PATIENCE_S)
    assert done == [1, 3]
