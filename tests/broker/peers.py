"""A connection that records what it is sent, and what stands around it: workers, a loop whose time tests move."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from duelog.broker.protocol.commands import Connect, decode, refusal
from duelog.broker.protocol.failures import Refused, server_error
from duelog.broker.protocol.fields import Command
from duelog.broker.protocol.loop_calls import LoopCalls, Workers
from duelog.errors import DuelogError

T = TypeVar("T")
C = TypeVar("C", bound=Command)

_numbers = count(1)


class FakePeer:
    """A connection of a client; `sent` has every command with its blob."""

    def __init__(self, client_version: str = "Pulsar-Java-v3.0.0", protocol_version: int = 20) -> None:
        self.number = next(_numbers)
        self.address = f"10.0.0.{self.number}:1234"
        self.client_version = client_version
        self.protocol_version = protocol_version
        self.connect = Connect(client_version, protocol_version=protocol_version)
        self.role: str | None = None
        self.closed = False
        self.writable = True
        self.alive = True
        self.sent: list[tuple[Command, bytes | None]] = []
        self.paused: set[str] = set()
        self.pauses: list[str] = []
        self.reason: str | None = None
        self.pings = 0
        self._on_writable: list[Callable[[], object]] = []
        self.held = False
        """True while what is sent stays in the queue."""
        self._on_left: list[Callable[[], object]] = []

    def send(self, command: Command, blob: bytes | memoryview | None = None) -> None:
        if not self.closed:
            self.sent.append((command, None if blob is None else bytes(blob)))

    def send_frames(self, frames: bytes, blob: bytes | memoryview | None = None) -> None:
        while frames:
            size = int.from_bytes(frames[4:8], "big")
            if len(frames) < 8 + size and blob is not None:
                frames, blob = frames + bytes(blob), None
            self.send(decode(frames[8 : 8 + size]), blob)
            frames = frames[8 + size :]

    def close(self, reason: str) -> None:
        self.closed = True
        self.reason = reason

    def on_writable(self, call: Callable[[], object]) -> None:
        self._on_writable.append(call)

    def become_writable(self) -> None:
        self.writable = True
        calls, self._on_writable = self._on_writable, []
        for call in calls:
            call()

    def on_left(self, call: Callable[[], object]) -> None:
        if self.held and not self.closed:
            self._on_left.append(call)
        else:
            call()

    def leave(self) -> None:
        """Tell that what was sent has left, or the connection is gone."""
        calls, self._on_left = self._on_left, []
        for call in calls:
            call()

    def pause_reading(self, reason: str) -> None:
        self.paused.add(reason)
        self.pauses.append(reason)

    def resume_reading(self, reason: str) -> None:
        self.paused.discard(reason)

    async def ping(self, within_s: float) -> bool:
        self.pings += 1
        return self.alive

    def got(self, kind: type[C]) -> list[C]:
        """The commands of one type."""
        return [command for command, _ in self.sent if isinstance(command, kind)]

    def take(self) -> list[Command]:
        """Return and forget what was sent since the last time."""
        sent, self.sent = self.sent, []
        return [command for command, _ in sent]


class TestTimer:
    """A call at a time of the test's loop."""

    __test__ = False

    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at = at
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class TestLoop:
    """The running loop, but for its time."""

    __test__ = False

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[TestTimer] = []
        self.hops = 0
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> TestTimer:
        timer = TestTimer(self.now + delay, lambda: callback(*args))
        self.timers.append(timer)
        return timer

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object:
        self.hops += 1
        return self._loop.call_soon_threadsafe(callback, *args)

    def advance(self, seconds: float) -> None:
        """Move time on, and call what is due."""
        self.now += seconds
        due = [each for each in self.timers if each.at <= self.now and not each.cancelled]
        self.timers = [each for each in self.timers if each.at > self.now and not each.cancelled]
        for timer in due:
            timer.call()


class HeldWorkers(Executor):
    """Runs what is submitted at once; while `held`, when it is told to."""

    def __init__(self) -> None:
        self.held = False
        self.waiting: list[Callable[[], object]] = []

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **options))
            except BaseException as error:
                future.set_exception(error)

        if self.held:
            self.waiting.append(run)
        else:
            run()
        return future

    async def work(self) -> None:
        """Do what waits now; what that submits waits."""
        waiting, self.waiting = self.waiting, []
        for run_it in waiting:
            run_it()
        await idle()

    def release(self) -> None:
        """Run what waits, and what comes."""
        self.held = False
        waiting, self.waiting = self.waiting, []
        for run in waiting:
            run()


@dataclass
class OnLoop(Generic[T]):
    """A fixture that is made on the loop of its test."""

    make: Callable[[], T]


class Bench:
    """A loop, workers and calls for services under test."""

    def __init__(self) -> None:
        self.loop = TestLoop()
        self.executor = HeldWorkers()
        self.workers = Workers(self.executor)
        self.calls = LoopCalls(self.loop)


async def answered(service: Callable[[Any, Any], Awaitable[None] | None], peer: FakePeer, command: Command) -> None:
    """Have a service answer a command; a refusal is answered as the connection does."""
    try:
        answering = service(peer, command)
        if answering is not None:
            await answering
    except (Refused, DuelogError) as error:
        answer = refusal(command, server_error(error), str(error))
        assert answer is not None
        peer.send(answer)


async def idle() -> None:
    """Let the loop do all that it can without time passing."""
    for _ in range(40):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop."""
    asyncio.run(test)


async def soon(work: Awaitable[T]) -> T:
    """A command and what follows from it."""
    result = await work
    await idle()
    return result
