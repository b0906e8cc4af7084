"""A bucket in memory that loses answers, gives them late, and is down, as tests say; and stores that ship to one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import obstore.store

from duelog import Clock, DelayedStore, StoreConfig
from duelog.replica.bucket import Bucket, Content, log_name
from duelog.replica.log_object import LogObject, crc_of, unpack
from duelog.replica.restoring import Restored, restore
from duelog.replica.shipping import Shipping
from duelog.store.errors import ReplicaUnreachable
from tests.conftest import present

URL = "memory:///"


class FaultyBucket(Bucket):
    """A bucket whose creations go wrong: `faults` says how each does.

    "lost": it is stored, and the answer lost. "late": there is no answer, and it is stored before the next call.
    "down": there is no answer, and it is not stored. "twice": it is stored, and the client's second try is refused.
    """

    def __init__(self, faults: Iterator[str | None] | None = None) -> None:
        super().__init__(URL, obstore.store.MemoryStore())
        self.faults: Iterator[str | None] = faults or iter(())
        self.is_down = False
        self.creations = 0
        self.before_creation: Callable[[str], None] = lambda name: None
        self._late: list[tuple[str, Content]] = []

    def arrive(self) -> None:
        """Have what is late be stored, unless another was there before."""
        while self._late:
            name, content = self._late.pop()
            if self.get(name) is None:
                super().put(name, content)

    def create(self, name: str, content: Content, tries: int = 0) -> None:
        """Create an object, or fail as the next fault says."""
        self.before_creation(name)
        if self.is_down:
            raise ReplicaUnreachable(self.url, "is down")
        self.arrive()
        fault = next(self.faults, None) if name.startswith("log/") else None
        self.creations += 1
        if fault == "down":
            raise ReplicaUnreachable(self.url, "is down")
        if fault == "late":
            self._late.append((name, content))
            raise ReplicaUnreachable(self.url, "timed out")
        super().create(name, content)
        if fault == "lost":
            raise ReplicaUnreachable(self.url, "connection reset")
        if fault == "twice":
            super().create(name, content)

    def get(self, name: str) -> bytes | None:
        """Read an object."""
        if self.is_down:
            raise ReplicaUnreachable(self.url, "is down")
        return super().get(name)

    def download(self, name: str) -> Iterator[bytes] | None:
        """Read an object in pieces."""
        if self.is_down:
            raise ReplicaUnreachable(self.url, "is down")
        return super().download(name)


def random_faults(seed: int) -> Iterator[str | None]:
    """Faults without end: half of all creations go wrong."""
    random = Random(seed)
    while True:
        yield random.choice((None, None, None, None, "lost", "late", "down", "twice"))


def shipping_of(store: DelayedStore) -> Shipping:
    """The shipping of an open store."""
    return present(store._engine.shipping)


def ship(store: DelayedStore) -> None:
    """Have all that was written be in the copy, whatever goes wrong on the way."""
    shipping = shipping_of(store)
    for _ in range(200):
        try:
            shipping.step()
        except ReplicaUnreachable:
            continue
        return
    raise TimeoutError("nothing is shipped")


def manifested(store: DelayedStore) -> None:
    """Have a manifest of what is applied be in the copy."""
    shipping_of(store).make_manifest()
    ship(store)


def waiting(store: DelayedStore) -> set[bytes]:
    """The payloads that wait in topic a."""
    return {bytes(message.payload) for message in store.topic("a").scheduled()}


def log_of(bucket: Bucket) -> list[LogObject]:
    """The log, each object checked against the one before."""
    found: list[LogObject] = []
    crc = None
    for seq in bucket.numbers():
        content = present(bucket.read(seq))
        made, _ = unpack(bucket.url, log_name(seq), content)
        assert made.seq == seq
        if found:
            assert (made.begin, made.prev_crc, seq) == (found[-1].end, crc, found[-1].seq + 1)
        found.append(made)
        crc = crc_of(content)
    return found


def restored(bucket: Bucket, path: Path, *, at_ms: int | None = None, group: int | None = None) -> Restored:
    """Restore a copy."""
    return restore(bucket, path, at_ms=at_ms, group=group)


def opened(path: Path, clock: Clock, config: StoreConfig | None = None) -> DelayedStore:
    """Open a store."""
    return DelayedStore.open(path, config, clock=clock)
