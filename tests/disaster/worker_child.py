"""The program that the test of killed workers kills: a worker that says what it runs, and what it was sent.

Started once, as a fork server: each line on its standard input is one round.
"""

from __future__ import annotations

import os
from typing import Any

from duelog import Message, ReceivedMessage, StoreConfig, Worker
from duelog.store.errors import UnknownTopic
from tests.disaster.fork_server import serve
from tests.disaster.working import say

CONFIG = StoreConfig(map_bytes=1 << 26, wal_bytes=1 << 20, ack_flush_ms=1)
RETRIES = 3
"""Retries of poisoned messages; others have as many as there are kills."""
TOPICS = ("plain", "coroutine", "flaky", "poison")


class PoisonedError(Exception):
    """The error of a poisoned message."""


def run(request: dict[str, Any]) -> None:
    """Send some messages, and run the worker until it is killed, or until nothing is left."""
    say("pid", os.getpid())
    worker = Worker(request["path"], config=CONFIG)

    def begin(message: ReceivedMessage) -> str:
        name = message.payload.decode()
        say("start", name, message.redelivery_count + message.retries)
        return name

    @worker.task("plain", concurrency=3, retries=None)
    def plain(message: ReceivedMessage) -> None:
        say("done", begin(message))

    @worker.task("coroutine", concurrency=3, retries=None)
    async def coroutine(message: ReceivedMessage) -> None:
        say("done", begin(message))

    @worker.task("flaky", concurrency=2, retries=None, backoff=0.001)
    def flaky(message: ReceivedMessage) -> None:
        name = begin(message)
        if not message.redelivery_count + message.retries:
            raise ValueError(name)
        say("done", name)

    @worker.task("poison", concurrency=2, retries=RETRIES, backoff=0.001)
    def poison(message: ReceivedMessage) -> None:
        raise PoisonedError(begin(message))

    worker.start()
    for at, topic in enumerate(TOPICS):
        names = [f"{topic} {request['round']} {n}" for n in range(request["send"])]
        worker.store.topic(topic).send_batch([Message(name.encode(), deliver_after=at % 2 * 0.002) for name in names])
        say("sent", names)
    while request["kill_after"] is not None or is_left(worker):
        if not is_left(worker):
            say("idle")  # so that it is killed now
        with worker._monitor.lock:
            worker._monitor.wait(0.01)
    worker.stop()
    say("end")


def is_left(worker: Worker) -> bool:
    """True if a task has anything left to do, now or later."""
    for name in TOPICS:
        topic = worker.store.topic(name)
        try:
            if topic.stats().pending or topic.subscription("worker").stats().backlog:
                return True
        except UnknownTopic:
            continue
    return False


if __name__ == "__main__":
    serve(run)
