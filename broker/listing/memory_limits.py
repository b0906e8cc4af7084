"""Limits of the memory that topic lists take: lists being made (heap), and frames being written (direct); PIP-442.

Each kind is a semaphore of bytes. Requests wait in strict order, bounded in number and time. Whatever is acquired,
updated, released, cancelled or timed out, and however the limit changes: `available + acquired == limit`.

Two rules keep clients that read slowly, or not at all, from holding up others. One connection has one list on its way
at a time; its other requests wait for that, and hold nothing. And nobody holds heap while it waits for direct memory.

The last size of each namespace's list is kept, so that memory is asked for before there is a list. The first asker for
a namespace learns it for all: it goes on with a guess, the others wait for its report.

The limits may be changed while the broker runs; documents of the store keep what is set. All of it belongs to the event
loop's thread.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from prometheus_client.core import Metric

from ...store.errors import InvalidArgument
from ...store.log.documents import Documents
from ..configuration import BrokerConfig
from ..lookup.resources import Records, values_of
from ..protocol.failures import Refused, ServerError
from ..protocol.frames import FRAME_ROOM
from ..protocol.loop_calls import Loop, Timer
from ..protocol.peer import Peer

Permits = asyncio.Future["Permit"]
IsGone = Callable[[], bool]

Report = Callable[[int], None]
"""Called with the real size of a list, in bytes."""

FIRST_SIZE = 10 << 10
"""Bytes that a list is taken to have of which nothing is known."""

MAX_KNOWN = 10_000
"""Namespaces whose size is known; the one not asked for longest is forgotten."""

NAME_BYTES = 64
"""Memory of a name beside its UTF-8."""

_NAME_FRAME_BYTES = 3
"""Bytes of a name in a frame beside its UTF-8."""

_FRAME_BYTES = 64

QUANTILES = (0.5, 0.95, 0.99, 1.0)
WINDOW_S = 600.0
_MOST_WAITS = 4_096

BROKER_PREFIX = "pulsar_broker_topic_list_"
PROXY_PREFIX = "pulsar_proxy_topic_list_"

FIGURES = (
    ("memory_used_bytes", "gauge", "bytes in use for topic lists", "acquired"),
    ("memory_limit_bytes", "gauge", "bytes that may be used; 0: any", "max_permits"),
    ("queue_size", "gauge", "requests that wait", "queue_size"),
    ("queue_max_size", "gauge", "requests that may wait; 0: any number", "max_queue"),
    ("wait_time_ms", "summary", "how long was waited", "waits"),
    ("wait_time_ms_created", "gauge", "since when waits are counted, seconds since 1970", "created"),
    ("timeout_total", "counter", "requests that were not served in time", "timeouts"),
    ("timeout_created", "gauge", "since when they are counted, likewise", "created"),
)
"""The metrics of PIP-442 for each kind of memory: last part of the name, type, description, field of the semaphore."""


class PermitError(Refused):
    """A request got no permit."""

    def __init__(self, message: str) -> None:
        super().__init__(ServerError.TOO_MANY_REQUESTS, message)


class PermitClosed(PermitError):
    """The semaphore is closed."""


class PermitQueueFull(PermitError):
    """The queue is full."""


class PermitTimeout(PermitError):
    """The request waited for its timeout."""


class PermitCancelled(PermitError):
    """`is_cancelled()` was true as its turn came, or the connection is gone."""


class Limits(NamedTuple):
    """Limits of one kind of memory."""

    max_bytes: int = 100 << 20
    """0: no limit, and nothing is counted."""
    max_queue: int = 1_000
    """Requests that may wait; 0: any number."""
    timeout_ms: int = 25_000


@dataclass(slots=True, eq=False)
class Permit:
    """Bytes that may be used until they are released."""

    size: int
    """Bytes; 0 once it is released or updated."""
    _counted: int
    """Bytes that a limit counts: 0 where there was no limit."""
    _updates: int = 0
    """Updates that wait."""


@dataclass(slots=True, eq=False)
class _Request:
    size: int
    old: Permit | None
    is_cancelled: IsGone | None
    since: float
    future: Permits
    timer: Timer | None = None

    @property
    def old_counted(self) -> int:
        return 0 if self.old is None else self.old._counted


class WaitTimes:
    """Times that requests waited, in milliseconds."""

    def __init__(self, time: Callable[[], float]) -> None:
        """time: seconds, never going back."""
        self._time = time
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MOST_WAITS)
        self.count = 0
        self.sum_ms = 0.0

    def add(self, waited_ms: float) -> None:
        """Count the wait for a permit that was granted, or did not come in time."""
        self.count += 1
        self.sum_ms += waited_ms
        self._recent.append((self._time(), waited_ms))

    def quantiles(self) -> Mapping[float, float]:
        """Quantiles of the last 4,096 waits that ended in the last ten minutes; NaN: there is none."""
        oldest = self._time() - WINDOW_S
        waits = sorted(waited for ended, waited in self._recent if ended >= oldest) or [math.nan]
        return {quantile: waits[math.ceil(quantile * len(waits)) - 1] for quantile in QUANTILES}


class AsyncSemaphore:
    """The bytes of one kind of memory."""

    def __init__(self, max_permits: int, max_queue: int, timeout_ms: float, loop: Loop | None = None) -> None:
        """The first three as in `Limits`. loop: its time counts; None: the one that runs."""
        self._loop = loop or asyncio.get_running_loop()
        self._queue: OrderedDict[_Request, None] = OrderedDict()
        self._live: dict[Permit, None] = {}
        """Permits that were not released, the oldest first."""
        self._closed = False
        self.waits = WaitTimes(self._loop.time)
        self.acquired = 0
        """Bytes in use that a limit counts; after the limit was lowered perhaps more than it."""
        self.timeouts = 0
        self.created = time.time()
        """Seconds since 1970."""
        self.max_permits, self.max_queue, self.timeout_ms = max_permits, max_queue, timeout_ms

    @property
    def available(self) -> int:
        """Bytes that may be acquired; below 0 until enough came back under a lowered limit."""
        return self.max_permits - self.acquired

    @property
    def queue_size(self) -> int:
        return len(self._queue)

    def set_limits(self, max_permits: int, max_queue: int, timeout_ms: float) -> None:
        """Change the limits. Takes nothing away: nothing is granted until enough came back.

        What waits keeps its timeout; a request over a lowered limit waits for all of it.
        """
        self.max_permits, self.max_queue, self.timeout_ms = max_permits, max_queue, timeout_ms
        self._run()

    def acquire(self, permits: int, is_cancelled: IsGone | None = None) -> Permits:
        """Ask for a permit, granted in its turn. Cancelling the future takes the request back.

        is_cancelled: asked when its turn comes. Raises InvalidArgument for fewer than none and for more than the
        limit; the future, PermitError.
        """
        return self._request(permits, None, is_cancelled)

    def update(self, permit: Permit, size: int, is_cancelled: IsGone | None = None) -> Permits:
        """Ask for a permit in place of `permit`, which is empty then; if it fails, `permit` stays good.

        To shrink is immediate. To grow waits in turn for the difference to what `permit` holds when that is granted.
        Where every permit is held by one that waits to grow, waiting would not end: the first of those that wait gets
        what there is then, less than it asked for.
        """
        if 0 <= size <= permit._counted and not self._closed:
            request = self._made(size, permit, None)
            self._grant(request)
            self._run()
            return request.future
        return self._request(size, permit, is_cancelled)

    def release(self, permit: Permit) -> None:
        """Give back what a permit holds, once, however often it is called."""
        self._empty(permit)
        self._run()

    def close(self) -> None:
        """Fail what waits, and what comes; what is held can be released."""
        self._closed = True
        while self._queue:
            self._fail(next(iter(self._queue)), PermitClosed("the semaphore is closed"))

    # -- as listings use it: a request over the limit is one for the limit, and served alone ----------

    @asynccontextmanager
    async def holding(self, size: int, is_cancelled: IsGone | None = None) -> AsyncIterator[Permit]:
        """Hold a permit while the body runs. Raises PermitError, the body not begun."""
        async with self._released(self.acquire(self._cut(size), is_cancelled)) as permit:
            yield permit

    @asynccontextmanager
    async def updating(self, permit: Permit, size: int, is_cancelled: IsGone | None = None) -> AsyncIterator[Permit]:
        """Hold one in place of `permit` while the body runs. Raises PermitError, the body not begun, `permit` good."""
        async with self._released(self.update(permit, self._cut(size), is_cancelled)) as updated:
            yield updated

    def has_room(self, size: int) -> bool:
        return not self.max_permits or (not self._queue and self._cut(size) <= self.available)

    @asynccontextmanager
    async def _released(self, future: Permits) -> AsyncIterator[Permit]:
        """Release a permit at the end, also one that was granted while its task was being cancelled."""
        try:
            yield await future
        finally:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())

    def _cut(self, size: int) -> int:
        return min(size, self.max_permits) if self.max_permits else size

    # -- the queue ---------------------------------------------------------------------------------

    def _request(self, size: int, old: Permit | None, is_cancelled: IsGone | None) -> Permits:
        if size < 0:
            raise InvalidArgument("permits", size, "expected 0 or more")
        if 0 < self.max_permits < size:
            raise InvalidArgument("permits", size, f"more than the limit of {self.max_permits}")
        request = self._made(size, old, is_cancelled)
        self._queue[request] = None
        if old is not None:
            old._updates += 1
        if self._closed:
            self._fail(request, PermitClosed("the semaphore is closed"))
            return request.future
        self._run()
        if request in self._queue:
            if 0 < self.max_queue < len(self._queue):
                self._fail(request, PermitQueueFull(f"{self.max_queue} requests wait for permits"))
            else:
                request.timer = self._loop.call_later(self.timeout_ms / 1_000, self._time_out, request)
                request.future.add_done_callback(lambda _: self._take_back(request))
        return request.future

    def _made(self, size: int, old: Permit | None, is_cancelled: IsGone | None) -> _Request:
        return _Request(size, old, is_cancelled, self._loop.time(), asyncio.get_running_loop().create_future())

    def _run(self) -> None:
        """Grant from the head on what can be granted."""
        while self._queue:
            head = next(iter(self._queue))
            if head.future.done():
                self._remove(head)
            elif head.is_cancelled is not None and head.is_cancelled():
                self._fail(head, PermitCancelled("what the permit was for is gone"))
            elif self._cut(head.size) - head.old_counted <= self.available or not self.max_permits:
                self._admit(head)
            elif all(permit._updates for permit in self._live):
                head.size = max(0, self.available + head.old_counted)
                self._admit(head)
            else:
                return

    def _admit(self, head: _Request) -> None:
        self._remove(head)
        self.waits.add((self._loop.time() - head.since) * 1_000)
        self._grant(head)

    def _grant(self, request: _Request) -> None:
        if request.old is not None:
            self._empty(request.old)
        size = self._cut(request.size)
        permit = Permit(size, size if self.max_permits else 0)
        self.acquired += permit._counted
        self._live[permit] = None
        request.future.set_result(permit)

    def _empty(self, permit: Permit) -> None:
        if permit in self._live:
            del self._live[permit]
            self.acquired -= permit._counted
            permit.size = permit._counted = 0

    def _fail(self, request: _Request, error: PermitError) -> None:
        self._remove(request)
        if not request.future.done():
            request.future.set_exception(error)

    def _remove(self, request: _Request) -> None:
        del self._queue[request]
        if request.timer is not None:
            request.timer.cancel()
        if request.old is not None:
            request.old._updates -= 1

    def _take_back(self, request: _Request) -> None:
        """Remove a request that its caller has cancelled, if it waits still."""
        if request in self._queue:
            self._remove(request)
            self._run()

    def _time_out(self, request: _Request) -> None:
        if request in self._queue:
            if not request.future.done():
                self.timeouts += 1
                self.waits.add((self._loop.time() - request.since) * 1_000)
            self._fail(request, PermitTimeout(f"no permit for {request.size} bytes in {self.timeout_ms:g} ms"))
            self._run()


def check_frame(size: int, config: BrokerConfig) -> None:
    """Raise Refused for a frame at which clients would end their connection."""
    most = config.max_message_size + FRAME_ROOM
    if size > most:
        reason = f"the list takes {size} bytes; {most} go into a frame (maxMessageSize)"
        raise Refused(ServerError.NOT_ALLOWED, reason)


class LookupGate:
    """A limit of requests under way at once, entered by each."""

    def __init__(self, most: int) -> None:
        self.asked = self.failed = 0
        """Requests so far, and those that ended without an answer."""
        self.under_way = 0
        self._most = most

    def __enter__(self) -> None:
        """Refused: TooManyRequests."""
        self.asked += 1
        if self.under_way >= self._most:
            self.failed += 1
            raise Refused(ServerError.TOO_MANY_REQUESTS, f"{self.under_way} requests are under way")
        self.under_way += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.under_way -= 1
        self.failed += kind is not None


class ListSizes:
    """The last size of each list, by namespace and mode."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[Hashable, int | asyncio.Future[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    @asynccontextmanager
    async def estimate(self, key: Hashable) -> AsyncIterator[tuple[int, Report]]:
        """Yield the size of the list of `key`, and the function that the body calls once it knows the real one.

        Where the first asker ends without a report those that wait go on with FIRST_SIZE, and the next is the first.
        """
        report = partial(self._report, key)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            yield known if isinstance(known, int) else await asyncio.shield(known), report
            return
        first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._put(key, first)
        try:
            yield FIRST_SIZE, report
        finally:
            if self._known.get(key) is first:
                del self._known[key]
            if not first.done():
                known = self._known.get(key)
                first.set_result(known if isinstance(known, int) else FIRST_SIZE)

    def _report(self, key: Hashable, size: int) -> None:
        before = self._known.get(key)
        self._put(key, size)
        if isinstance(before, asyncio.Future) and not before.done():
            before.set_result(size)

    def _put(self, key: Hashable, size: int | asyncio.Future[int]) -> None:
        self._known[key] = size
        self._known.move_to_end(key)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)


