"""Stores made for tests, and what one holds, so that a test can see that nothing has changed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, DuelogError, ManualClock, Message, ReceivedMessage, StoreConfig, Subscription
from duelog.store.env.environment import Environment
from tests.conftest import HOUR_MS, START_MS

CONFIG = StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=5)


def records(store: DelayedStore) -> dict[str, object]:
    """Every record of an open store, by environment and key, and every directory but that of the delivery log."""
    engine = store._engine
    tree = [path.relative_to(store.path) for path in store.path.rglob("*")]
    found: dict[str, object] = {"tree": sorted(str(path) for path in tree if path.parts[0] != "attempts")}
    found["main"] = _all(engine.storage.main)
    for partition in engine.storage.partitions:
        with engine.storage.partitions.lease(partition):
            found[partition.name] = _all(partition.environment)
    return found


def _all(environment: Environment) -> dict[bytes, bytes]:
    with environment.read() as raw:
        return {bytes(key): bytes(value) for key, value in raw.cursor()}


def files(path: Path) -> dict[str, bytes | None]:
    """Every file under a path with its content, and every directory. REQUIRES: no process has a store in it open.

    Without the files of locks, which opening may touch.
    """
    locks = {"LOCK", "lock.mdb"}
    return {
        str(found.relative_to(path)): found.read_bytes() if found.is_file() else None
        for found in sorted(path.rglob("*"))
        if found.name not in locks
    }


def fill(path: Path, hours: int = 3) -> None:
    """Make a store with two fired messages and one in each of the next hours, and close it."""
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("a")
        topic.subscribe("reader").close()
        topic.send_batch([Message(b"now"), Message(b"now")])
        topic.send_batch([Message(b"later %d" % hour, deliver_after=3600 * hour + 1) for hour in range(hours)])


def partition_directories(path: Path) -> list[Path]:
    """The directories of the partitions, earliest first."""
    return sorted((path / "partitions").iterdir())


def refused(path: Path, error: type[DuelogError], config: StoreConfig = CONFIG, *, twice: bool = True) -> Any:
    """The error with which opening is refused; nothing changes, and it is refused again in the same way."""
    before = files(path) if path.is_dir() else path.read_bytes()
    with pytest.raises(error) as caught:
        DelayedStore.open(path, config, clock=ManualClock(START_MS))
    assert (files(path) if path.is_dir() else path.read_bytes()) == before
    assert str(path) in str(caught.value)
    if twice:
        assert str(refused(path, error, config, twice=False)) == str(caught.value)
    return caught.value


def main_of(path: Path) -> Environment:
    """The main environment of a closed store, to be changed by a test."""
    return Environment(path / "main", name="main")


def shown(error: DuelogError, value: object) -> bool:
    """True if an error's text has the value in it, shortened where it is long."""
    return repr(value)[:100] in str(error)


def each_received(consumer: Subscription, most: int = 1 << 20) -> Iterator[ReceivedMessage]:
    """Receive until there is nothing, or so many have come."""
    while most > 0 and (messages := consumer.receive(most, timeout=0)):
        yield from messages
        most -= len(messages)


def payloads(consumer: Subscription, most: int = 1 << 20, *, durable: bool = False) -> list[bytes]:
    """Receive and acknowledge."""
    messages = list(each_received(consumer, most))
    consumer.ack(messages, durable=durable)
    return [message.payload for message in messages]


def payloads_after(
    store: DelayedStore, clock: ManualClock, ms: int, topic: str = "t", subscription: str = "s"
) -> list[bytes]:
    """Let time pass; the payloads that a subscription receives then, acknowledged."""
    with store.topic(topic).subscribe(subscription) as consumer:
        clock.advance(ms)
        store.tick()
        return payloads(consumer, durable=True)


def received(consumer: Subscription, most: int = 1 << 20) -> list[bytes]:
    """Receive without acknowledging."""
    return [message.payload for message in each_received(consumer, most)]


def payloads_of(store: DelayedStore, *topics: str) -> list[bytes]:
    """Payloads that subscription `s` of each topic receives now, acknowledged durably."""
    found = []
    for topic in topics or ("t",):
        with store.topic(topic).subscribe("s", type="shared") as consumer:
            messages = list(each_received(consumer))
            consumer.ack(messages, durable=True)
            found += [message.payload for message in messages]
    return found
