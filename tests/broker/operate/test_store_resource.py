"""The store as a whole over REST: figures, time partitions, and jobs that read it beside the broker."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from duelog import DelayedStore
from duelog.broker.admin.http_request import HttpError
from duelog.broker.operate.jobs import MOST_KEPT, Job, Jobs
from duelog.partitions.timespan import directory_name
from tests.broker.admin.rest import Rest, Rows, administered
from tests.broker.clients.conftest import ServedStore, free_port, listens

COMMAND = [sys.executable, "-P", "-m", "duelog.tools.cli.main"]
DUE_MS = 4_000_000_000_000 // 86_400_000 * 86_400_000


async def test_figures_of_the_store_and_the_broker(rest: Rest) -> None:
    """Figures of what is there, and of what came since the start."""
    rest.store.topic("t").send_payloads([b"x"] * 3, deliver_at=DUE_MS)
    found = (await rest.ask("GET", "/duelog/v1/counters")).value
    assert {name: found["store"][name] for name in ("topics", "partitions", "pending")} == {
        "topics": 1,
        "partitions": 1,
        "pending": 3,
    }
    assert (found["producers"], found["consumers"], found["messagesIn"], found["suspended"]) == (0, 0, 0, [])


async def test_a_partition_says_why_it_is_still_there(rest: Rest) -> None:
    """By the name that `duelog partitions` gives; 404 for one that is not there, 412 for no name of one."""
    rest.store.topic("t").send_payloads([b"x"] * 3, deliver_at=DUE_MS)
    (listed,) = (await rest.ask("GET", "/duelog/v1/partitions")).value
    name = directory_name(DUE_MS)
    assert (listed["name"], listed["state"], listed["messages"], listed["pending"]) == (name, "future", 3, 3)
    found = (await rest.ask("GET", f"/duelog/v1/partitions/{name}")).value
    kept = [(each["reason"], each["topic"], each["behind"]) for each in found.pop("keptBy")]
    assert kept == [("not over", "", 0), ("pending", "persistent://public/default/t", 3)]
    assert found == listed
    assert (await rest.ask("GET", "/duelog/v1/partitions/20010101T000000Z")).status == 404
    assert (await rest.ask("GET", "/duelog/v1/partitions/tomorrow")).status == 412


# -- jobs -------------------------------------------------------------------------------------------


KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("check", {"deep": True}),
    ("audit", {"headers": True}),
    ("compaction", {"dryRun": True, "minDeadRatio": 0.5}),
    ("snapshots", {}),
)


def test_duelog_serve_runs_jobs_beside_it(tmp_path: Path) -> None:
    """Started with 202, watched until they are done, their results in the command line's JSON."""
    with DelayedStore.open(tmp_path / "store") as store:
        store.topic("t").send_payloads([b"x"] * 3, deliver_at=DUE_MS)
    port = free_port()
    served = ServedStore(tmp_path, webServicePort=port)

    async def run(rest: Rest, kind: str, options: dict[str, Any]) -> list[Any]:
        started = await rest.ask("POST", "/duelog/v1/jobs", {"kind": kind, **options})
        assert (started.status, started.value["kind"], started.value["state"]) == (202, kind, "running")
        assert started.value["options"] == options
        found = await ended(rest, started.value["id"])
        assert (found["state"], found["reason"]) == ("done", None), found
        assert found["endedMs"] >= found["startedMs"]
        late = await rest.ask("DELETE", f"/duelog/v1/jobs/{started.value['id']}")
        assert (late.status, late.reason) == (409, f"job {started.value['id']} is done")
        return list(found["result"])

    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            rest = Rest(session, f"http://127.0.0.1:{port}")
            async with asyncio.timeout(60):
                while not listens(port):  # the port of the binary protocol is first
                    await asyncio.sleep(0.02)
            check, (audit,) = await asyncio.gather(*(run(rest, *each) for each in KINDS[:2]))
            compaction, snapshots = await asyncio.gather(*(run(rest, *each) for each in KINDS[2:]))
            assert (check, snapshots) == ([], [])
            assert (audit["findings"], sum(each["messages"] for each in audit["partitions"])) == ([], 3)
            assert compaction == [{"partitions": [], "bytes_before": 0, "bytes_after": 0}]
            assert (await rest.ask("POST", "/duelog/v1/jobs", {"kind": "audit"})).status == 202

    with served.running():  # and the last job ends with it
        asyncio.run(main())


async def test_a_compaction_is_taken_over_by_the_broker(tmp_path: Path) -> None:
    """Cancelled messages leave a closed partition while the store is served, and those that are left can be read."""
    settings: dict[str, Any] = {"store": {"partition_ms": 100}}
    async with administered(tmp_path / "store", command=COMMAND, **settings) as (_, rest, store):
        topic = store.topic("t")
        topic.subscribe("s").close()
        ids = topic.send_payloads([b"x" * 1_000] * 100, deliver_at=store.clock.now_ms() + 300)
        assert all(topic.cancel_batch(ids[10:]))

        async def until(state: str, generation: int) -> None:
            async with asyncio.timeout(60):
                while True:
                    (found,) = (await rest.ask("GET", "/duelog/v1/partitions")).value
                    if (found["state"], found["generation"]) == (state, generation):
                        return
                    await asyncio.sleep(0.05)

        await until("closed", 1)
        body = {"kind": "compaction", "minDeadRatio": 0.1}
        (report,) = (await ended(rest, (await rest.ask("POST", "/duelog/v1/jobs", body)).value["id"]))["result"]
        assert [(each["messages"], each["dead_messages"]) for each in report["partitions"]] == [(100, 90)]
        await until("closed", 2)
        with topic.subscribe("s") as subscription:
            assert len(subscription.receive(100, timeout=0)) == 10


