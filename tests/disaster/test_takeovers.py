"""Three brokers that lead by turns, SeaweedFS and clients, each on a machine of its own: what happens when one fails.

`DUELOG_TAKEOVERS=1000` has so many events, in the proportion of `EVENTS`, by a seed; up to 9 are the first of them.
Twenty-five have a log of their own: who follows anew reads all of it, as there is no manifest within the hour.
"""

import json
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from duelog import DelayedStore
from tests.disaster.network import Network, network_of
from tests.disaster.running import module
from tests.disaster.takeover_clients import SUBSCRIPTION
from tests.duelog.replica.machines import Machines
from tests.duelog.replica.seaweed import KEYS, Seaweed, weed
from tests.proof import length
from tests.tools.command_line import DUELOG, ok

pytestmark = [pytest.mark.kill, pytest.mark.series]

EVENTS = {
    "killed": 40,
    "stopped": 20,
    "cut off from the bucket": 20,
    "cut off from bucket and clients": 10,
    "cut off from clients, then ended": 3,
    "handed over": 5,
    "killed, and back at once": 3,
    "standby killed": 3,
    "bucket killed": 10,
}
"""What happens, to the leader unless it says otherwise, and how often in `sum(EVENTS.values())` times."""
TAKEOVERS = length("DUELOG_TAKEOVERS", 4, 1_000)
ROUND = 25
NAMES = ("one", "two", "three")
SETTINGS = """
[store]
lease_ms = 2000
ship_ms = 100
durability = "replicated"
replicated_timeout_ms = 10000
"""


class Clients:
    """The process of the clients, and all that they were told."""

    def __init__(self, command: list[str]) -> None:
        self.facts: list[list[Any]] = []
        self.counts: Counter[str] = Counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self.facts.append(fact := json.loads(line))
                    self.counts[f"{fact[0]} {fact[1]}" if fact[0] in ("told", "refused") else fact[0]] += 1

    def go_on(self, count: int) -> Callable[[], bool]:
        """A condition: so many more replicated sends are told than now, and one more message acknowledged."""
        told, acked = self.counts["told a"] + count, self.counts["acked"]
        return lambda: self.counts["told a"] >= told and self.counts["acked"] > acked

    def close(self) -> None:
        """Kill them."""
        self._process.kill()
        self._process.wait()
        self._reader.join()


