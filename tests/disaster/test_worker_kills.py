"""A worker is killed over and over in one store: each message is done at least once, none is given up early.

The program that is killed is `run`, of which this module is the fork server: a worker that says what it runs.

DUELOG_WORKER_KILLS says how often; twelve times unless it is set.
"""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, Message, ReceivedMessage, StoreConfig, Worker
from duelog.store.errors import UnknownTopic
from tests.disaster.fork_server import serve
from tests.disaster.kill_series import KILLED, Server
from tests.disaster.working import say
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_WORKER_KILLS", 4, 12)
MOST_FACTS = 40
"""The most facts that a worker says before it is killed."""
CONFIG = StoreConfig(map_bytes=1 << 26, wal_bytes=1 << 20, ack_flush_ms=1)
RETRIES = 3
"""Retries of poisoned messages; others have as many as there are kills."""
TOPICS = ("plain", "coroutine", "flaky", "poison")


def test_a_worker_that_is_killed_does_each_message_and_gives_none_up_early(places: Path) -> None:
    """Poisoned messages alone become dead letters, after as many failed deliveries as they may have."""
    server, chance = Server("tests.disaster.test_worker_kills"), random.Random(KILLS)
    sent: set[str] = set()
    done: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    kills, rounds = 0, 0
    while kills < KILLS or rounds == kills:  # the last round is not killed
        kill_after = None if kills == KILLS else chance.randrange(1, MOST_FACTS)
        request: dict[str, Any] = {
            "path": str(places / "store"),
            "round": rounds,
            "send": 2 if kill_after is not None else 0,
            "kill_after": kill_after,
        }
        for fact in server.run(request, kill_after):
            match fact:
                case ["sent", names]:
                    sent.update(names)
                case ["start", name, failed]:
                    starts[name] += 1
                    assert failed <= kills + starts[name], fact
                case ["done", name]:
                    done[name] += 1
                case ["exit", status]:
                    assert os.waitstatus_to_exitcode(status) == (0 if kill_after is None else KILLED)
                case ["trouble", text]:
                    pytest.fail(text)
        rounds += 1
        kills += kill_after is not None
    server.close()
    with DelayedStore.open(places / "store", CONFIG) as store:
        assert list(store.check(deep=True)) == []
        letters = {letter.payload.decode(): letter for letter in store.dead_letters()}
    poisoned = {name for name in sent if name.startswith("poison")}
    assert poisoned <= letters.keys()
    assert sent - poisoned <= done.keys()
    assert all(name.startswith("poison") for name in letters)
    for name, letter in letters.items():
        assert letter.attempts > RETRIES, letter
        assert letter.attempts <= starts[name] + kills, letter
        assert letter.reason in (f"PoisonedError: {name}", "redeliveries"), letter
    again = sum(done.values()) - len(done)
    print(f"\n{kills} kills, {len(sent)} messages, {again} of them done more than once, {len(letters)} dead letters")


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
