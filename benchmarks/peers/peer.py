"""The interface of a peer: five methods over one queue of delayed messages, and a few figures."""

import importlib
import importlib.util
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

POLL_SECONDS = 0.010
"""How often a peer that cannot wait looks again."""


class Peer(ABC):
    """One queue, open in a directory of its own; used by one thread unless `threads` says otherwise."""

    own_clock: ClassVar[bool] = False
    """Counts delays on the machine's clock: messages for it are due in real time, in whole seconds."""

    port: int = 0
    """The address of a server to which other processes `connect`, once it is open."""

    @classmethod
    def missing(cls) -> str | None:
        """How to get what is not installed; None where everything is."""
        return None

    @abstractmethod
    def open(self, directory: Path, now_ms: int) -> None:
        """Start what is needed, on 127.0.0.1, and make an empty queue; `now_ms` is the time of scheduling."""

    def connect(self, port: int, number: int) -> None:
        """Instead of `open`: use the queue of a server that another process has opened, as its client `number`."""
        raise NotImplementedError

    def produce(self) -> None:
        """Get ready to schedule, where that takes time."""
        return

    def consume(self) -> None:
        """Get ready to fetch, where that takes time."""
        return

    def settle(self) -> None:
        """Wait until all that was scheduled is as durable as the peer makes it, where scheduling does not wait."""
        return

    @abstractmethod
    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        """Schedule one message; it is durable as the peer is set up when this returns."""

    @abstractmethod
    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        """Schedule messages in the quickest way that the peer has."""

    @abstractmethod
    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        """Payloads of at most `limit` messages due by `now_ms`, earliest first, acknowledged when this returns.

        With `wait_seconds` the time is the real one, and an empty answer comes no earlier than that.
        """

    @abstractmethod
    def close(self) -> None:
        """End, and end what was started; the data stays in the directory."""

    def processes(self) -> list[int]:
        """Processes whose memory is the peer's: this one, where it is a library."""
        return [os.getpid()]

    def remove_due_before(self, limit_ms: int) -> None:
        """Remove every message due before `limit_ms` without delivering it."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Give the disk space of removed messages back to the file system."""
        raise NotImplementedError


def poll(fetch: Callable[[int], list[bytes]], now_ms: int, wait_seconds: float) -> list[bytes]:
    """`fetch(now_ms)`, again and again on the machine's clock while it is empty and there is time to wait."""
    if not wait_seconds:
        return fetch(now_ms)
    limit = time.time() + wait_seconds
    while True:
        found = fetch(time.time_ns() // 1_000_000)
        if found or time.time() >= limit:
            return found
        time.sleep(POLL_SECONDS)


def module(name: str) -> Any:
    """An optional module; its types are of no concern here."""
    return importlib.import_module(name)


def has_module(name: str) -> bool:
    """True if an optional module is installed."""
    return importlib.util.find_spec(name) is not None
