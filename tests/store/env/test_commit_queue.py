"""The queue of a group commit: which request leads, which returns after it, none waits for one that left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from duelog.store.env.commit_queue import CommitQueue, Request
from tests.store.group_commits import PATIENCE_S, until


class Committed:
    """A queue whose work is numbers; what is committed, batch by batch, and what each caller got, in order."""

    def __init__(self) -> None:
        self.queue = CommitQueue(lambda: None, self._commit_group, lambda error, done: None)
        self.batches: list[list[int]] = []
        self.got: list[tuple[int, Any]] = []
        self.before: dict[int, Callable[[], None]] = {}
        """What the leader does before it commits a batch, by its place."""
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
        assert self.queue.unless_led(lambda: True), "a request leads for ever"


def test_callers_of_one_group_return_one_after_the_other() -> None:
    """Each wakes the next when it has been woken, and the last the next leader: no two are woken at once."""
    served = Committed()
    woken: list[Request] = []
    pass_on = served.queue._pass_on

    def watch(request: Request) -> None:
        woken.append(request)
        pass_on(request)

    served.queue._pass_on = watch  # type: ignore[method-assign]
    served.before[0] = lambda: served.send_all(range(1, 6))
    served.before[1] = lambda: served.send_all(range(6, 9))
    assert served.queue.run(0) == 0
    served.join()
    assert served.batches == [[0], [1, 2, 3, 4, 5], [6, 7, 8]]
    assert sorted(served.got) == [(number, number * 10) for number in range(1, 9)]
    assert [request.work for request in woken] == list(range(9))


def test_nothing_is_done_beside_a_leader() -> None:
    """`unless_led` says so, from the first that leads to the last that has gone on."""
    served = Committed()
    seen: list[object] = []
    served.before[0] = lambda: seen.append(served.queue.unless_led(lambda: 1))
    served.queue.run(0)
    assert seen == [None]
    assert served.queue.unless_led(lambda: 1) == 1


def interrupt_main() -> None:
    """SIGINT for the thread that runs the test."""
    main = threading.main_thread().ident
    assert main is not None
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
    for others in (2, 0):
        served = Committed()
        request = Request(0)
        request.gate = threading.Lock()
        request.gate.acquire()
        following = [Request(number) for number in range(1, others + 1)]
        for before, after in zip([request, *following], following, strict=False):
            after.gate = threading.Lock()
            after.gate.acquire()
            before.following = after
        served.queue._led = request.goes_on = True
        served.queue._leave(request)
        assert [after.goes_on for after in following] == [number == 0 for number in range(others)]
        assert served.queue._led == (others > 0)


def test_requests_put_back_by_an_interrupted_leader_are_committed_by_the_next() -> None:
    """Their turns are those of the batch in which they are done."""
    served = Committed()

    def break_off() -> None:
        raise KeyboardInterrupt

    served.before[0], served.before[1] = lambda: served.send_all(range(1, 4)), break_off
    leaders: list[BaseException] = []
    run = served.queue.run

    def noted(work: int) -> Any:
        try:
            return run(work)
        except KeyboardInterrupt as error:
            leaders.append(error)
            return None

    served.queue.run = noted  # type: ignore[method-assign]
    served.queue.run(0)
    served.join()
    assert served.batches == [[0], [1, 2, 3], [2, 3]]
    assert sorted(served.got, key=lambda got: got[0]) == [(1, None), (2, 20), (3, 30)]
    assert len(leaders) == 1


def test_a_leader_interrupted_before_it_commits_lets_others_lead() -> None:
    """It is still in the queue then, and is taken out of it."""
    served = Committed()
    lock, entered = served.queue._mutex, 0

    class Interrupted:
        """The queue's lock, of which the second taking is interrupted."""

        def __enter__(self) -> None:
            nonlocal entered
            entered += 1
            if entered == 2:
                raise KeyboardInterrupt
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    served.queue._mutex = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        served.queue.run(0)
    assert served.queue.run(1) == 10
    served.join()
    assert served.batches == [[1]]
