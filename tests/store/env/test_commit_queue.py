"""The queue of a group commit: which request leads, which returns after it, none waits for one that left."""

import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from duelog.store.env import commit_queue
from duelog.store.env.commit_queue import CommitQueue, Request
from tests.conftest import in_threads, present
from tests.store.commits import PATIENCE_S, until


class Committed:
    """A queue whose work is numbers; what is committed, batch by batch, and what each caller got, in order."""

    def __init__(self) -> None:
        self.queue = CommitQueue(lambda: None, self._commit_group, lambda error: None)
        self.batches: list[list[int]] = []
        self.got: list[tuple[int, Any]] = []
        self.before: dict[int, Callable[[], None]] = {}
        """Callbacks that the leader runs before it commits a batch, by its place."""
        self._threads: list[threading.Thread] = []

    def _commit_group(self, batch: list[Request]) -> None:
        act = self.before.pop(len(self.batches), None)
        self.batches.append([request.work for request in batch])
        if act is not None:
            act()
        for request in batch:
            request.value = request.work * 10

    def send(self, number: int) -> None:
        """Have a thread bring a number, and see it waiting."""
        waiting = len(self.queue)

        def run() -> None:
            self.got.append((number, self.queue.run(number)))

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()
        until(lambda: len(self.queue) > waiting)

    def send_all(self, numbers: Iterable[int]) -> None:
        """Threads that bring a number each, in this order."""
        for number in numbers:
            self.send(number)

    def join(self) -> None:
        """Every caller has returned."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a thread waits for ever"
        assert not self.queue._led, "a request leads for ever"


def test_callers_of_one_group_return_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wakes the next when it has been woken, and the last the next leader: no two are woken at once."""
    served = Committed()
    woken: list[int] = []
    wake = Request.wake

    def watch(request: Request) -> bool:
        done = wake(request)
        woken.extend([request.work] if done else [])
        return done

    monkeypatch.setattr(Request, "wake", watch)
    served.before[0] = lambda: served.send_all(range(1, 6))
    served.before[1] = lambda: served.send_all(range(6, 9))
    assert served.queue.run(0) == 0
    served.join()
    assert served.batches == [[0], [1, 2, 3, 4, 5], [6, 7, 8]]
    assert sorted(served.got) == [(number, number * 10) for number in range(1, 9)]
    assert woken == list(range(1, 9))


def interrupt_main() -> None:
    """SIGINT for the thread that runs the test."""
    main = present(threading.main_thread().ident)
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_caller_interrupted_during_its_commit_keeps_no_other_from_returning(place: int) -> None:
    """First, in the middle and last of the group; it raises when its own work has been committed."""
    served = Committed()
    leading, queued, leaving = threading.Event(), threading.Event(), threading.Event()
    leave = served.queue._leave

    def left(request: Request) -> None:
        leaving.set()
        leave(request)
        assert request.value == place * 10

    served.queue._leave = left  # type: ignore[method-assign]

    def gather() -> None:
        leading.set()
        assert queued.wait(PATIENCE_S)

    def interrupt() -> None:
        interrupt_main()
        assert leaving.wait(PATIENCE_S)

    served.before[0], served.before[1] = gather, interrupt
    leader = threading.Thread(target=served.queue.run, args=(99,))
    leader.start()
    assert leading.wait(PATIENCE_S)
    served.send(100)  # it leads the group in which the main thread waits
    served.send_all(range(place))

    def others() -> None:
        until(lambda: len(served.queue) == place + 2)
        served.send_all(range(place + 1, 5))
        queued.set()

    helper = threading.Thread(target=others)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        served.queue.run(place)
    helper.join(PATIENCE_S)
    leader.join(PATIENCE_S)
    served.join()
    assert served.batches[1] == [100, *range(5)]
    assert sorted(served.got) == [(number, number * 10) for number in (*range(5), 100) if number != place]


def test_a_caller_interrupted_when_it_is_woken_wakes_the_next() -> None:
    """Its turn is not lost with it, whether the next one returns or leads."""
    for done in (True, False):
        queue = Committed().queue
        woken, following = Request(0), Request(1)
        for request in (woken, following):
            request.gate = threading.Lock()
            request.gate.acquire()
            request.done = done
            queue._queue.append(request)
        queue._led = True
        woken.done = woken.wake()
        queue._leave(woken)
        assert following.woken
        assert queue._led


def test_a_request_that_no_other_wakes_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interrupts of the caller before it, the second while it hands the lead on, hold nobody up for ever."""
    monkeypatch.setattr(commit_queue, "_LOOK_AGAIN_S", 0.01)
    served = Committed()
    served.queue._led = True  # left by who was interrupted twice
    assert served.queue.run(1) == 10
    served.queue._led = True
    in_threads(partial(served.queue.run, number) for number in range(2, 6))
    assert sorted(number for batch in served.batches for number in batch) == [1, 2, 3, 4, 5]
