"""Jobs that read the whole store, each a process of its own beside the broker: started, watched, cancelled.

A job is a command of `duelog` with `--json`. It takes no turn of the broker's loop and no lock of its store, and may be
ended at any moment: a compaction that is cancelled leaves each partition as it was or compacted. Jobs are known to this
process alone: a restart forgets them and their results, and ends those that run.
"""

import asyncio
import contextlib
import json
import logging
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...store.errors import DuelogError
from ..admin.http_request import HttpError, Reply, Request, one_of, value_of
from ..admin.routing import Need, Route

_log = logging.getLogger("duelog.broker.admin")

MOST_RUNNING = 2
MOST_KEPT = 20
MAX_RESULT_BYTES = 8 << 20
"""A longer result is dropped and the job has failed: on the command line it is written to a file."""

_END_S = 10.0
"""Seconds in which a cancelled job has to end before it is killed."""


@dataclass(slots=True, eq=False)
class Job:
    """One run."""

    job_id: int
    kind: str
    options: Mapping[str, Any]
    started_ms: int
    state: str = "running"
    """Then "done", "failed" or "cancelled"."""
    ended_ms: int | None = None
    result: bytes = b"null"
    """A JSON array of the lines that the command wrote, not decoded: it may be long."""
    reason: str | None = None
    """Why it failed."""
    process: Process | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The job beside its result."""
        return {"id": self.job_id, "kind": self.kind, "options": dict(self.options), "state": self.state,
                "startedMs": self.started_ms, "endedMs": self.ended_ms, "reason": self.reason}  # fmt: skip

    def with_result(self) -> bytes:
        """The same with its result, as JSON."""
        return b"".join((json.dumps(self.as_json()).encode()[:-1], b', "result": ', self.result, b"}"))


@dataclass(eq=False)
class Jobs:
    """For the event loop's thread alone. command: what runs `duelog`, before its arguments; none: there are no jobs.

    clock: in ms. done: called by another thread when a job is done: the store takes over what a compaction has written.
    """

    _command: Sequence[str]
    _store: Path
    _clock: Callable[[], int]
    _done: Callable[[], object] = lambda: None
    _jobs: deque[Job] = field(default_factory=deque, init=False)
    _count: int = field(default=0, init=False)

    def start(self, kind: str, options: Mapping[str, Any], words: Sequence[str], flags: Sequence[str]) -> Job:
        """Run `duelog WORDS STORE FLAGS`. HttpError: 405 there are no jobs here, 429 too many are running."""
        if not self._command:
            raise HttpError(405, "there are no jobs here: `duelog serve` runs them")
        running = sum(each.state == "running" for each in self._jobs)
        if running >= MOST_RUNNING:
            raise HttpError(429, f"{running} jobs are running: wait for one to end, or cancel it")
        while len(self._jobs) >= MOST_KEPT:
            self._jobs.remove(next(each for each in self._jobs if each.state != "running"))
        self._count += 1
        job = Job(self._count, kind, options, self._clock())
        self._jobs.append(job)
        job.task = asyncio.create_task(self._run(job, [*self._command, *words, str(self._store), *flags, "--json"]))
        return job

    def all(self) -> list[Job]:
        return list(self._jobs)

    def get(self, job_id: int) -> Job:
        for job in self._jobs:
            if job.job_id == job_id:
                return job
        raise HttpError(404, f"there is no job {job_id}: it never was, or is forgotten; {MOST_KEPT} are kept")

    async def cancel(self, job: Job) -> None:
        """End it, if it runs. HttpError 409: it has ended."""
        if job.task is None or job.state != "running":
            raise HttpError(409, f"job {job.job_id} is {job.state}")
        job.state = "cancelled"
        job.task.cancel()
        await asyncio.wait([job.task])

    async def close(self) -> None:
        running = [job for job in self._jobs if job.state == "running"]
        await asyncio.gather(*map(self.cancel, running))

    async def _run(self, job: Job, command: Sequence[str]) -> None:
        state, reason = "failed", None
        try:
            job.process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
            status, out, err = await self._watch(job.process)
            reason = _failure(status, out, err)
            if reason is None:
                job.result = await asyncio.to_thread(_array, out)
                await self._tell(job)
                state = "done"
        except asyncio.CancelledError:
            state = "cancelled"
        except Exception as error:
            _log.warning("job %s (%s) failed", job.job_id, job.kind, exc_info=True)
            reason = str(error) or type(error).__name__
        finally:
            if job.process is not None:
                await _end(job.process)
            job.process, job.ended_ms, job.state, job.reason = None, self._clock(), state, reason

    async def _tell(self, job: Job) -> None:
        try:
            await asyncio.to_thread(self._done)
        except DuelogError as error:  # it is tried again by the store itself
            _log.warning("after job %s (%s): %s", job.job_id, job.kind, error)

    @staticmethod
    async def _watch(process: Process) -> tuple[int, bytes, bytes]:
        """Its status and what it wrote, of a result that is too long no more than that it is."""

        async def read(stream: asyncio.StreamReader | None, most: int) -> bytes:
            found = bytearray()
            while stream is not None and (piece := await stream.read(1 << 16)):
                found += piece
                if len(found) > 2 * most:
                    del found[:-most]
            return bytes(found)

        out, err = await asyncio.gather(read(process.stdout, MAX_RESULT_BYTES + 1), read(process.stderr, 4_096))
        return await process.wait(), out, err


def _array(lines: bytes) -> bytes:
    """Raises ValueError where a line is no JSON."""
    found = lines.splitlines()
    for line in found:
        json.loads(line)
    return b"".join((b"[", b", ".join(found), b"]"))


def _failure(status: int, out: bytes, err: bytes) -> str | None:
    if status not in (0, 1):  # 1: it has findings
        lines = err.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {status}"
    if len(out) > MAX_RESULT_BYTES:
        return f"the result is over {MAX_RESULT_BYTES} bytes: use the command line"
    return None


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


_JOBS = "/duelog/v1/jobs"


@dataclass(eq=False)
class JobResource:
    """For the event loop's thread alone."""

    _jobs: Jobs

    def routes(self) -> list[Route]:
        all_, here, job = Need.SUPERUSER, True, f"{_JOBS}/{{job}}"
        return [
            Route("GET", _JOBS, self.jobs, "Jobs of this process, the oldest first", all_, here=here),
            Route("POST", _JOBS, self.start, "Start a check, an audit, a compaction or a list of snapshots", all_,
                  body="object", here=here),
            Route("GET", job, self.job, "A job and its result", all_, here=here),
            Route("DELETE", job, self.cancel, "Cancel a job", all_, here=here),
        ]  # fmt: skip

    async def jobs(self, request: Request) -> Any:
        """Without their results."""
        return [each.as_json() for each in self._jobs.all()]

    async def start(self, request: Request) -> Reply:
        """202 and the job: `kind`, and its options."""
        body = request.object()
        kind = one_of("kind", body.get("kind"), list(_KINDS))
        options = {name: value for name, value in body.items() if name != "kind"}
        job = self._jobs.start(kind, options, *_KINDS[kind](options))
        return Reply(json.dumps(job.as_json()).encode(), "application/json", 202)

    async def job(self, request: Request) -> Reply:
        """`result` is null until it is done."""
        return Reply(self._jobs.get(request.number("job", 0)).with_result(), "application/json")

    async def cancel(self, request: Request) -> None:
        """409: it has ended."""
        await self._jobs.cancel(self._jobs.get(request.number("job", 0)))


