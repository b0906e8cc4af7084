"""Log records of a store in trouble: by the standard `logging`, under the logger `duelog`."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import ClockJumped, CorruptEntry, DuelogError, StoreFull
from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.store.codec import format as fmt
from duelog.store.env.environment import Environment
from duelog.store.limited_log import LimitedLog
from duelog.store.log import catalog
from duelog.upkeep.quarantine import Quarantine
from duelog.upkeep.scheduler import Scheduler
from tests.conftest import START_MS, OpenStore

ROOT = Path(__file__).parents[3]


@pytest.fixture
def main(tmp_path: Path) -> Environment:
    """A main environment to speak of."""
    environment = Environment(tmp_path / "main", name="main", create=True)
    environment.close()
    return environment


@pytest.mark.parametrize(
    "error", [StoreFull(Path("/s"), "no room"), ClockJumped(1, 99, 10), DuelogError("made up")], ids=lambda each: each
)
def test_it_is_heard_that_firing_stopped_and_that_it_goes_on(
    main: Environment, caplog: pytest.LogCaptureFixture, error: DuelogError
) -> None:
    """Once when it stops, each minute while it lasts, and once when messages are fired again."""
    clock, seconds = ManualClock(START_MS), [0.0]
    scheduler = Scheduler(clock, main)
    scheduler._log = LimitedLog(logging.getLogger("duelog.scheduler"), most=1, clock=lambda: seconds[0])
    ticks = 0

    def tick() -> int | None:
        nonlocal ticks
        ticks += 1
        scheduler.wake()
        if ticks <= 200:
            seconds[0] += 1.0
            clock.advance(60_000)  # over the pause after any failure
            raise error
        scheduler._stopping = True
        return None

    scheduler._pause = lambda pause_ms: None  # type: ignore[method-assign]  # no other thread moves the clock
    scheduler.start(tick, lambda: None)
    scheduler._thread.join(60)
    assert ticks == 201
    records = [record for record in caplog.records if record.name == "duelog.scheduler"]
    assert [record.levelname for record in records] == ["ERROR"] * 4 + ["WARNING"]
    first, second, *_, last = [record.getMessage() for record in records]
    assert first == f"{main.path.parent}: nothing is fired for now: {error}"
    assert second == f"{first} (59 like it were not logged)"
    assert last == f"{main.path.parent}: messages are fired again, after {199 * 60_000} ms"


def test_a_quarantined_entry_is_logged_once_and_many_do_not_flood(
    main: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    """With where it lies and why; a thousand of them at once are ten lines."""
    quarantine = Quarantine(main)
    for entry_id in (5, 5, *range(1_000)):
        quarantine.add(CorruptEntry("partition 20261120T000000Z", 7, entry_id, "checksum"))
    assert len(caplog.records) == 10
    assert caplog.records[0].levelname == "WARNING"
    assert caplog.messages[0].endswith("partition 20261120T000000Z: ledger 7, entry 5: checksum")
    assert len(quarantine.items()) == 1_000


def test_parts_that_are_suspended_by_the_thousand_do_not_flood(
    main: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is in `store.suspended()`; the log has ten lines of them."""
    suspensions = Suspensions(main, str)
    for topic_id in range(1_000):
        suspensions.note(Part("fire", topic_id), DuelogError("made up"), START_MS, pauses=True)
    assert len(caplog.records) == 10
    assert len(suspensions.all()) == 1_000


def test_a_schedule_that_cannot_be_read_is_heard_to_recur_no_more(
    open_store: OpenStore, store: DelayedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """At the opening; `check` has it too."""
    store.topic("t").every("beat", interval=60)
    main = store._engine.storage.main
    with main.read() as raw:
        (key,) = catalog.keys(raw, fmt.prefix(fmt.Table.RECURRENCE))
    main.write(lambda transaction: transaction.put(key, b"no schedule"))
    store.close()
    store = open_store()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"{store.path}: a schedule stopped recurring: " in caplog.text
    store.close()  # and not checked: `check` has it


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, which configures logging or does not."""
    text = f"import sys\nsys.path.append({str(ROOT)!r})\n{program}"
    return subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, check=True, timeout=60
    )


USE = """
from duelog import DelayedStore, StoreConfig
DelayedStore.open(sys.argv[1], StoreConfig(retention_ms=1000)).close()
DelayedStore.open(sys.argv[1], StoreConfig(retention_ms=5000)).close()
"""


@pytest.mark.parametrize(
    ("configure", "heard"),
    [
        pytest.param("", False, id="not configured"),
        pytest.param("import logging; logging.basicConfig()", True, id="configured"),
    ],
)
def test_a_program_hears_of_a_store_where_it_configures_logging_and_else_nothing_is_printed(
    tmp_path: Path, configure: str, heard: bool
) -> None:
    """A library leaves the output of a program alone, also where `logging` would print by itself."""
    done = run(configure + USE, str(tmp_path / "store"))
    assert done.stdout == ""
    assert ("WARNING:duelog.config:" in done.stderr) is heard
    assert bool(done.stderr) is heard


def test_a_store_in_order_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: ManualClock) -> None:
    """Neither at openings nor at work, at any level that is on by default."""
    for _ in range(2):
        with DelayedStore.open(tmp_path / "s", StoreConfig(partition_ms=3_600_000), clock=clock) as store:
            topic = store.topic("t")
            with topic.subscribe("s") as subscription:
                topic.send_payloads([b"x"] * 500, deliver_after=60)
                clock.advance(7_200_000)
                subscription.ack(subscription.receive(1_000))
            store.tick()
    assert caplog.records == []
