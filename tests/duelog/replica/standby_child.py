"""A machine of a pair: it follows, or leads and sends replicated messages until it is killed, printing what it is told.

While the file PATH.cut is there its bucket gives no answer; else one creation in twenty loses its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from duelog import DelayedStore, MessageId, StoreConfig
from duelog.errors import Deposed, DuelogError, NotReplicated, ReplicaUnreachable
from duelog.replica import shipping
from duelog.replica.bucket import Bucket, Content
from duelog.replica.following import Standby, failure_of

LEASE_MS = 1_000


def bucket_of(path: Path, url: str) -> Bucket:
    """The bucket as this machine reaches it."""
    cut, random = path.with_name(path.name + ".cut"), Random(path.name)

    class Cut(Bucket):
        """A bucket that is out of reach at times."""

        @contextmanager
        def _answered(self) -> Iterator[None]:
            if cut.exists():
                raise ReplicaUnreachable(self.url, "is cut off")
            with super()._answered():
                yield

        def create(self, name: str, content: Content) -> None:
            """Create an object; now and then the answer is lost."""
            super().create(name, content)
            if cut.exists() or random.random() < 0.05:
                raise ReplicaUnreachable(self.url, "connection reset")

    return Cut(url)


def lead(store: DelayedStore, begin: int) -> int:
    """Send, and take every fifth back, until another leads; the next number."""
    topic, told, number = store.topic("a"), list[tuple[int, MessageId]](), begin
    while failure_of(store) is None:
        number += 1
        try:
            print(f"sending {number}", flush=True)
            told.append((number, topic.send(b"%d" % number, deliver_after=3_600 * (1 + number % 3))))
            print(f"told {number} {told[-1][1]}", flush=True)
            if number % 5 == 0:
                taken, message_id = told.pop(0)
                print(f"cancelling {taken}", flush=True)
                topic.cancel(message_id)
                print(f"cancelled {taken}", flush=True)
        except DuelogError as error:
            print(f"refused {type(error).__name__}", flush=True)
            time.sleep(0.05)
    return number


def main(path: str, url: str, begin: str) -> None:
    """Lead and follow by turns."""
    directory, number = Path(path), int(begin)
    config = StoreConfig(
        replica=url, durability="replicated", lease_ms=LEASE_MS, replicated_timeout_ms=10_000, partition_ms=3_600_000
    )
    vars(shipping)["Bucket"] = lambda url: bucket_of(directory, url)
    standby = Standby(directory, bucket_of(directory, url), lease_ms=LEASE_MS, address=path)
    while True:
        try:
            leads = standby.begin()
            while not leads:
                leads = standby.step()
                time.sleep(0.02)
            with DelayedStore.open(directory, config) as store:
                print(f"leads {present_epoch(store)}", flush=True)
                number = lead(store, number)
        except (Deposed, NotReplicated, ReplicaUnreachable) as error:
            print(f"waits {type(error).__name__}", flush=True)
            time.sleep(0.02)


def present_epoch(store: DelayedStore) -> int:
    """The epoch in which a store leads."""
    assert store._engine.shipping is not None
    return store._engine.shipping.epoch


if __name__ == "__main__":
    main(*sys.argv[1:])
