"""Libraries of tasks with Redis: one worker process that runs functions that do nothing, eight at a time where it can.

Redis has each command on disk before it answers, as duelog has each message.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..harness.compare import Subject
from .peer import has_module, module
from .redis_peer import RedisPeer

_THREADS = 8


def nothing() -> None:
    """The task of RQ, which finds it by its name."""


def _huey(port: int, n: int) -> float:
    huey = module("huey").RedisHuey("tasks", host="127.0.0.1", port=port, results=False)
    counting, done = iter(range(n - 1, -1, -1)), threading.Event()

    def handle() -> None:
        if next(counting) == 0:
            done.set()

    task = huey.task()(handle)
    for _ in range(n):
        task()
    consumer = huey.create_consumer(workers=_THREADS, periodic=False)
    started = time.perf_counter()
    consumer.start()
    done.wait()
    took = time.perf_counter() - started
    consumer.stop(graceful=True)
    return took


def _rq(port: int, n: int) -> float:
    """Its worker runs one at a time; this one does not fork for each."""
    rq = module("rq")
    connection = module("redis").Redis(host="127.0.0.1", port=port)
    queue = rq.Queue(connection=connection)
    for _ in range(n):
        queue.enqueue(nothing, result_ttl=0)
    worker = rq.SimpleWorker([queue], connection=connection)
    started = time.perf_counter()
    worker.work(burst=True, logging_level="WARNING")
    return time.perf_counter() - started


def _dramatiq(port: int, n: int) -> float:
    dramatiq = module("dramatiq")
    broker = module("dramatiq.brokers.redis").RedisBroker(host="127.0.0.1", port=port)
    dramatiq.set_broker(broker)
    counting, done = iter(range(n - 1, -1, -1)), threading.Event()

    def handle() -> None:
        if next(counting) == 0:
            done.set()

    actor = dramatiq.actor(handle)
    for _ in range(n):
        actor.send()
    worker = dramatiq.Worker(broker, worker_threads=_THREADS)
    started = time.perf_counter()
    worker.start()
    done.wait()
    took = time.perf_counter() - started
    worker.stop()
    return took


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """A library: its module, and what runs `n` tasks with a Redis at a port; the seconds that it takes."""

    label: str
    module: str
    work: Callable[[int, int], float]

    def missing(self) -> str | None:
        """How to get what is not installed; None where everything is."""
        return RedisPeer.missing() or (None if has_module(self.module) else f"pip install {self.module}")

    def run(self, n: int, directory: Path) -> float:
        """Tasks a second, with a Redis of its own."""
        redis: Any = RedisPeer("always")
        redis.open(directory, 0)
        try:
            return n / self.work(redis.port, n)
        finally:
            redis.close()


KINDS = {
    "huey": TaskQueue("huey, Redis", "huey", _huey),
    "rq": TaskQueue("RQ, Redis", "rq", _rq),
    "dramatiq": TaskQueue("Dramatiq, Redis", "dramatiq", _dramatiq),
}


def subjects() -> list[Subject]:
    """Subjects for `compare`."""
    return [Subject(key, kind.label, kind.missing()) for key, kind in KINDS.items()]
