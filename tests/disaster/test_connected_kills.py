"""A process that has a store open, or one that is connected to it, is killed over and over: nothing is lost or doubled.

DUELOG_CONNECTED_KILLS says how often; a few times unless it is set.
"""

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
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
EACH = 200
"""Messages sent before each kill."""

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


class Noted:
    """Texts that threads note, and others wait for."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, *texts: str) -> None:
        with self._changed:
            self.texts += texts
            self._changed.notify_all()

    def wait_for(self, count: int, seconds: float) -> bool:
        """Wait until so many are there; False: the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.texts) >= count, seconds)


def once(call: Callable[[], object]) -> None:
    """Do what is stored once; its result may be lost."""
    try:
        call()
    except Disconnected as error:
        if not error.stored:
            raise


def sending(path: Path, name: str, sent: Noted, stop: threading.Event) -> None:
    """Send numbered texts in every way, and cancel some by their keys, until told to stop; note what is stored."""
    with duelog.connect(path, reconnect=60) as store:
        topic = store.topic("t")

        def send_together(payloads: list[bytes]) -> None:
            with store.transaction() as transaction:
                for payload in payloads:
                    transaction.send(topic, payload)

        def cancel(payloads: list[bytes]) -> None:
            key = payloads.pop().decode()
            once(lambda: topic.send(b"cancelled", deliver_after=3_600, dedup_key=key))
            assert topic.cancel_key(key)

        ways: list[Callable[[list[bytes]], object]] = [
            lambda payloads: topic.send(payloads[0]),
            lambda payloads: topic.send_batch([Message(payload) for payload in payloads]),
            topic.send_payloads,
            lambda payloads: topic.send_async(payloads[0]).result(90),
            lambda payloads: topic.send(payloads[0], dedup_key=payloads[0].decode(), replace=True),
            lambda payloads: topic.send_batch([Message(each, dedup_key=each.decode()) for each in payloads]),
            send_together,
            cancel,
        ]
        for number in itertools.count():
            if stop.is_set():
                return
            way = number % len(ways)
            payloads = [f"{name}:{number}:{each}".encode() for each in range(1 + (way in (1, 2, 5, 6)))]
            once(functools.partial(ways[way], payloads))
            sent(*(payload.decode() for payload in payloads))


def test_what_is_sent_while_the_server_is_killed_is_there_once(tmp_path: Path) -> None:
    """Every send of clients that reconnect is stored exactly once; none is in doubt."""
    path, chance = tmp_path / "store", random.Random(KILLS)
    with DelayedStore.open(path) as store:
        store.topic("t").subscribe("s").close()
    server, stop = Serving(path), threading.Event()
    sent = Noted()
    senders = [threading.Thread(target=sending, args=[path, f"c{at}", sent, stop]) for at in range(4)]
    for sender in senders:
        sender.start()
    for _ in range(KILLS):
        assert sent.wait_for(len(sent.texts) + chance.randrange(1, 60), 60)
        server.kill()
        server.start()
    stop.set()
    for sender in senders:
        sender.join(120)
        assert not sender.is_alive()
    server.end()
    with DelayedStore.open(path) as store, store.topic("t").subscribe("s") as consumer:
        found: Counter[str] = Counter()
        while batch := consumer.receive(1_000, timeout=0):
            found.update(message.payload.decode() for message in batch)
        assert set(found) == set(sent.texts)
        assert set(found.values()) == {1}
        assert store.topic("t").count() == 0
        assert list(store.check()) == []
    print(f"\n{KILLS} kills, {len(sent.texts)} messages")


CONSUMER = """
import json, sys
sys.path.append({root!r})
import duelog
store = duelog.connect({path!r}, reconnect=60)
print("connected", flush=True)
with store, store.topic("t").subscribe("s", type="shared") as consumer:
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
    server = Serving(path)
    handed, acknowledged, again = Noted(), Noted(), Noted()
    settled = set[str]()
    """What was acknowledged before the kill before the last: one acknowledgement may cross one handing out."""

    def follow(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith(b"\n"):
                break
            fact = json.loads(line)
            if isinstance(fact, str):
                acknowledged(fact)
                continue
            handed(fact[0])
            if fact[0] in settled:
                again(fact[0])
        process.stdout.close()

    def consuming() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", CONSUMER.format(root=str(ROOT), path=str(path))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        followers.append(threading.Thread(target=follow, args=[process]))
        followers[-1].start()
        return process

    followers: list[threading.Thread] = []
    consumers = [consuming() for _ in range(3)]
    sender = duelog.connect(path, reconnect=60)
    before = list[str]()
    for kill in range(KILLS):
        settled.update(before)
        before = list(acknowledged.texts)
        numbers = range(kill * EACH, (kill + 1) * EACH)
        once(functools.partial(sender.topic("t").send_payloads, [b"%d" % number for number in numbers]))
        acknowledged.wait_for(len(acknowledged.texts) + chance.randrange(1, 15), 60)
        if kill % 2:
            server.kill()
            server.start()
        else:
            victim = consumers.pop(0)
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()
            consumers.append(consuming())
    acknowledged.wait_for(EACH * KILLS - 2 * KILLS, 120)
    sender.close()
    for process in consumers:
        process.kill()
        process.wait()
    for follower in followers:
        follower.join()
    server.end()
    with DelayedStore.open(path) as store, store.topic("t").subscribe("s", type="shared") as consumer:
        left = {message.payload.decode() for message in consumer.receive(10_000, timeout=0)}
        assert set(handed.texts) | left == {str(number) for number in range(EACH * KILLS)}
        assert not set(acknowledged.texts) & left
        assert again.texts == []
        assert list(store.check()) == []
    print(f"\n{KILLS} kills, {len(acknowledged.texts)} acknowledged, {len(handed.texts)} handed out")
