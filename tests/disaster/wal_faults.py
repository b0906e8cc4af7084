"""A store that is sent to through its WAL, and ways in which the WAL and its partitions fail."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, StoreConfig
from duelog.errors import StoreFull
from duelog.store.env.environment import Environment
from tests.conftest import HOUR_MS, present, raising

CONFIG = StoreConfig(partition_ms=HOUR_MS, map_bytes=1 << 20, ack_flush_ms=0, wal_bytes=16 << 10)
"""Every send goes through a WAL, which is begun anew after some dozen messages."""
HOURS = (2, 3, 4)
"""How long before their time messages are sent: to three partitions, none of which has begun."""


class FailingCalls:
    """The module os as the WAL sees it: while `armed`, and after so many that do not, `call` fails.

    With `error`; None: it writes but a part, or nothing.
    """

    def __init__(self, call: str, error: int | None, after: int = 0) -> None:
        self.armed = False
        self.failed = 0
        self._call = call
        self._error = error
        self._left = after

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self._call:
            return real

        def call(*arguments: Any) -> Any:
            if not self.armed:
                return real(*arguments)
            if self._left:
                self._left -= 1
                return real(*arguments)
            self.failed += 1
            if self._error is not None:
                raise OSError(self._error, os.strerror(self._error))
            return 0 if name == "pwritev" else real(arguments[0], arguments[1][:20], *arguments[2:])

        return call


class Sent:
    """A store that messages are sent to, and what was acknowledged."""

    def __init__(self, store: DelayedStore) -> None:
        self.store = store
        self.topic = store.topic("a")
        self.topic.subscribe("reader").close()
        self.ids: dict[str, tuple[int, int]] = {}
        for hours in HOURS:  # a log's first message is an append
            self.send(f"first {hours}", hours)

    def send(self, text: str, hours: int, size: int = 0) -> None:
        id_ = self.topic.send(text.encode() + b"." * size, deliver_after=hours * 3_600)
        self.ids[text] = (id_.ledger_id, id_.entry_id)

    def send_some(self, tag: str, count: int = 6) -> None:
        """Send to each of the partitions in turn."""
        for number in range(count):
            self.send(f"{tag} {number}", HOURS[number % len(HOURS)])

    def environment(self, hours: int) -> Environment:
        """The environment, open from now on, of the partition that begins in so many hours."""
        now_ms = self.store.clock.now_ms() + hours * HOUR_MS
        partitions = self.store._engine.storage.partitions
        partition = present(partitions.get(now_ms - now_ms % HOUR_MS))
        with partitions.lease(partition):
            return partition.environment

    @property
    def has_unapplied(self) -> bool:
        return bool(self.store._engine.storage.partitions.unapplied())

    def crash(self, path: Path) -> Path:
        """Copy the store as a kill at this moment would leave it."""
        shutil.copytree(self.store.path, path)
        return path

    def expect(self, store: DelayedStore, doubtful: tuple[str, ...] = ()) -> None:
        """See that a reopened store has each acknowledged message once, under its id, and no other but `doubtful`."""
        rows = [(text_of(message.payload), tuple(message.message_id)) for message in store.topic("a").scheduled()]
        assert len(rows) == len(dict(rows)), "a message is there twice"
        found = dict(rows)
        assert self.ids.items() <= found.items()
        assert found.keys() - self.ids.keys() <= set(doubtful)
        assert list(store.check(deep=True)) == []


def text_of(payload: bytes | bytearray | memoryview) -> str:
    """A payload without what makes it long."""
    return bytes(payload).rstrip(b".").decode()


def no_room(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let no write to an environment find space, until what this gives is called."""
    commit = environment.commit
    monkeypatch.setattr(environment, "commit", raising(StoreFull(environment.path, "no room, says the test")))
    return lambda: monkeypatch.setattr(environment, "commit", commit)
