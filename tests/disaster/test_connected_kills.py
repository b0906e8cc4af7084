"""A process that has a store open, or one that is connected to it, is killed over and over: nothing is lost or doubled.

DUELOG_CONNECTED_KILLS says how often; a few times unless it is set.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import duelog
from duelog import DelayedStore, Message
from duelog.errors import Disconnected
from tests.packaging.tree import ROOT
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_CONNECTED_KILLS", 4, 100)

SERVER = """
import sys
sys.path.append({root!r})
from duelog import DelayedStore
with DelayedStore.open({path!r}):
    print("open", flush=True)
    sys.stdin.read()
"""


class Serving:
    """A process that has the store open; killed and begun again."""

    def __init__(self, path: Path) -> None:
        self._command = [sys.executable, "-c", SERVER.format(root=str(ROOT), path=str(path))]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"open\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        """Close the store in order."""
        self.process.communicate()


def sending(path: Path, name: str, sent: list[str], stop: threading.Event) -> None:
    """Send numbered texts, alone, in batches and by futures, until told to stop; note those that are stored."""
    with duelog.connect(path, reconnect=60) as store:
        topic = store.topic("t")
        ways: list[Callable[[list[bytes]], object]] = [
            lambda payloads: topic.send(payloads[0]),
            lambda payloads: topic.send_batch([Message(payload) for payload in payloads]),
            topic.send_payloads,
            lambda payloads: topic.send_async(payloads[0]).result(90),
        ]
        for number in itertools.count():
            if stop.is_set():
                return
            payloads = [f"{name}:{number}:{each}".encode() for each in range(1 + (number % 4 in (1, 2)))]
            try:
                ways[number % 4](payloads)
            except Disconnected as error:
                if not error.stored:
                    raise
            sent += [payload.decode() for payload in payloads]


def test_what_is_sent_while_the_server_is_killed_is_there_once(tmp_path: Path) -> None:
    """Every send of clients that reconnect is stored exactly once; none is in doubt."""
    path, chance = tmp_path / "store", random.Random(KILLS)
    with DelayedStore.open(path) as store:
        store.topic("t").subscribe("s").close()
    server, stop = Serving(path), threading.Event()
    sent: list[str] = []
    senders = [threading.Thread(target=sending, args=[path, f"c{at}", sent, stop]) for at in range(4)]
    for sender in senders:
        sender.start()
    for _ in range(KILLS):
        begun = len(sent)
        while len(sent) < begun + chance.randrange(1, 60):
            time.sleep(0.001)
        server.kill()
        server.start()
    stop.set()
    for sender in senders:
        sender.join(120)
        assert not sender.is_alive()
    server.end()
    assert sent
    with DelayedStore.open(path) as store, store.topic("t").subscribe("s") as consumer:
        found: Counter[str] = Counter()
        while batch := consumer.receive(1_000, timeout=0):
            found.update(message.payload.decode() for message in batch)
        assert set(found) == set(sent)
        assert set(found.values()) == {1}
        assert list(store.check()) == []
    print(f"\n{KILLS} kills, {len(sent)} messages")


CONSUMER = """
import json, sys, time
sys.path.append({root!r})
import duelog
def connected():
    while True:
        try:
            return duelog.connect({path!r}, reconnect=60)
        except duelog.errors.Disconnected:  # the server is being begun again
            time.sleep(0.02)
with connected() as store, store.topic("t").subscribe("s", type="shared") as consumer:
    for message in consumer:
        print(json.dumps([message.payload.decode(), message.redelivery_count]), flush=True)
        consumer.ack(message, durable=True)
        print(json.dumps(message.payload.decode()), flush=True)
"""


def test_what_a_killed_consumer_held_goes_to_others_and_none_is_lost(tmp_path: Path) -> None:
    """Consumers and the server are killed; what was acknowledged comes no more, what was held comes again, counted."""
    path, chance = tmp_path / "store", random.Random(KILLS + 1)
    with DelayedStore.open(path) as store:
        store.topic("t").subscribe("s", type="shared").close()
        store.topic("t").send_payloads([b"%d" % number for number in range(40 * KILLS)])
    server = Serving(path)
    handed, acknowledged, lock = Counter[str](), set[str](), threading.Lock()
    again: list[str] = []

    def follow(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith(b"\n"):
                break
            fact = json.loads(line)
            with lock:
                if isinstance(fact, list):
                    if fact[0] in acknowledged:
                        again.append(fact[0])
                    handed[fact[0]] += 1
                else:
                    acknowledged.add(fact)
        process.stdout.close()

    def consuming() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", CONSUMER.format(root=str(ROOT), path=str(path))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        followers.append(threading.Thread(target=follow, args=[process]))
        followers[-1].start()
        return process

    followers: list[threading.Thread] = []
    consumers = [consuming() for _ in range(3)]
    for kill in range(KILLS):
        begun = len(acknowledged)
        deadline = time.monotonic() + 60
        while len(acknowledged) < begun + chance.randrange(1, 15) and time.monotonic() < deadline:
            time.sleep(0.001)
        if kill % 2:
            server.kill()
            server.start()
        else:
            victim = consumers.pop(0)
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()
            consumers.append(consuming())
    deadline = time.monotonic() + 120
    while len(acknowledged) < 40 * KILLS - 2 * KILLS and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in consumers:
        process.kill()
        process.wait()
    for follower in followers:
        follower.join()
    server.end()
    with DelayedStore.open(path) as store, store.topic("t").subscribe("s", type="shared") as consumer:
        left = {message.payload.decode() for message in consumer.receive(10_000, timeout=0)}
        assert set(handed) | left == {str(number) for number in range(40 * KILLS)}
        assert not acknowledged & left
        assert again == []
        assert list(store.check()) == []
    print(f"\n{KILLS} kills, {len(acknowledged)} acknowledged, {sum(handed.values())} handed out")