def list_bytes(names: Collection[str]) -> int:
    """Memory of a list of names."""
    return sum(map(name_bytes, names))


def name_bytes(name: str) -> int:
    """Memory of a name in a list."""
    return NAME_BYTES + (len(name) if name.isascii() else len(name.encode()))


def frame_bytes(size: int, names: int) -> int:
    """Bytes, or a little more, of a frame with `names` names that are `size` bytes by `list_bytes`."""
    return size - (NAME_BYTES - _NAME_FRAME_BYTES) * names + _FRAME_BYTES


async def all_left(peer: Peer) -> None:
    """Wait until all that is queued for a client has left the process, or the connection is gone."""
    left = asyncio.Event()
    peer.on_left(left.set)
    await left.wait()


class DualMemoryLimiter:
    """Both kinds of memory, and whose turn it is on each connection."""

    def __init__(self, heap: Limits, direct: Limits, loop: Loop) -> None:
        self.heap = AsyncSemaphore(*heap, loop)
        """For lists being made."""
        self.direct = AsyncSemaphore(*direct, loop)
        """For frames being written."""
        self.sizes = ListSizes()
        self._turns: dict[int, tuple[asyncio.Lock, set[asyncio.Task[None]]]] = {}
        """By connection, the lock of its lists, and the tasks that have it or wait for it."""

    @asynccontextmanager
    async def turn(self, peer: Peer) -> AsyncIterator[None]:
        """Run the body while no other list of the connection is on its way. Raises PermitCancelled: it is gone."""
        if peer.closed:
            raise PermitCancelled("the connection is gone")
        task = cast("asyncio.Task[None]", asyncio.current_task())
        lock, tasks = self._turns.setdefault(peer.number, (asyncio.Lock(), set()))
        tasks.add(task)
        try:
            async with lock:
                yield
        finally:
            tasks.discard(task)
            if not tasks:
                del self._turns[peer.number]

    def gone(self, peer: Peer) -> None:
        """Cancel the tasks that make the lists of a connection that has ended."""
        if peer.number in self._turns:
            for task in list(self._turns[peer.number][1]):
                task.cancel()

    def set_limits(self, heap: Limits, direct: Limits) -> None:
        self.heap.set_limits(*heap)
        self.direct.set_limits(*direct)

    def close(self) -> None:
        self.heap.close()
        self.direct.close()

    def collect(self, prefix: str, cluster: str) -> Iterator[Metric]:
        """Yield the metrics of PIP-442, named with `prefix`."""
        labels = {"cluster": cluster}
        for kind, semaphore in (("heap", self.heap), ("direct", self.direct)):
            waits = semaphore.waits
            for name, metric, text, field in FIGURES:
                full_name = f"{prefix}{kind}_{name}"
                family = Metric(full_name.removesuffix("_total"), f"PIP-442, {kind}: {text}", metric)
                if metric == "summary":  # prometheus_client's own has no quantiles
                    for quantile, waited in waits.quantiles().items():
                        family.add_sample(full_name, {**labels, "quantile": str(quantile)}, waited)
                    family.add_sample(f"{full_name}_count", labels, waits.count)
                    family.add_sample(f"{full_name}_sum", labels, waits.sum_ms)
                else:
                    family.add_sample(full_name, labels, getattr(semaphore, field))
                yield family