async def ended(rest: Rest, job_id: int) -> dict[str, Any]:
    """A job once it runs no more."""
    async with asyncio.timeout(60):
        while True:
            found = (await rest.ask("GET", f"/duelog/v1/jobs/{job_id}")).value
            if found["state"] != "running":
                return dict(found)
            await asyncio.sleep(0.02)


NO_JOBS: Rows = tuple(
    ("POST", "/duelog/v1/jobs", *row)
    for row in (
        ({"kind": "repair"}, 412, "expected one of check, audit, compaction, snapshots"),
        ({}, 412, "kind=None"),
        ({"kind": "check", "fast": True}, 412, "'fast'"),
        ({"kind": "check", "deep": 1}, 412, "deep=1"),
        ({"kind": "compaction", "minDeadRatio": 2}, 412, "minDeadRatio=2"),
        ({"kind": "compaction", "minDeadRatio": True}, 412, "minDeadRatio=True"),
        ({"kind": "check"}, 405, "duelog serve"),
    )
)


async def test_what_is_no_job_is_not_started(rest: Rest) -> None:
    """The field and the value; and 405 where the broker does not know how to run one."""
    await rest.refuses(NO_JOBS)
    assert (await rest.ask("GET", "/duelog/v1/jobs")).value == []
    assert (await rest.ask("GET", "/duelog/v1/jobs/1")).status == 404


SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable, "-c",
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "pathlib.Path(sys.argv[2], 'ready').touch(); time.sleep(600)",
]  # fmt: skip


def started(jobs: Jobs) -> Job:
    """One more."""
    return jobs.start("check", {}, ["check"], [])


async def test_two_run_at_a_time_and_a_cancelled_one_is_gone(tmp_path: Path) -> None:
    """The third is 429; a process that is cancelled has ended when that is answered; the end of the broker ends all."""
    jobs = Jobs(SLEEPER, tmp_path, lambda: 5)
    first, second = started(jobs), started(jobs)
    with pytest.raises(HttpError, match="2 jobs are running") as refused:
        started(jobs)
    assert refused.value.status == 429
    while first.process is None or second.process is None:
        await asyncio.sleep(0.01)
    processes = first.process, second.process
    await jobs.cancel(first)
    assert (first.state, processes[0].returncode, first.ended_ms) == ("cancelled", -15, 5)
    third = started(jobs)
    await jobs.close()
    assert [each.state for each in (second, third)] == ["cancelled", "cancelled"]
    assert processes[1].returncode == -15


async def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while."""
    monkeypatch.setattr("duelog.broker.operate.jobs._END_S", 0.05)

    jobs = Jobs(STUBBORN, tmp_path, lambda: 5)
    job = started(jobs)
    while job.process is None or not (tmp_path / "ready").exists():
        await asyncio.sleep(0.01)
    process = job.process
    await jobs.cancel(job)
    assert process.returncode == -9


@pytest.mark.parametrize(
    ("program", "state", "reason"),
    [
        ("print('{\"a\": 1}'); print('[2]'); raise SystemExit(1)", "done", None),
        ("import sys; print('first\\nno such store', file=sys.stderr); raise SystemExit(2)", "failed", "no such store"),
        ("raise SystemExit(7)", "failed", "exit status 7"),
        ("print('not JSON')", "failed", "Expecting value"),
        ("print('x' * 200)", "failed", "the result is over 100 bytes: use the command line"),
    ],
)
async def test_how_a_job_ends(
    program: str, state: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings are a result; whatever else is no JSON within bounds is a failure with its reason."""
    monkeypatch.setattr("duelog.broker.operate.jobs.MAX_RESULT_BYTES", 100)

    jobs = Jobs([sys.executable, "-c", program], tmp_path, lambda: 5)
    job = started(jobs)
    assert job.task is not None
    await job.task
    assert job.state == state
    if reason is None:
        expected: Any = [{"a": 1}, [2]]
    else:
        expected = None
        assert reason in str(job.reason)
    assert json.loads(job.with_result()) == {**job.as_json(), "result": expected}


async def test_a_command_that_cannot_be_run_is_a_failure(tmp_path: Path) -> None:
    """Python may have been removed; and the oldest of many is forgotten."""
    jobs = Jobs([str(tmp_path / "none")], tmp_path, lambda: 5)
    for _ in range(MOST_KEPT + 5):
        job = started(jobs)
        assert job.task is not None
        await job.task
        assert (job.state, "none" in str(job.reason)) == ("failed", True)
    assert [each.job_id for each in jobs.all()] == list(range(6, MOST_KEPT + 6))
