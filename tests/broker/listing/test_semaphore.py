"""The semaphore: random use beside a twin, and what is easily missed by its name."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from duelog.broker.listing.memory_limits import AsyncSemaphore, Permit, Permits
from duelog.store.errors import InvalidArgument
from tests.broker.peers import TestLoop, idle
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


@dataclass(eq=False)
class Asked:
    """A request of the twin, and then its permit."""

    size: int
    old: Asked | None
    since: float
    gone: bool = False
    outcome: str = "waits"
    held: int = 0
    """Bytes of its permit."""
    counted: int = 0
    """Those that a limit counts."""
    live: bool = False


class Twin:
    """The semaphore as its description has it: who waits, in order, and who gets how much when."""

    def __init__(self, limit: int, queue: int) -> None:
        self.limit, self.queue, self.now, self.closed = limit, queue, 0.0, False
        self.asked: list[Asked] = []
        self.waiting: list[Asked] = []

    @property
    def in_use(self) -> int:
        """Bytes that the limit counts."""
        return sum(each.counted for each in self.asked)

    def ask(self, size: int, old: Asked | None) -> None:
        """Acquire, or update a permit."""
        made = Asked(size, old, self.now)
        self.asked.append(made)
        if self.closed:
            made.outcome = "PermitClosed"
        elif old is not None and size <= old.counted:
            self.grant(made, size)
        else:
            self.waiting.append(made)
        self.run()
        if made.outcome == "waits" and 0 < self.queue < len(self.waiting):
            self.end(made, "PermitQueueFull")

    def grant(self, made: Asked, size: int) -> None:
        """Give a permit, in place of the old one."""
        if made.old is not None:
            self.empty(made.old)
        made.held = min(size, self.limit) if self.limit else size
        made.counted = made.held if self.limit else 0
        made.live = True
        self.end(made, "granted")

    def empty(self, made: Asked) -> None:
        """Release, or forget."""
        made.held = made.counted = 0
        made.live = False

    def end(self, made: Asked, outcome: str) -> None:
        """Whoever waits behind it may be next."""
        made.outcome = outcome
        if made in self.waiting:
            self.waiting.remove(made)
        self.run()

    def run(self) -> None:
        """Serve the first that waits, or nobody: those that hold what is there and wait for more do not hold it up."""
        if not self.waiting:
            return
        head = self.waiting[0]
        old = head.old.counted if head.old else 0
        free = self.limit - self.in_use + old
        wanted = min(head.size, self.limit) if self.limit else head.size
        growing = {id(each.old) for each in self.waiting}
        if head.gone:
            self.end(head, "PermitCancelled")
        elif not self.limit or wanted <= free:
            self.grant(head, wanted)
        elif all(id(each) in growing for each in self.asked if each.live):
            self.grant(head, max(0, free))

    def close(self) -> None:
        """Nobody gets anything more."""
        self.closed = True
        for each in self.waiting:
            each.outcome = "PermitClosed"
        self.waiting.clear()

    def advance(self, seconds: float) -> None:
        """Requests that waited a second are not served any more."""
        self.now += seconds
        for each in [each for each in self.waiting if self.now - each.since >= 1]:
            if each in self.waiting:
                self.end(each, "PermitTimeout")


ACTIONS = ("acquire", "acquire", "acquire", "update", "update", "release", "cancel", "leave", "time", "limit", "close")


def outcome_of(future: Permits) -> str:
    """The twin's word for what became of a request."""
    if not future.done():
        return "waits"
    error = None if future.cancelled() else future.exception()
    return "taken back" if future.cancelled() else "granted" if error is None else type(error).__name__


@pytest.mark.series
async def test_no_permit_is_lost_or_made() -> None:
    """Random use, each outcome that of a twin; at the end everything comes back, in any order."""
    for seed in range(length("DUELOG_SEMAPHORE_EXAMPLES", 60, 600)):
        await use_at_random(random.Random(seed))


async def use_at_random(chance: random.Random) -> None:
    """Use a semaphore and a twin, and compare them after each step."""
    queue, limit = chance.choice([0, 0, 3]), chance.choice([0, 5, 10, 10])
    stand, twin = Stand(limit, queue), Twin(limit, queue)
    semaphore = stand.semaphore
    futures: list[Permits] = []

    def ask(size: int, old: Asked | None) -> None:
        number = len(futures)

        def request() -> Permits:
            def is_gone() -> bool:
                return number < len(twin.asked) and twin.asked[number].gone

            if old is None:
                return stand.acquire(size, is_gone)
            return stand.update(futures[twin.asked.index(old)].result(), size, is_gone)

        if 0 < semaphore.max_permits < size and (old is None or twin.closed or size > old.counted):
            with pytest.raises(InvalidArgument):
                request()
        else:
            futures.append(request())
            twin.ask(size, old)

    for _ in range(100):
        step, size = chance.choice(ACTIONS), chance.randrange(8)
        granted = [each for each in twin.asked if each.live or (each.outcome == "granted" and chance.random() < 0.1)]
        if step == "acquire" or (not granted and step in {"update", "release"}):
            ask(size, None)
        elif step == "update":
            ask(size, chance.choice(granted))
        elif step == "release":
            permit = chance.choice(granted)
            stand.release(futures[twin.asked.index(permit)].result())
            twin.empty(permit)
            twin.run()
        elif step == "cancel" and twin.waiting:
            request = chance.choice(twin.waiting)
            futures[twin.asked.index(request)].cancel()
            await idle()
            twin.end(request, "taken back")
        elif step == "leave" and twin.waiting:
            chance.choice(twin.waiting).gone = True
        elif step == "time":
            stand.loop.advance(size / 8)
            twin.advance(size / 8)
        elif step == "limit":
            twin.limit = chance.choice([0, 4, 7, 10, 10])
            semaphore.set_limits(twin.limit, queue, 1_000)
            twin.run()
        elif step == "close" and chance.random() < 0.1:
            semaphore.close()
            twin.close()
        assert [outcome_of(each) for each in futures] == [each.outcome for each in twin.asked]
        sizes = [each.result().size if outcome_of(each) == "granted" else 0 for each in futures]
        assert sizes == [each.held for each in twin.asked]
        assert (semaphore.acquired, semaphore.queue_size) == (twin.in_use, len(twin.waiting))
        assert semaphore.available + semaphore.acquired == semaphore.max_permits
        assert semaphore.timeouts == sum(each.outcome == "PermitTimeout" for each in twin.asked)
    for future in futures:
        future.cancel()
    await idle()
    for future in reversed(futures):
        if outcome_of(future) == "granted":
            stand.release(future.result())
    assert (semaphore.acquired, semaphore.queue_size) == (0, 0)