MAX_VALUE = (1 << 31) - 1

_KINDS = ("Heap", "Direct")
_MEMORY = "maxTopicListInFlight{}MemSizeMB"
_TIMEOUT = "maxTopicListInFlight{}MemSizePermitsAcquireTimeoutMillis"
_QUEUE = "maxTopicListInFlight{}MemSizePermitsAcquireQueueSize"

NAMES = tuple(sorted(form.format(kind) for kind in _KINDS for form in (_MEMORY, _TIMEOUT, _QUEUE)))


class DynamicSettings:
    """Six settings, all whole numbers."""

    def __init__(self, documents: Documents, defaults: Mapping[str, int], limiter: DualMemoryLimiter) -> None:
        """defaults: by name, what is in force where nothing is set. limiter: has what is in force. Call `load`, too."""
        self._records: Records[int] = values_of(documents, "setting", "value")
        self._defaults = defaults
        self._limiter = limiter

    async def load(self) -> None:
        await self._records.load()
        self._apply()

    def values(self) -> dict[str, str]:
        found = {name: self._records.get(name) for name in NAMES}
        return {name: str(each) for name, each in found.items() if each is not None}

    async def set(self, name: str, text: str) -> None:
        """Set a setting durably and at once. Raises InvalidArgument, and what the store raises."""
        value = _checked(_known(name), text)
        await self._records.change(name, lambda before: value)
        self._apply()

    async def delete(self, name: str) -> None:
        """Have a setting follow the configuration again. Raises InvalidArgument, and what the store raises."""
        await self._records.remove(_known(name))
        self._apply()

    def _apply(self) -> None:
        found = {name: self._records.get(name) for name in NAMES}
        self._limiter.set_limits(
            *limits_of({name: self._defaults[name] if each is None else each for name, each in found.items()})
        )


def limits_of(settings: Mapping[str, int]) -> tuple[Limits, Limits]:
    """The limits of lists being made and of frames being written, of settings by their names."""
    heap, direct = ([settings[form.format(kind)] for form in (_MEMORY, _QUEUE, _TIMEOUT)] for kind in _KINDS)
    return Limits(heap[0] << 20, *heap[1:]), Limits(direct[0] << 20, *direct[1:])


def _known(name: str) -> str:
    if name not in NAMES:
        raise InvalidArgument("name", name, f"no setting that can be changed; there are {', '.join(NAMES)}")
    return name


def _checked(name: str, text: str) -> int:
    least = 1 if name.endswith("Millis") else 0
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if not least <= value <= MAX_VALUE:
        raise InvalidArgument(name, text, f"expected a whole number, {least} to {MAX_VALUE}")
    return value
