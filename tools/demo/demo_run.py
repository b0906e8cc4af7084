"""The demo: a trace of real delays through a whole store, with every guarantee checked against the trace.

Choose the rows, open a store, replay them on a simulated clock, show progress, print what came out and draw it.
demo_trace.py decides what counts as wrong.

Every message is sent, fired, received and acknowledged through the public face; the engine makes, closes and
deletes its partitions and trims its ledgers by itself. The clock stands still while the store works and never
skips a change of order: what the trace writes before something else is due is sent before that is due. Before
each time at which something is due the clock stops a millisecond short of it, and everything is asked for.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from duelog import DelayedStore, ManualClock, Message, StoreConfig

from ...store.errors import InvalidArgument
from ...store.files.directory import size_bytes
from ..output import progress_bar, say, write_json
from .demo_trace import Audit, Trace, Verdict, load_trace

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
        self._partitions: set[int] = set()
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
        self._partitions.update(partition.start_ms for partition in self._store._engine.storage.partitions)

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


PLOT = Path("duelog-demo.png")
"""Where the plot goes unless told otherwise."""


PROMISES = ("early", "late", "lost", "double", "disordered", "foreign", "miscounted", "partitions_missing",
            "partitions_left", "findings")  # fmt: skip
"""Figures that are to be 0."""

Figures = dict[str, int | float]


def problems(figures: Figures) -> dict[str, int]:
    """The figures that should be 0 and are not."""
    return {name: int(figures[name]) for name in PROMISES if figures[name]}


def replay_trace(path: Path, trace: Trace, progress: Callable[[int], None] = lambda _: None) -> tuple[Figures, Course]:
    """Replay `trace` through a new store in `path`; `progress` is told how many messages were sent and received.

    REQUIRES: at least one message, and no store in `path` yet. Raises what the store raises.
    """
    clock = ManualClock(int(trace.written_ms[0]))
    audit = Audit(trace)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        replay = Replay(store, clock, trace, audit)
        for done in itertools.accumulate(replay.run()):
            progress(done)
    return _figures(trace, replay.course, audit.verdict()), replay.course


def _figures(trace: Trace, course: Course, verdict: Verdict) -> Figures:
    """Figures of a replay: counts of messages, unless a name says otherwise; times in epoch ms.

    delayed: due after they were written. steps: times that something was sent or became due; each is durable before the
    next begins, and that is what takes the time. peak_pending: most that were written and not due at one time, by the
    store; peak_disk_bytes: largest of some two thousand samples. messages_per_second: of real time, from the first send
    until the last partition is deleted; sampling and checking not counted. miscounted: samples where the store's count
    of pending messages was not the trace's. partitions_missing: by how many the partitions made differ from those that
    the trace needs; partitions_left: made and not deleted. findings: of the store's own check.
    """
    peak = max(range(len(course.pending)), key=course.pending.__getitem__)
    return {
        "messages": len(trace),
        "delayed": int(trace.delayed.sum()),
        "first_ms": int(trace.written_ms[0]),
        "last_ms": int(trace.ready_ms.max()),
        "partitions_created": course.partitions_created,
        "partitions_deleted": course.partitions_deleted,
        "ledgers_trimmed": course.ledgers_trimmed,
        "steps": course.steps,
        "peak_pending": course.pending[peak],
        "peak_pending_ms": course.times_ms[peak],
        "peak_disk_bytes": max(course.disk_bytes),
        "end_disk_bytes": course.disk_bytes[-1],
        "seconds": round(course.seconds, 3),
        "messages_per_second": round(len(trace) / course.seconds, 1),
        **asdict(verdict),
        "miscounted": course.miscounted + (course.pending[peak] != trace.peak_pending()[0]),
        "partitions_missing": abs(trace.due_days(CONFIG.partition_ms) - course.partitions_created),
        "partitions_left": abs(course.partitions_created - course.partitions_deleted),
        "findings": course.findings,
    }


def run_demo(
    store: Path | None, years: int = 5, all_: bool = False, plot: Path | None = None, json_: bool = False
) -> bool:
    """Replay the last `years` of the trace, or all of it, and print a table (or JSON); whether all guarantees held.

    store: a directory to keep the store in, empty or not there yet; None: a temporary one, removed afterwards.
    plot: where the plot goes; None: duelog-demo.png in the current directory. Raises InvalidArgument.
    """
    plot = plot or PLOT
    if store is not None and store.exists() and not (store.is_dir() and not any(store.iterdir())):
        raise InvalidArgument("STORE", str(store), "expected a directory that is empty or not there yet")
    if plot.is_dir() or not plot.absolute().parent.is_dir():
        raise InvalidArgument("--plot", str(plot), "expected a file, in a directory that exists")
    trace = load_trace()
    if not all_:
        trace = trace.last_years(years)
    with ExitStack() as stack:
        progress = stack.enter_context(progress_bar("sent and received"))
        path = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duelog-demo-"))) / "store"
        figures, course = replay_trace(path, trace, lambda done: progress(done, 2 * len(trace)))
    drawn = _draw(int(figures["messages"]), course, plot)
    ok = not problems(figures)
    if json_:
        write_json({**figures, "plot": str(plot) if drawn else None, "ok": ok})
    else:
        _print(figures)
    if drawn:
        say(f"the plot is {plot}")
    if store is not None:
        say(f"the store is {store}")
    return ok


def _draw(messages: int, course: Course, plot: Path) -> bool:
    try:
        from .demo_plot import draw
    except ImportError:
        say("no plot: it needs matplotlib; pip install 'duelog[plot]'")
        return False
    try:
        draw(course.times_ms, course.pending, course.disk_bytes, messages, plot)
    except (OSError, ValueError) as error:  # no space, no permission, no such format: the figures stand without it
        say(f"no plot: {error}")
        return False
    return True


def _print(figures: Figures) -> None:
    out = Console()
    table = Table(title=f"{_day(figures['first_ms'])} to {_day(figures['last_ms'])}", show_header=False, min_width=44)
    table.add_column()
    table.add_column(justify="right")
    shown = (
        ("messages", f"{figures['messages']:,}"),
        ("of them delayed", f"{figures['delayed']:,}"),
        ("partitions created", f"{figures['partitions_created']:,}"),
        ("partitions deleted", f"{figures['partitions_deleted']:,}"),
        ("ledgers trimmed", f"{figures['ledgers_trimmed']:,}"),
        (f"peak of pending, {_day(figures['peak_pending_ms'])}", f"{figures['peak_pending']:,}"),
        ("on disk at the peak", decimal(int(figures["peak_disk_bytes"]))),
        ("on disk at the end", decimal(int(figures["end_disk_bytes"]))),
        ("steps, each on disk before the next", f"{figures['steps']:,}"),
        ("seconds", f"{figures['seconds']:,.1f}"),
        ("messages per second", f"{figures['messages_per_second']:,.0f}"),
    )
    for name, value in shown:
        table.add_row(name, value)
    table.add_section()
    always = dict.fromkeys(("early", "late", "lost", "double"), 0)
    for name, count in {**always, **problems(figures)}.items():
        table.add_row(name.replace("_", " "), f"{count:,}", style="bold red" if count else "green")
    out.print(table)
    if problems(figures):
        out.print("the store did not do what the trace asks for", style="bold red")
    else:
        out.print("checked against the trace: each received once, in order of due time, none early")


def _day(ms: float) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d}"