class World:
    """All that runs."""

    def __init__(self, directory: Path, network: Network, bucket: Seaweed | None) -> None:
        self.directory = directory
        self.network = network
        self.bucket = bucket
        self.url = (directory / "copy").as_uri() if bucket is None else "s3://backups/orders"
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": "" if bucket is None else bucket.address}
        (directory / "settings.toml").write_text(SETTINGS, encoding="utf-8")
        ok("init", directory / "one")
        self.command("replica", "init", directory / "one", self.url, "--no-probe")
        with DelayedStore.open(directory / "one") as store:
            store.topic("a").subscribe(SUBSCRIPTION, type="shared").close()
            store.update_policies(topic="local", replicated=False)
        self.machines = Machines(directory, self.url, self.environment)
        places = [f"duelog://{network.address(name)}:6700" for name in NAMES]
        self.clients = Clients([*network.within("clients"), *module("tests.disaster.takeover_clients", *places)])

    def begin(self) -> None:
        """Begin the machines."""
        for name in NAMES:
            self.machines.add(name, self.network.address(name), 6650, 6700, self.network.within(name))
            self.machines.wait(lambda: bool(self.machines.leader))
        self.machines.wait(self.machines.is_settled)

    def command(self, *words: object) -> Any:
        """Run a command of duelog where the bucket is in reach; its JSON."""
        command = ["env", *(f"{name}={value}" for name, value in self.environment.items()), *DUELOG]
        done = subprocess.run(
            [*self.network.within("clients"), *command, *map(str, words), "--json"], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def close(self) -> None:
        """End all processes."""
        self.clients.close()
        self.machines.close()


@pytest.fixture
def world(places: Path) -> Iterator[World]:
    """Three machines that are settled, where this user may make namespaces.

    Without SeaweedFS the copy is in a directory, from which nobody can be cut off.
    """
    directory = places / "takeovers"
    (directory / "bucket").mkdir(parents=True)
    with network_of("bucket", "clients", *NAMES) as network:
        bucket = None
        if weed() is not None:
            bucket = Seaweed(directory / "bucket", network.address("bucket"), network.within("bucket"))
            bucket.begin()
        try:
            world = World(directory, network, bucket)
            try:
                world.begin()
                yield world
            finally:
                world.close()
        finally:
            if bucket is not None:
                bucket.kill()
            shutil.rmtree(directory)


def happen(world: World, event: str, number: int) -> float | None:
    """Have an event happen, and wait until one leads and the others follow it.

    Return after how many seconds another served clients; None: the same one may.
    """
    machines, clients, leader = world.machines, world.clients, world.machines.leader
    begun, took = time.monotonic(), None

    def another_leads() -> float:
        machines.wait(lambda: machines.leader != leader)
        return time.monotonic() - begun

    match event:
        case "killed":
            machines.end(leader)
            took = another_leads()
            machines.begin(leader)
        case "stopped":
            machines.processes[leader].send_signal(signal.SIGSTOP)
            took = another_leads()
            machines.processes[leader].send_signal(signal.SIGCONT)
        case "cut off from the bucket" | "cut off from bucket and clients":
            world.network.cut(leader, "bucket", *(["clients"] if "clients" in event else []))
            took = another_leads()
            world.network.heal()
        case "cut off from clients, then ended":
            world.network.cut(leader, "clients")
            machines.wait(clients.go_on(5))  # by way of the others
            begun = time.monotonic()
            machines.end(leader, signal.SIGTERM)
            took = another_leads()
            world.network.heal()
            machines.begin(leader)
        case "handed over":
            world.command("replica", "hand-over", machines.addresses[leader][1])
            took = another_leads()
        case "killed, and back at once":
            machines.end(leader)
            machines.begin(leader)
        case "standby killed":
            other = next(name for name in NAMES[number % 3 :] + NAMES if name != leader)
            machines.end(other)
            machines.begin(other)
        case "bucket killed":
            assert world.bucket is not None
            world.bucket.kill()
            refused = clients.counts["refused NotLeader"]
            machines.wait(lambda: clients.counts["refused NotLeader"] > refused)
            world.bucket.begin()
    machines.wait(machines.is_settled)
    machines.wait(clients.go_on(5))
    return took


@pytest.mark.parametrize("begin", range(0, TAKEOVERS, ROUND))
def test_whatever_fails_nothing_replicated_is_lost_and_all_that_is_lost_is_set_aside(world: World, begin: int) -> None:
    """Nothing is early, cancelled and delivered, or acknowledged and delivered; no id is told twice; others lead."""
    chance, took, count = Random(begin), list[float](), min(TAKEOVERS - begin, ROUND)
    kinds = [event for event in EVENTS if world.bucket is not None or "bucket" not in event]
    weights = [EVENTS[event] for event in kinds]
    kinds = kinds[:count] if len(EVENTS) >= TAKEOVERS else chance.choices(kinds, weights, k=count)
    happened: Counter[str] = Counter()
    for number, event in enumerate(kinds):
        world.machines.wait(world.clients.go_on(chance.randrange(1, 20)))
        try:
            seconds = happen(world, event, number)
        except TimeoutError as error:
            raise AssertionError(f"{event}, after {dict(happened)}: {error}") from error
        assert not world.clients.counts["trouble"], [fact for fact in world.clients.facts if fact[0] == "trouble"]
        happened[event] += 1
        if seconds is not None:
            took.append(seconds)
    world.clients.close()
    for name in sorted(NAMES, key=lambda name: name == world.machines.leader):
        world.machines.end(name, signal.SIGTERM)
    took.sort()
    print(f"\n{dict(happened)}; another served clients after {took[len(took) // 2]:.1f} s, 99 of 100 within "
          f"{took[len(took) * 99 // 100]:.1f} s; {judge(world)}")  # fmt: skip


def judge(world: World) -> str:
    """Restore the copy and look at all facts; figures."""
    told: dict[str, dict[str, str]] = {"a": {}, "local": {}}
    """By topic: the id of each text."""
    sent, cancelling, cancelled, got, acked = (set[str]() for _ in range(5))
    for fact in world.clients.facts:
        match fact:
            case ["sending", _, text]:
                sent.add(text)
            case ["told", topic, text, message_id]:
                told[topic][text] = message_id
            case ["cancelling", text]:
                cancelling.add(text)
            case ["cancelled", text]:
                cancelled.add(text)
            case ["got", text, early_ms]:
                assert early_ms <= 0, fact
                assert text not in acked, fact
                got.add(text)
            case ["acked", text]:
                acked.add(text)
    ids = [*told["a"].values(), *told["local"].values()]
    assert len(ids) == len(set(ids))
    restored = world.directory / "restored"
    assert world.command("restore", world.url, restored, "--check")["findings"] == 0
    with DelayedStore.open(restored) as store:
        found = [message.payload.decode() for name in told for message in store.topic(name).scheduled()]
        with store.topic("a").subscribe(SUBSCRIPTION, type="shared") as consumer:
            while batch := consumer.receive(1_000, timeout=0.5):
                found += [message.payload.decode() for message in batch]
                consumer.ack(batch)
    there = set(found)
    assert len(found) == len(there)
    assert there | got <= sent
    assert not there & acked
    assert not cancelled & (there | got)
    assert told["a"].keys() - cancelling <= there | got
    aside = [row for name in NAMES for row in world.command("replica", "diverged", world.directory / name)["messages"]]
    lost = {told["local"][text] for text in told["local"].keys() - there}
    assert lost <= {row["id"] for row in aside}
    return (
        f"{len(told['a'])} replicated, {len(cancelled)} cancelled, {len(acked)} acknowledged; of {len(told['local'])} "
        f"local ones {len(lost)} set aside"
    )
