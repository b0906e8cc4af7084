"""A store to which random things are done one by one, its twin, and the places of a backup between which they are."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig
from duelog.backup import HeldPartition, PointInTime, back_up
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.engine import Engine
from duelog.store.codec.format import PartitionState
from duelog.store.config import Durability
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from tests.cleanup.compacting import plan_compaction
from tests.conftest import HOUR_MS, present

START_MS = 1_790_035_200_000
SMALL_SEGMENT = 16 << 10
"""Bytes of a segment of the write-ahead log that is full after some sends: there are many checkpoints then."""
SUBSCRIPTIONS = ("quick", "slow")
TOPICS = ("a", "b")


def config(durability: Durability = "none", wal_bytes: int = 64 << 20) -> StoreConfig:
    """Snapshots, ledgers, partitions and firings come often; ten partitions and two open at a time."""
    return StoreConfig(
        partition_ms=HOUR_MS,
        durability=durability,
        wal_bytes=wal_bytes,
        ledger_max_entries=10,
        snapshot_every_entries=10,
        snapshot_part_bytes=1 << 10,
        fire_batch=7,
        preload_ms=600_000,
        max_open_partitions=2,
        max_clock_jump_ms=None,
    )


class Twin(NamedTuple):
    """Messages to deliver: due times by topic and payload, and what each subscription has acknowledged for good."""

    now_ms: int
    due: dict[tuple[str, bytes], int]
    acknowledged: dict[str, set[tuple[str, bytes]]]


class BusyStore:
    """The store and its twin."""

    def __init__(self, path: Path, seed: int, **settings: Any) -> None:
        """`settings`: of the store, in place of those that a seed gives."""
        self.random = Random(seed)
        self.clock = ManualClock(START_MS)
        chosen = config("none" if seed % 3 else "commit", SMALL_SEGMENT if seed % 2 else 64 << 20)
        self.config = replace(chosen, **settings)
        self.store = DelayedStore.open(path, self.config, clock=self.clock)
        self.done: dict[str, int] = {}
        """How often each kind of thing was done."""
        self._sent = 0
        self._ids: dict[tuple[str, bytes], MessageId] = {}
        self._due: dict[tuple[str, bytes], int] = {}
        self._acknowledged: dict[str, set[tuple[str, bytes]]] = {name: set() for name in SUBSCRIPTIONS}
        for topic in TOPICS:
            for name in SUBSCRIPTIONS:
                self.store.topic(topic).subscribe(name).close()

    def reopen(self) -> None:
        """Close the store, and open it again."""
        self.store.close()
        self.store = DelayedStore.open(self.store.path, self.config, clock=self.clock)

    def twin(self) -> Twin:
        """A twin of the messages to be delivered now."""
        acknowledged = {name: set(found) for name, found in self._acknowledged.items()}
        return Twin(self.clock.now_ms(), dict(self._due), acknowledged)

    def act(self, times: int = 1) -> None:
        """Do something, so many times."""
        for _ in range(times):
            kind = self.random.choices(
                (self._send, self._send_batch, self._cancel, self._reschedule, self._pass_time, self._receive,
                 self._compact),
                (8, 3, 4, 6, 8, 8, 3),
            )[0]  # fmt: skip
            kind()
            self._count(kind.__name__.strip("_"))

    def _count(self, what: str, times: int = 1) -> None:
        self.done[what] = self.done.get(what, 0) + times

    def _due_ms(self) -> int:
        span_ms = self.random.choice((1_000, 600_000, HOUR_MS, 5 * HOUR_MS))
        return self.clock.now_ms() + 1 + self.random.randrange(span_ms)

    def _payload(self) -> bytes:
        self._sent += 1
        return b"%d" % self._sent

    def _send(self) -> None:
        topic, payload = self.random.choice(TOPICS), self._payload()
        due_ms = self._due_ms() if self.random.random() < 0.9 else self.clock.now_ms()
        self._ids[topic, payload] = self.store.topic(topic).send(payload, deliver_at=due_ms)
        self._due[topic, payload] = due_ms

    def _send_batch(self) -> None:
        topic = self.random.choice(TOPICS)
        messages = [Message(self._payload(), deliver_at=self._due_ms()) for _ in range(self.random.randint(2, 15))]
        for message, message_id in zip(messages, self.store.topic(topic).send_batch(messages), strict=True):
            assert isinstance(message.deliver_at, int)
            assert isinstance(message.payload, bytes)
            self._ids[topic, message.payload] = message_id
            self._due[topic, message.payload] = message.deliver_at

    def _waiting(self) -> tuple[str, bytes] | None:
        waiting = [each for each, due_ms in self._due.items() if due_ms > self.clock.now_ms()]
        return self.random.choice(waiting) if waiting else None

    def _cancel(self) -> None:
        which = self._waiting()
        if which is not None:
            assert self.store.topic(which[0]).cancel(self._ids[which])
            del self._due[which]

    def _reschedule(self) -> None:
        which = self._waiting()
        if which is not None:
            due_ms = self._due_ms()
            moved = present(self.store.topic(which[0]).reschedule(self._ids[which], deliver_at=due_ms))
            self._ids[which], self._due[which] = moved, due_ms

    def _pass_time(self) -> None:
        self.clock.advance(self.random.choice((1_000, 600_000, HOUR_MS)))
        result = self.store.tick()
        for what in ("fired", "closed", "deleted", "snapshots", "adopted"):
            self._count(what, getattr(result, what))

    def _receive(self) -> None:
        name = self.random.choices(SUBSCRIPTIONS, (3, 2))[0]
        topic = self.random.choice(TOPICS)
        with self.store.topic(topic).subscribe(name) as subscription:
            messages = subscription.receive(self.random.choice((3, 1_000, 1_000)))
            if self.random.random() < 0.3:
                messages = [message for message in messages if self.random.random() < 0.5]
            subscription.ack(messages, durable=True)
            self._acknowledged[name].update((topic, message.payload) for message in messages)

    def _compact(self) -> None:
        engine = self.store._engine
        closed = [each for each in engine.storage.partitions if each.state is PartitionState.CLOSED]
        if closed:
            with engine.storage.partitions.lease(self.random.choice(closed)) as partition:
                plan = plan_compaction(engine.storage.main, partition)
                staged = stage_generation(self.store.path, partition.environment, plan)
            hand_over(self.store.path, staged)


def assert_is(copy: Path, twin: Twin, config: StoreConfig) -> None:
    """A copy delivers what its twin says, each once, at its time, to each subscription; then it takes more."""
    clock = ManualClock(twin.now_ms)
    with DelayedStore.open(copy, replace(config, durability="none"), clock=clock) as store:
        assert list(store.check(deep=True)) == []
        found: dict[str, list[tuple[str, bytes]]] = {name: [] for name in SUBSCRIPTIONS}
        until_ms = max([twin.now_ms, *twin.due.values()])
        while True:
            store.tick()
            for topic in TOPICS:
                for name, received in found.items():
                    with store.topic(topic).subscribe(name) as subscription:
                        while messages := subscription.receive(1_000):
                            received += [(topic, message.payload) for message in messages]
                            assert all(message.due_ms <= clock.now_ms() for message in messages)
                            for message in messages:
                                due_ms = twin.due.get((topic, message.payload))
                                assert message.due_ms == due_ms, f"{message.payload!r}: {message.due_ms}, not {due_ms}"
                            subscription.ack(messages, durable=True)
            if clock.now_ms() >= until_ms:
                break
            clock.advance(HOUR_MS // 2)
        for name, received in found.items():
            assert sorted(received) == sorted(twin.due.keys() - twin.acknowledged[name])
        store.topic("a").send(b"more", deliver_after=1)
        clock.advance(100 * HOUR_MS)
        for _ in range(3):
            store.tick()
        with store.topic("a").subscribe("quick") as subscription:
            assert [message.payload for message in subscription.receive(10)] == [b"more"]
        assert list(store.check(deep=True)) == []


BEFORE, INSTANT, AFTER, COPY, DONE = "before", "instant", "after", "copy", "done"
"""Before the instant, right after it, and after that; before an environment is copied; at the end."""

Said = Callable[[str], None]


@contextmanager
def saying_where(engine: Engine, said: Said) -> Iterator[None]:
    """Have `said` called in the backups of a store at each place."""
    renew, copy = HeldRead.renew, Environment.copy

    def renew_main(held: HeldRead) -> None:
        main = held._environment() is engine.storage.main._env and held._raw is not None
        if main:
            said(BEFORE)
        renew(held)
        if main:
            said(INSTANT)
            said(AFTER)

    def copy_between(environment: Environment, path: Path, held: HeldRead) -> None:
        said(COPY)
        copy(environment, path, held)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HeldRead, "renew", renew_main)
        patched.setattr(Environment, "copy", copy_between)
        yield


@contextmanager
def trusting_what_is_newer() -> Iterator[None]:
    """A wrong engine: what was committed to partitions after the instant is taken for part of it."""
    hold = PointInTime.partitions

    def partitions(point: PointInTime) -> Iterator[HeldPartition]:
        point.wal = point._wal.follow()
        for held in hold(point):
            held.read.renew()
            yield held

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HeldRead, "moved", lambda held: False)
        patched.setattr(PointInTime, "partitions", partitions)
        yield


def _say(place: str) -> None:
    print(place, flush=True)
    sys.stdin.readline()


def main(path: str, fields: str) -> None:
    """Make the backups that are asked for."""
    with DelayedStore.open(path, StoreConfig(**json.loads(fields)), read_only=True) as store:
        engine = store._engine
        for line in iter(sys.stdin.readline, ""):
            with saying_where(engine, _say):
                back_up(engine, Path(line.strip()))
            _say(DONE)


_START = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})  # at the end: what is copied by is the installed package
from tests.duelog.busy_store import main
main(*sys.argv[1:])
"""


class OtherProcess:
    """A process that makes backups of a store that this one writes."""

    def __init__(self, store: DelayedStore, config: StoreConfig) -> None:
        command = [sys.executable, "-c", _START, str(store.path), json.dumps(asdict(config))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def back_up(self, said: Callable[[str], None], target: Path) -> None:
        """One backup; `said` does what is done meanwhile."""
        self._tell(str(target))
        while (place := present(self._process.stdout).readline().strip()) != DONE:
            assert place, f"the backup ended with {self._process.wait()}"
            said(place)
            self._tell("")
        self._tell("")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        present(self._process.stdin).close()
        assert self._process.wait() == 0
        present(self._process.stdout).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
