"""Which parts of a store's upkeep have failed, why, since when, and when each is tried again; the others go on.

A part is what can fail on its own: the firing of one topic's log, the loading of one partition, the trimming of one
topic, a task such as snapshots. One that raises is suspended: its error is logged and kept, and it is tried again after
pauses that double. Errors after which nothing may go on (the main environment has failed, a broken invariant) are
raised, and so is StoreFull, which concerns every write and is tried again with every tick.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ...partitions.timespan import directory_name
from ...store.env.environment import Environment
from ...store.errors import BrokenInvariant, ClosedError, DuelogError, StoreFull, short_names
from ...store.limited_log import LimitedLog

FIRST_PAUSE_MS = 1_000
LONGEST_PAUSE_MS = 30_000

T = TypeVar("T")

_log = logging.getLogger("duelog.maintenance")


class Part(NamedTuple):
    """A part of the upkeep: its task (of few values), and the topic, partition or schedule that it is for."""

    task: str
    topic_id: int | None = None
    start_ms: int | None = None
    name: str | None = None


UPKEEP = Part("upkeep")
"""All of it: what keeps a tick from beginning, or from saying when the next one is."""

STORE = Part("store")
"""The store has stopped: every call that writes or receives raises StoreFailed."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A part of the upkeep that does not go on for now.

    task: "load", "fire", "close", "snapshot", "recur", "trim", "delete" ...; "upkeep" is all of them; "store": nothing
    is written until it is opened again. topic: full name; partition_ms: start of the partition; schedule: its name;
    None where the part is for no single one. reason, error: of the last attempt. since_ms: the first failure; failures:
    how many in a row; retry_ms: when it is tried again, the last failure's time where that is with every tick.
    """

    task: str
    topic: str | None
    partition_ms: int | None
    schedule: str | None
    reason: str
    error: BaseException
    since_ms: int
    failures: int
    failed_ms: int
    retry_ms: int

    def __str__(self) -> str:
        """Name the suspended part.

        >>> str(Suspension("fire", "persistent://public/default/t", 0, None, "", Exception(), 0, 1, 0, 0))
        'fire, topic t, partition 19700101T000000Z'
        """
        found = [self.task]
        if self.topic is not None:
            found.append(f"topic {short_names(self.topic)}")
        if self.partition_ms is not None:
            found.append(f"partition {directory_name(self.partition_ms)}")
        if self.schedule is not None:
            found.append(f"schedule {self.schedule!r}")
        return ", ".join(found)


class Suspensions:
    """The suspended parts of one open store. For the thread that ticks; `all` is for any."""

    def __init__(self, main: Environment, topic_name: Callable[[int], str]) -> None:
        """`topic_name` gives the name of a topic id, for messages; it does not raise."""
        self._main = main
        self._topic_name = topic_name
        self._suspended: dict[Part, Suspension] = {}
        self._log = LimitedLog(_log)

    def __len__(self) -> int:
        return len(self._suspended)

    def all(self) -> list[Suspension]:
        return sorted(self._suspended.copy().values(), key=lambda found: found.since_ms)

    def is_fatal(self, error: BaseException) -> bool:
        if self._main.failed is not None or not isinstance(error, Exception):
            return True
        return isinstance(error, (AssertionError, ClosedError))

    def run(self, part: Part, now_ms: int, action: Callable[[], T], otherwise: T) -> T:
        """The value of `action`; `otherwise` where it fails, and until it is tried again. Raises as `failed`."""
        if self._suspended and self.is_suspended(part, now_ms):
            return otherwise
        try:
            value = action()
        except Exception as error:
            self.failed(part, error, now_ms)
            return otherwise
        if self._suspended:
            self.succeeded(part, now_ms)
        return value

    def is_suspended(self, part: Part, now_ms: int) -> bool:
        """Return whether a part is suspended and not to be tried yet; a clock that was set back holds nothing up."""
        found = self._suspended.get(part)
        return found is not None and found.failed_ms <= now_ms < found.retry_ms

    def failed(self, part: Part, error: Exception, now_ms: int) -> None:
        """A part has failed: suspend it. Raises `error` if it is fatal, or StoreFull."""
        if self.is_fatal(error) or isinstance(error, StoreFull):
            raise error
        self.note(part, error, now_ms, pauses=True)

    def note(self, part: Part, error: BaseException, now_ms: int, *, pauses: bool) -> None:
        """Suspend a part, whatever the error; without pauses it is tried again whenever its turn comes."""
        before = self._suspended.get(part)
        failures = 1 if before is None else before.failures + 1
        pause_ms = min(FIRST_PAUSE_MS << min(failures - 1, 16), LONGEST_PAUSE_MS) if pauses else 0
        found = self._suspended[part] = Suspension(
            part.task,
            None if part.topic_id is None else self._topic_name(part.topic_id),
            part.start_ms,
            part.name,
            str(error) if isinstance(error, DuelogError) else repr(error),
            error,
            now_ms if before is None else before.since_ms,
            failures,
            now_ms,
            now_ms + pause_ms,
        )
        if before is not None and not pauses:
            return
        expected = isinstance(error, DuelogError) and not isinstance(error, BrokenInvariant)
        again = f"tried again in {pause_ms} ms" if pauses else "tried again at the next tick"
        text = "%s: %s suspended (failure %d, %s): %s"
        values = (self._main.path.parent, found, failures, again, found.reason)
        self._log.log(logging.ERROR, text, *values, error=None if expected else error)

    def succeeded(self, part: Part, now_ms: int) -> None:
        found = self._suspended.pop(part, None)
        if found is not None:
            lasted_ms = now_ms - found.since_ms
            self._log.log(logging.WARNING, "%s: %s goes on, after %d ms", self._main.path.parent, found, lasted_ms)

    def retry_ms(self, part: Part) -> int | None:
        """When a suspended part is tried again; None: it is not suspended."""
        found = self._suspended.get(part)
        return None if found is None else found.retry_ms

    def not_before(self, part: Part, due_ms: int | None) -> int | None:
        """When a part that is due at `due_ms` has its turn."""
        found = self._suspended.get(part)
        return due_ms if due_ms is None or found is None else max(due_ms, found.retry_ms)

    def next_ms(self, now_ms: int) -> int | None:
        return min((found.retry_ms for found in self.all() if found.retry_ms > now_ms), default=None)

    def holds(self, start_ms: int) -> bool:
        return any(part.start_ms == start_ms and part.topic_id is not None for part in self._suspended)

    def keep(self, task: str, is_left: Callable[[int], bool]) -> None:
        """A task is left for some partitions alone: for another it was done before it failed."""
        for part in [part for part in self._suspended if part.task == task]:
            if part.start_ms is not None and not is_left(part.start_ms):
                self._suspended.pop(part, None)

    def forget(self, *, topic_id: int | None = None, start_ms: int | None = None) -> None:
        for part in list(self._suspended):
            if (topic_id is not None and part.topic_id == topic_id) or (
                start_ms is not None and part.start_ms == start_ms
            ):
                del self._suspended[part]
