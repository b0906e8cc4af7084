"""Takes the calls of Linux away, as a Mac has none of them: a plugin of pytest, for the suite of the engine.

    pytest -p tests.store.files.without_linux tests/store tests/partitions tests/markers tests/cleanup \\
        tests/snapshot tests/duelog

Run as a program it sends, receives, and opens again.
"""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

for owner, names in (
    (os, ("O_DIRECT", "fdatasync", "posix_fadvise", "posix_fallocate")),
    (socket, ("SO_PEERCRED",)),
    (time, ("CLOCK_BOOTTIME",)),
):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)


OF_THE_CALLS = (
    *("test_eviction", "test_prefetch", "test_power_cuts", "test_space_is_reserved"),
    *("test_the_log_is_flushed_as_often", "test_what_relaxed_sends_left_unflushed", "test_a_flush_that_fails_closes"),
    "test_a_log_without_space_does_not_hold_up_deliveries",
)
"""Tests of what the calls themselves are asked."""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out the tests of the calls."""
    items[:] = [each for each in items if not any(name in each.nodeid for name in OF_THE_CALLS)]


def story(path: Path) -> list[bytes]:
    """Send with each durability, receive, and acknowledge; what the topic gives once the store is open again."""
    from duelog import DelayedStore, StoreConfig  # noqa: PLC0415 - once the calls are gone

    for durability in ("commit", "relaxed", "none"):
        with DelayedStore.open(path, StoreConfig(durability=durability)) as store:
            topic = store.topic("t")
            with topic.subscribe("s") as subscription:
                topic.send(b"at once")
                topic.send(durability.encode(), deliver_after=0.01)
                got: list[bytes] = []
                while durability.encode() not in got:
                    for message in subscription.receive(timeout=10):
                        subscription.ack(message)
                        got.append(message.payload)
            topic.send(b"later " + durability.encode(), deliver_after=86_400)
    with DelayedStore.open(path) as store:
        return [each.payload for each in store.topic("t").scheduled()]


if __name__ == "__main__":
    print(b", ".join(sorted(story(Path(sys.argv[1])))).decode())