_Command = tuple[Sequence[str], Sequence[str]]
"""Words before the store's path, and flags behind it."""


def _check(options: Mapping[str, Any]) -> _Command:
    _only(options, "deep")
    return ["check"], ["--deep"] if value_of(options, "deep", bool, False) else []


def _audit(options: Mapping[str, Any]) -> _Command:
    _only(options, "headers")
    return ["audit"], ["--headers"] if value_of(options, "headers", bool, False) else []


def _compaction(options: Mapping[str, Any]) -> _Command:
    _only(options, "minDeadRatio", "dryRun")
    ratio = options.get("minDeadRatio")
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1):
        raise HttpError(412, f"minDeadRatio={ratio!r:.200}: expected 0 to 1")
    dry = ["--dry-run"] if value_of(options, "dryRun", bool, False) else []
    return ["compact"], [*([] if ratio is None else [f"--min-dead-ratio={float(ratio)}"]), *dry]


def _snapshots(options: Mapping[str, Any]) -> _Command:
    _only(options)
    return ["snapshot", "list"], []


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], _Command]] = {
    "check": _check,
    "audit": _audit,
    "compaction": _compaction,
    "snapshots": _snapshots,
}


def _only(options: Mapping[str, Any], *known: str) -> None:
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise HttpError(412, f"{unknown!r:.200}: options of this kind are {', '.join(known) or 'none'}")
