"""Commands that read the whole store, in processes of their own: their progress, ends and results."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.store.errors import ClosedError, InvalidArgument
from duelog.upkeep.jobs import MOST_KEPT, PROGRESS, Jobs

HOUR_MS = 3_600_000
START_MS = 1_800_000_000_000 // HOUR_MS * HOUR_MS
SLEEPER = "import sys, time; open(sys.argv[2] + '/ready', 'w').close(); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"


def running(tmp_path: Path, program: str) -> Jobs:
    """Jobs each of which is a Python program, given the store's path."""
    return Jobs(tmp_path, lambda: 5, [sys.executable, "-c", program])


def begun(jobs: Jobs, tmp_path: Path) -> int:
    """The id of one more job, whose process has told by a pipe that it runs."""
    pipe = tmp_path / "ready"
    if not pipe.exists():
        os.mkfifo(pipe)
    job_id = int(jobs.start("check")["id"])
    pipe.read_bytes()
    return job_id


def ended(jobs: Jobs, job_id: int) -> dict[str, Any]:
    """A job once its thread has ended."""
    jobs._find(job_id).thread.join(60)
    return jobs.get(job_id)


def test_each_kind_reads_an_open_store_and_tells_how_far_it_is(tmp_path: Path) -> None:
    """The results are the command line's JSON, that of an audit in HTML its page; and what was compacted is adopted."""
    clock, config = ManualClock(START_MS), StoreConfig(partition_ms=HOUR_MS, background=False, control=True)
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        ids = topic.send_payloads([b"x" * 1_000] * 100, deliver_at=START_MS + 1_000)
        assert all(topic.cancel_batch(ids[10:]))
        for passed_ms in (1_000, HOUR_MS):
            clock.advance(passed_ms)
            store.tick()

        def result(kind: str, **options: Any) -> Any:
            found = ended(store.jobs, store.jobs.start(kind, options)["id"])
            assert (found["kind"], found["state"], found["reason"]) == (kind, "done", None)
            assert found["done"] == (found["total"] or 0)
            assert (found["total"] is None) == (kind == "snapshots")
            return found["result"]

        assert result("check", deep=True) == []
        assert result("snapshots") == []
        assert sum(each["messages"] for each in result("audit", headers=True)[0]["partitions"]) == 100
        assert result("audit", html=True).startswith("<!doctype html>")
        (dry,) = result("compaction", dry_run=True, min_dead_ratio=0.1)
        assert [each["dead_messages"] for each in dry["partitions"]] == [90]
        assert store.partitions()[0].generation == 1
        result("compaction", min_dead_ratio=0.1)
        assert store.partitions()[0].generation == 2


REFUSED: list[tuple[Any, Any, str]] = [
    ("repair", {}, "kind='repair': expected one of check, audit, compaction, snapshots"),
    (None, {}, "kind=None"),
    ("check", {"fast": True}, "options='fast'"),
    ("check", {"deep": 1}, "deep=1"),
    ("check", [1], r"options=\[1\]"),
    ("compaction", {"min_dead_ratio": 2}, "min_dead_ratio=2"),
    ("compaction", {"min_dead_ratio": True}, "min_dead_ratio=True"),
]


def test_an_unknown_kind_or_option_is_refused_by_name_and_value(tmp_path: Path) -> None:
    """And no job is there then."""
    jobs = running(tmp_path, "")
    for kind, options, names in REFUSED:
        with pytest.raises(InvalidArgument, match=names):
            jobs.start(kind, options)
    assert jobs.all() == []


def test_two_run_at_a_time_and_closing_ends_them(tmp_path: Path) -> None:
    """A third is refused; a process that is cancelled has ended when that returns, and is not cancelled again."""
    jobs = running(tmp_path, SLEEPER)
    first, second = begun(jobs, tmp_path), begun(jobs, tmp_path)
    with pytest.raises(InvalidArgument, match="2 jobs are running"):
        jobs.start("check")
    process = jobs._find(first).process
    assert process is not None
    jobs.cancel(first)
    assert process.returncode == -15
    assert (jobs.get(first)["state"], jobs.get(first)["ended_ms"]) == ("cancelled", 5)
    with pytest.raises(InvalidArgument, match=f"job_id={first}: it is cancelled"):
        jobs.cancel(first)
    third = begun(jobs, tmp_path)
    jobs.close()
    assert [jobs.get(each)["state"] for each in (second, third)] == ["cancelled", "cancelled"]
    with pytest.raises(ClosedError):
        jobs.start("check")


def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while."""
    monkeypatch.setattr("duelog.upkeep.jobs._END_S", 0.05)
    jobs = running(tmp_path, STUBBORN)
    job_id = begun(jobs, tmp_path)
    process = jobs._find(job_id).process
    jobs.cancel(job_id)
    assert process is not None
    assert process.returncode == -9


@pytest.mark.parametrize(
    ("program", "state", "reason"),
    [
        ("print('{\"a\": 1}'); print('[2]'); raise SystemExit(1)", "done", None),
        ("import sys; print('first\\nno such store', file=sys.stderr); raise SystemExit(2)", "failed", "no such store"),
        (f"import sys; print('oh\\n{PROGRESS} 3 4', file=sys.stderr); raise SystemExit(2)", "failed", "oh"),
        ("raise SystemExit(7)", "failed", "exit status 7"),
        ("print('not JSON')", "failed", "Expecting value"),
        ("print('x' * 200)", "failed", "the result is over 100 bytes: use the command line"),
    ],
)
def test_how_a_job_ends(
    program: str, state: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings are a result; whatever else is no JSON within bounds is a failure with its reason."""
    monkeypatch.setattr("duelog.upkeep.jobs.MAX_RESULT_BYTES", 100)
    jobs = running(tmp_path, program)
    found = ended(jobs, jobs.start("check")["id"])
    assert (found["state"], found["result"]) == (state, None if reason else [{"a": 1}, [2]])
    assert (reason or "None") in str(found["reason"])
    assert (found["done"], found["total"]) == ((3, 4) if PROGRESS in program else (0, None))


def test_a_command_that_cannot_be_run_is_a_failure_and_the_oldest_job_is_forgotten(tmp_path: Path) -> None:
    """Python may have been removed."""
    jobs = Jobs(tmp_path, lambda: 5, [str(tmp_path / "none")])
    for _ in range(MOST_KEPT + 5):
        found = ended(jobs, jobs.start("check")["id"])
        assert (found["state"], "none" in found["reason"]) == ("failed", True)
    assert [each["id"] for each in jobs.all()] == list(range(6, MOST_KEPT + 6))
    with pytest.raises(InvalidArgument, match="job_id=1: there is no such job"):
        jobs.get(1)
