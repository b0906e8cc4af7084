"""A function that a worker runs for each message of a topic, and when it runs it again."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import InvalidArgument
from duelog.store.message import ReceivedMessage
from duelog.store.names import TopicName, validate_subscription_name
from duelog.store.position import MessageId

Backoff: TypeAlias = Duration | Callable[[int, BaseException], Duration | None]
"""How long to wait before a retry: a duration, doubled with each retry, or what makes one of the number of failed
deliveries and the exception; None from it: no retry."""

LONGEST_BACKOFF_MS = 3_600_000
"""The most that a backoff is doubled to, unless it was longer from the beginning: an hour."""


_ROOM = os.path.join(os.path.dirname(__file__), "")


@dataclass(frozen=True, slots=True)
class Task:
    """See `Worker.task`. Raises InvalidArgument for what is none."""

    function: Callable[[ReceivedMessage], Any]
    topic: str
    subscription: str
    concurrency: int
    retries: int | None
    backoff: Backoff
    timeout: Duration | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument("function", self.function, "expected a function of one message")
        TopicName.parse(self.topic)
        validate_subscription_name(self.subscription)
        for field, lowest, value in (("concurrency", 1, self.concurrency), ("retries", 0, self.retries)):
            if value is None and field == "retries":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidArgument(field, value, f"expected an int of at least {lowest}")
        if not callable(self.backoff):
            duration_ms("backoff", self.backoff)
        if self.timeout is not None and duration_ms("timeout", self.timeout) == 0:
            raise InvalidArgument("timeout", self.timeout, "expected more than no time, or None")

    @property
    def timeout_ms(self) -> int | None:
        """How long an attempt may take; None: any time."""
        return None if self.timeout is None else duration_ms("timeout", self.timeout)

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    @property
    def is_coroutine(self) -> bool:
        """True if the function must be awaited."""
        function = self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def __str__(self) -> str:
        """Describe the task for the log line of its worker's start."""
        retries = "retries for ever" if self.retries is None else f"retries {self.retries}"
        parts = [f"concurrency {self.concurrency}", retries]
        if self.timeout_ms is not None:
            parts.append(f"timeout {self.timeout_ms / 1000:g} s")
        return f"{self.name} for {self.topic} ({', '.join(parts)})"

    def is_spent(self, failed: int) -> bool:
        """Return True if a message with this many failed deliveries is not run again."""
        return self.retries is not None and failed > self.retries

    def backoff_ms(self, failed: int, error: BaseException) -> int | None:
        """How long to wait after so many failed deliveries; None: for ever. Raises what the function of a task does."""
        if callable(self.backoff):
            wait = self.backoff(failed, error)
            return None if wait is None else duration_ms("backoff", wait)
        first_ms = duration_ms("backoff", self.backoff)
        return max(first_ms, min(first_ms << min(failed - 1, 40), LONGEST_BACKOFF_MS))


def attempt_id(message: ReceivedMessage) -> MessageId:
    """The id that is one through all attempts of a message: a retry has a new one."""
    return message.message_id if message.first_try is None else message.first_try[0]


def exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """An exception as logging takes it, its traceback beginning with the function of the task."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_ROOM):
        frames = frames.tb_next
    return type(error), error, frames


def plural(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def reason_of(error: BaseException) -> str:
    """The type and the text of an exception, as dead letters keep it."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = str(error)
    except BaseException:
        text = "its text cannot be had"
    return f"{name}: {text}" if text else name
