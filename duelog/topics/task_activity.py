"""The state of a worker's task, as the worker tells it: what runs, what failed last, how much it has done.

Known for as long as the task's consumer is attached, in memory alone. It may come from another process, so making one
checks it: types, the length of texts, how many attempts and failures.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import NoneType
from typing import Any

from duelog.store.errors import InvalidArgument
from duelog.store.position import MessageId

MOST_ATTEMPTS = 100
MOST_FAILURES = 5
MOST_TEXT = 1_000
MOST_TRACEBACK = 8_000
"""Characters."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A message that is run. attempt: 1 the first. began_ms: epoch ms. hangs: it was given up and has not ended."""

    message_id: MessageId
    attempt: int
    began_ms: int
    hangs: bool

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed. reason: type and text of the exception, traceback: the end of it.

    failed_ms, again_ms: when, and when the message is due again (epoch ms); None: it is a dead letter.
    """

    message_id: MessageId
    attempt: int
    failed_ms: int
    again_ms: int | None
    reason: str
    traceback: str

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class TaskActivity:
    """A task of a worker in one process.

    worker, task: their names; host, process: where it runs; since_ms: from when on (epoch ms). concurrency: how many
    messages it runs at a time, running: how many now. acknowledged, failed: attempts that ended so. attempts: the
    longest running, at most 100; failures: the last ones, at most 5, newest first.
    """

    worker: str
    task: str
    host: str
    process: int
    since_ms: int
    concurrency: int
    running: int
    acknowledged: int
    failed: int
    attempts: tuple[Attempt, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        _check(self)


_KINDS: dict[str, Any] = {
    "int": int, "str": str, "bool": bool, "int | None": (int, NoneType), "MessageId": MessageId,
    "tuple[Attempt, ...]": Attempt, "tuple[Failure, ...]": Failure,
}  # fmt: skip
_MOST = {"attempts": MOST_ATTEMPTS, "failures": MOST_FAILURES, "traceback": MOST_TRACEBACK}


def _check(record: Attempt | Failure | TaskActivity) -> None:
    """Raise InvalidArgument for a field of another type, or one that is too long."""
    for each in fields(record):
        value, kind = getattr(record, each.name), _KINDS[str(each.type)]
        parts = value if isinstance(value, tuple) and kind is not MessageId else (value,)
        if not all(isinstance(part, kind) for part in parts):
            raise InvalidArgument(each.name, value, f"expected {each.type}")
        if isinstance(value, (str, tuple)) and len(value) > _MOST.get(each.name, MOST_TEXT):
            raise InvalidArgument(each.name, len(value), f"expected at most {_MOST.get(each.name, MOST_TEXT)}")
