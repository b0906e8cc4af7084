"""huey on SQLite: tasks with an eta in its schedule, moved to its queue when due and run one by one."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .peer import Peer, has_module, module

_POLL_SECONDS = 0.1
"""The consumer's own waiting between two looks at an empty queue; its scheduler looks once a second."""


class HueyPeer(Peer):
    """The consumer's work done in place: its scheduler's step, then its worker's, task by task."""

    def __init__(self, *, fsync: bool) -> None:
        self._fsync = fsync
        self._scheduled_at = 0.0

    @classmethod
    def missing(cls) -> str | None:
        return None if has_module("huey") else "pip install huey"

    def open(self, directory: Path, now_ms: int) -> None:
        self._huey: Any = module("huey").SqliteHuey(
            "benchmark", filename=str(directory / "huey.db"), results=False, fsync=self._fsync, utc=True
        )
        self._done: list[bytes] = []

        @self._huey.task()  # type: ignore[untyped-decorator,unused-ignore]
        def handle(payload: bytes) -> None:
            self._done.append(payload)

        self._task = handle

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self._task.schedule(args=(payload,), eta=_naive(due_ms))

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        for payload, due_ms in zip(payloads, dues, strict=True):
            self.schedule_one(payload, due_ms)

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        self._done.clear()
        until = time.time() + wait_seconds
        while True:
            real = time.time()
            now = _naive(now_ms) if not wait_seconds else _naive(int(real * 1_000))
            if not wait_seconds or real >= self._scheduled_at + 1.0:
                if wait_seconds or not self._huey.pending_count():
                    for task in self._huey.read_schedule(now):
                        self._huey.enqueue(task)
                self._scheduled_at = real
            while len(self._done) < limit and (task := self._huey.dequeue()) is not None:
                self._huey.execute(task, now)
            if self._done or real >= until:
                return list(self._done)
            time.sleep(_POLL_SECONDS)

    def remove_due_before(self, limit_ms: int) -> None:
        self._huey.read_schedule(_naive(limit_ms - 1))

    def give_back(self) -> None:
        self._huey.storage.conn.execute("VACUUM")

    def close(self) -> None:
        self._huey.storage.close()


def _naive(time_ms: int) -> datetime:
    """A time as the library takes it: naive, in UTC."""
    return datetime.fromtimestamp(time_ms / 1_000, UTC).replace(tzinfo=None)
