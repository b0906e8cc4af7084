"""A trace replayed through a store on a simulated clock: what is sent when, and what is measured.

Every message is sent, fired, received and acknowledged through the public face; the engine makes, closes and
deletes its partitions and trims its ledgers by itself. The clock stands still while the store works and never
skips a change of order: what the trace writes before something else is due is sent before that is due. Before
each time at which something is due the clock stops a millisecond short of it, and everything is asked for.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

from duelog import DelayedStore, ManualClock, Message, StoreConfig

from ...store.files.directory import size_bytes
from .demo_trace import Audit, Trace

DAY_MS = 86_400_000
HOUR_MS = 3_600_000

CONFIG = StoreConfig(
    partition_ms=DAY_MS,
    # A clock that runs months a second makes of each short deadline a transaction of its own.
    ack_flush_ms=HOUR_MS,
    ledger_max_age_ms=7 * DAY_MS,
)
"""The defaults, but for two deadlines that are counted in the trace's time."""

_RECEIVE = 1_000
_SAMPLES = 2_000
_MOST_TICKS_AFTER = 1_000


@dataclass(slots=True)
class Course:
    """The measurements of one replay of a trace.

    times_ms, pending, disk_bytes: samples over the trace's time, of equal number, as the store gives them; one
    is taken where the trace has its peak of pending messages. miscounted: samples whose pending messages are not
    as many as the trace says. steps: of the trace. findings: of the store's own check, at the end. seconds: of
    real time, sampling and checking not counted.
    """

    times_ms: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    disk_bytes: list[int] = field(default_factory=list)
    miscounted: int = 0
    partitions_created: int = 0
    partitions_deleted: int = 0
    ledgers_trimmed: int = 0
    steps: int = 0
    findings: int = 0
    seconds: float = 0.0


class Replay:
    """One trace through one empty store, once."""

    def __init__(self, store: DelayedStore, clock: ManualClock, trace: Trace, audit: Audit) -> None:
        self.course = Course()
        self._store = store
        self._clock = clock
        self._trace = trace
        self._audit = audit
        self._topic = store.topic("git")
        self._subscription = self._topic.subscribe("demo")
        self._partitions: set[str] = set()
        self._aside = 0.0  # seconds spent measuring

    def run(self) -> Iterator[int]:
        """Replay everything; yields, after every step, how many messages were sent or received in it."""
        began = perf_counter()
        begin_ms, end_ms = int(self._trace.written_ms[0]), int(self._trace.ready_ms.max())
        _, peak_ms = self._trace.peak_pending()
        sample_ms = begin_ms
        for step in self._trace.steps():
            done = 0
            if step.writes:
                self._clock.set(step.last_ms)
                self._send(step.start, step.limit)
                done += step.limit - step.start
            else:
                self._clock.set(step.first_ms - 1)
                done += self._drain()
                self._clock.set(step.last_ms)
            done += self._drain()
            if step.last_ms >= sample_ms or step.first_ms <= peak_ms <= step.last_ms:
                self._sample()
                sample_ms = step.last_ms + (end_ms - begin_ms) // _SAMPLES
            self.course.steps += 1
            yield done
        self._run_out()
        self._sample()
        self.course.partitions_created = len(self._partitions)
        self.course.seconds = perf_counter() - began - self._aside
        self.course.findings = sum(1 for _ in self._store.check())

    def _send(self, start: int, limit: int) -> None:
        rows = self._trace[start:limit]
        self._topic.send_batch(
            (
                Message(name.encode(), deliver_at=due_ms, key=name)
                for name, due_ms in zip(rows.ids, rows.due_ms.tolist(), strict=True)
            ),
            allow_past=True,  # as the trace has it
        )
        self._partitions.update(os.listdir(self._store.path / "partitions"))

    def _drain(self) -> int:
        """Receive and acknowledge everything that is to be had now; returns how many messages."""
        count = 0
        while True:
            self._tick()
            messages = self._subscription.receive(_RECEIVE)
            if not messages:
                self._audit.drained(self._clock.now_ms())
                return count
            self._audit.received(self._clock.now_ms(), [(message.payload, message.key) for message in messages])
            self._subscription.ack(messages)
            count += len(messages)

    def _tick(self) -> int | None:
        result = self._store.tick()
        self.course.partitions_deleted += result.deleted
        self.course.ledgers_trimmed += result.trimmed
        return result.next_due_ms

    def _run_out(self) -> None:
        for _ in range(_MOST_TICKS_AFTER):
            self._drain()
            next_ms = self._tick()
            if next_ms is None:
                return
            self._clock.set(max(next_ms, self._clock.now_ms()))

    def _sample(self) -> None:
        began = perf_counter()
        now_ms, pending = self._clock.now_ms(), self._topic.stats().pending
        self.course.times_ms.append(now_ms)
        self.course.pending.append(pending)
        self.course.disk_bytes.append(size_bytes(self._store.path))
        self.course.miscounted += pending != self._trace.pending_at(now_ms)
        self._aside += perf_counter() - began
