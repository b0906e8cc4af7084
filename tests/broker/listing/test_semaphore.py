"""The semaphore: each behaviour by its name, and a model of random use."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.broker.listing.memory_limits import (
    AsyncSemaphore,
    Permit,
    PermitCancelled,
    PermitClosed,
    PermitError,
    PermitQueueFull,
    Permits,
    PermitTimeout,
)
from duelog.store.errors import InvalidArgument
from tests.broker.peers import TestLoop, idle, run
from tests.proof import length


class Stand:
    """A semaphore whose time stands still until it is moved on."""

    def __init__(self, max_permits: int = 10, max_queue: int = 0, timeout_ms: int = 1_000) -> None:
        self.loop = TestLoop()
        self.semaphore = AsyncSemaphore(max_permits, max_queue, timeout_ms, self.loop)
        self.acquire = self.semaphore.acquire
        self.update = self.semaphore.update
        self.release = self.semaphore.release

    def now(self, permits: int) -> Permit:
        """A permit that is granted at once."""
        return self.acquire(permits).result()

    @property
    def waited(self) -> list[float]:
        """How long requests waited, in ms, in the order of their ends."""
        return [waited for _, waited in self.semaphore.waits._recent]

    def check(self, available: int, waiting: int) -> None:
        """Check the bytes left, and how many wait."""
        semaphore = self.semaphore
        assert (semaphore.available, semaphore.queue_size) == (available, waiting)
        assert semaphore.available + semaphore.acquired == semaphore.max_permits


async def test_what_is_there_is_granted_at_once() -> None:
    """And counted until it is released."""
    stand = Stand()
    permit = stand.now(7)
    assert permit.size == 7
    stand.check(3, 0)
    stand.release(permit)
    assert permit.size == 0
    stand.check(10, 0)
    assert stand.waited == [0.0]


@pytest.mark.parametrize("permits", [-1, 11])
async def test_fewer_than_none_and_more_than_the_limit_are_refused_at_once(permits: int) -> None:
    """The call raises, of acquire and of update; nothing changes."""
    stand = Stand()
    held = stand.now(4)
    with pytest.raises(InvalidArgument):
        stand.acquire(permits)
    with pytest.raises(InvalidArgument):
        stand.update(held, permits)
    stand.check(6, 0)
    assert held.size == 4


async def test_a_large_head_holds_back_smaller_ones() -> None:
    """Strict order: nothing passes what came before it."""
    stand = Stand()
    held = stand.now(5)
    large, small = stand.acquire(6), stand.acquire(1)
    stand.check(5, 2)
    stand.release(held)
    assert (large.result().size, small.result().size) == (6, 1)
    stand.check(3, 0)


async def test_a_full_queue_refuses_at_once() -> None:
    """The bound is of those that wait."""
    stand = Stand(max_queue=2)
    held = stand.now(10)
    waiting = [stand.acquire(1), stand.acquire(1)]
    refused = stand.acquire(1)
    assert isinstance(refused.exception(), PermitQueueFull)
    stand.release(held)
    assert all(each.result().size == 1 for each in waiting)
    stand.check(8, 0)


async def test_a_queue_without_a_bound_takes_any_number() -> None:
    """max_queue 0."""
    stand = Stand()
    stand.now(10)
    waiting = [stand.acquire(1) for _ in range(2_000)]
    stand.check(0, 2_000)
    stand.semaphore.close()
    assert all(isinstance(each.exception(), PermitClosed) for each in waiting)


async def test_a_timeout_lets_the_next_one_through() -> None:
    """It is counted, and the one behind it fits."""
    stand = Stand()
    stand.now(5)
    large = stand.acquire(6)
    stand.loop.advance(0.5)
    small = stand.acquire(5)
    stand.loop.advance(0.5)
    assert isinstance(large.exception(), PermitTimeout)
    assert small.result().size == 5
    assert stand.semaphore.timeouts == 1
    assert stand.waited == [0.0, 1_000.0, 500.0]
    stand.check(0, 0)


async def test_a_head_that_is_cancelled_is_removed_though_nothing_is_available() -> None:
    """At any run, here one for a request that comes; it makes room in the queue, too."""
    stand = Stand(max_queue=1)
    stand.now(10)
    gone = False
    head = stand.acquire(1, lambda: gone)
    gone = True
    behind = stand.acquire(1)
    assert isinstance(head.exception(), PermitCancelled)
    assert not behind.done()
    stand.check(0, 1)
    stand.semaphore.close()
    assert isinstance(behind.exception(), PermitClosed)


async def test_a_request_that_is_cancelled_as_it_comes_gets_nothing() -> None:
    """Its turn has come."""
    stand = Stand()
    assert isinstance(stand.acquire(1, lambda: True).exception(), PermitCancelled)
    stand.check(10, 0)


async def test_a_future_that_its_caller_cancels_makes_room_for_the_next() -> None:
    """Without a release; one in the middle of the queue as well."""
    stand = Stand()
    stand.now(5)
    head, middle, last = stand.acquire(6), stand.acquire(7), stand.acquire(5)
    middle.cancel()
    await idle()
    stand.check(5, 2)
    head.cancel()
    await idle()
    assert last.result().size == 5
    stand.check(0, 0)


async def test_growing_waits_for_the_difference_and_empties_the_old_permit() -> None:
    """While it waits the old one is good."""
    stand = Stand()
    old, other = stand.now(4), stand.now(6)
    growing = stand.update(old, 9)
    assert (growing.done(), old.size) == (False, 4)
    stand.release(other)
    assert (growing.result().size, old.size) == (9, 0)
    stand.check(1, 0)
    stand.release(old)
    stand.check(1, 0)


async def test_the_difference_is_that_to_what_the_old_permit_holds_when_it_is_granted() -> None:
    """Released meanwhile it holds nothing: the whole is waited for."""
    stand = Stand()
    old, other = stand.now(4), stand.now(6)
    growing = stand.update(old, 9)
    stand.release(old)
    assert not growing.done()
    stand.check(4, 1)
    stand.release(other)
    assert growing.result().size == 9
    stand.check(1, 0)


async def test_an_update_that_fails_leaves_the_old_permit_good() -> None:
    """By timeout, a full queue, and closing."""
    stand = Stand(max_queue=1)
    old, other = stand.now(4), stand.now(6)
    late = stand.update(old, 5)
    full = stand.update(old, 5)
    assert isinstance(full.exception(), PermitQueueFull)
    stand.loop.advance(1)
    assert isinstance(late.exception(), PermitTimeout)
    closed = stand.update(old, 5)
    stand.semaphore.close()
    assert isinstance(closed.exception(), PermitClosed)
    assert old.size == 4
    stand.check(0, 0)
    stand.release(old)
    stand.release(other)
    stand.check(10, 0)


async def test_shrinking_is_immediate() -> None:
    """Also past those that wait, who get what it gives back."""
    stand = Stand()
    old = stand.now(10)
    waiting = stand.acquire(6)
    assert stand.update(old, 4).result().size == 4
    assert waiting.result().size == 6
    stand.check(0, 0)


async def test_releasing_twice_gives_once() -> None:
    """Also a permit that was updated."""
    stand = Stand()
    old = stand.now(3)
    new = stand.update(old, 5).result()
    for permit in (old, new, new, old):
        stand.release(permit)
    stand.check(10, 0)
    again = Stand()
    twice = again.now(1)
    again.release(twice)
    again.release(twice)
    held, other = again.now(4), again.now(6)
    growing = again.update(held, 9)
    assert not growing.done()  # the other one is in use, and will come back
    again.release(other)
    assert growing.result().size == 9


async def test_closing_fails_what_waits_and_what_comes() -> None:
    """Held permits can be released."""
    stand = Stand()
    held = stand.now(10)
    waiting = stand.acquire(1)
    stand.semaphore.close()
    assert isinstance(waiting.exception(), PermitClosed)
    assert isinstance(stand.acquire(1).exception(), PermitClosed)
    assert isinstance(stand.update(held, 1).exception(), PermitClosed)
    stand.release(held)
    stand.check(10, 0)


async def test_without_a_limit_nothing_is_counted() -> None:
    """A permit of that time counts for nothing under a limit either; to grow it counts in full."""
    stand = Stand(max_permits=0)
    held = stand.now(1 << 40)
    assert held.size == 1 << 40
    stand.check(0, 0)
    stand.semaphore.set_limits(10, 0, 1_000)
    stand.check(10, 0)
    counted = stand.update(held, 8).result()
    stand.check(2, 0)
    stand.release(held)
    stand.release(counted)
    stand.check(10, 0)


async def test_a_lower_limit_takes_nothing_away_and_grants_nothing_until_enough_came_back() -> None:
    """Available is below nothing meanwhile."""
    stand = Stand()
    first, second = stand.now(5), stand.now(4)
    stand.semaphore.set_limits(6, 0, 1_000)
    assert (first.size, second.size) == (5, 4)
    waiting = stand.acquire(1)
    stand.check(-3, 1)
    stand.release(second)
    assert waiting.result().size == 1
    stand.check(0, 0)


async def test_what_waits_and_is_over_a_lowered_limit_gets_all_of_it() -> None:
    """Alone, in its turn."""
    stand = Stand()
    held = stand.now(5)
    large = stand.acquire(9)
    stand.semaphore.set_limits(6, 0, 1_000)
    stand.check(1, 1)
    stand.release(held)
    assert large.result().size == 6
    stand.check(0, 0)


async def test_a_higher_limit_or_none_lets_those_that_wait_through() -> None:
    """At once."""
    stand = Stand()
    stand.now(10)
    first, second = stand.acquire(4), stand.acquire(10)
    stand.semaphore.set_limits(14, 0, 1_000)
    assert first.result().size == 4
    stand.semaphore.set_limits(0, 0, 1_000)
    assert second.result().size == 10
    stand.check(-14, 0)


async def test_updates_that_wait_for_one_another_do_not_wait_for_ever() -> None:
    """All that is held is held by those that wait: the first of them gets what there is, and then the others."""
    stand = Stand()
    first, second = stand.now(4), stand.now(5)
    growing = stand.update(first, 9)
    assert not growing.done()
    also = stand.update(second, 10)
    assert growing.result().size == 5
    assert not also.done()
    stand.check(0, 1)
    stand.release(growing.result())
    assert also.result().size == 10
    stand.check(0, 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "update", "release", "cancel", "leave", "time", "limit", "run"]),
        st.integers(0, 12),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from([0, 5, 10]), st.integers(0, 4))
@pytest.mark.series
@settings(max_examples=length("DUELOG_SEMAPHORE_EXAMPLES", 100, 300), deadline=None)
def test_no_permit_is_lost_or_made(steps: list[tuple[str, int, int]], limit: int, queue: int) -> None:
    """Random use against a twin that adds up what the permits say; at the end everything comes back, in any order."""

    async def test() -> None:
        stand = Stand(limit, queue)
        semaphore = stand.semaphore
        futures: list[Permits] = []
        gone: set[int] = set()
        order: list[int] = []
        closed_over = limit == 0

        def note(number: int) -> None:
            order.append(number)

        def ask(size: int, old: Permit | None) -> None:
            number = len(futures)

            def is_gone() -> bool:
                return number in gone

            try:
                future = stand.acquire(size, is_gone) if old is None else stand.update(old, size, is_gone)
            except InvalidArgument:
                assert 0 < semaphore.max_permits < size
                return
            future.add_done_callback(lambda _: note(number))
            futures.append(future)

        def permits() -> list[Permit]:
            return [each.result() for each in futures if each.done() and not each.cancelled() and not each.exception()]

        for step, size, which in steps:
            found = permits()
            if step == "acquire" or (not found and step in {"update", "release"}):
                ask(size, None)
            elif step == "update":
                ask(size, found[which % len(found)])
            elif step == "release":
                stand.release(found[which % len(found)])
            elif step == "cancel" and futures:
                futures[which % len(futures)].cancel()
            elif step == "leave":
                gone.add(which)
            elif step == "time":
                stand.loop.advance(size / 4)
            elif step == "limit":
                closed_over = closed_over or size == 0
                semaphore.set_limits(size, queue, 1_000)
            await asyncio.sleep(0)
            assert semaphore.available + semaphore.acquired == semaphore.max_permits
            if not closed_over:
                assert semaphore.acquired == sum(each.size for each in permits())
            waiting = [each for each in futures if not each.done()]
            assert semaphore.queue_size == len(waiting)
        for number, future in enumerate(futures):
            gone.add(number)
            future.cancel()
        await idle()
        for permit in reversed(permits()):
            stand.release(permit)
        assert (semaphore.acquired, semaphore.queue_size) == (0, 0)
        for future in futures:
            assert future.cancelled() or future.exception() is None or isinstance(future.exception(), PermitError)
        semaphore.set_limits(10, 0, 1_000)
        assert stand.now(10).size == 10

    run(test())
