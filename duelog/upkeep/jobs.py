"""Jobs: commands of `duelog` that read the whole store, each in a process of its own: started, watched, cancelled.

A job takes no turn of the store's threads and none of its locks, and may be ended at any moment: a compaction that is
cancelled leaves each partition as it was, or compacted. Jobs are known to the process alone that has the store open:
closing it ends those that run, and forgets all of them with their results.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from duelog.store.errors import ClosedError, InvalidArgument

if TYPE_CHECKING:
    from subprocess import Popen

_log = logging.getLogger("duelog.jobs")

COMMAND = (sys.executable, "-P", "-m", "duelog.tools.cli.main")
"""Runs `duelog`."""
PROGRESS = "DUELOG_PROGRESS"
"""The variable that has a command write a line for each per cent to standard error: this word, done, of how much."""

MOST_RUNNING = 2
MOST_KEPT = 20
MAX_RESULT_BYTES = 8 << 20
"""A longer result is dropped and the job has failed: on the command line it is written to a file."""

_END_S = 10.0
"""Seconds in which a cancelled job has to end before it is killed."""
_LINE_BYTES = 4_096


class _Kind(NamedTuple):
    """The command of a kind of job, and its flags by the names of options."""

    words: tuple[str, ...]
    options: Mapping[str, type]


_KINDS = {
    "check": _Kind(("check",), {"deep": bool}),
    "audit": _Kind(("audit",), {"headers": bool, "html": bool}),
    "compaction": _Kind(("compact",), {"min_dead_ratio": float, "dry_run": bool}),
    "snapshots": _Kind(("snapshot", "list"), {}),
}


@dataclass(slots=True, eq=False)
class Job:
    """One run. Its lock is that of `Jobs`."""

    id: int
    kind: str
    options: Mapping[str, Any]
    started_ms: int
    state: str = "running"
    """Then "done", "failed" or "cancelled"."""
    ended_ms: int | None = None
    done: int = 0
    total: int | None = None
    """How much there is to do, and how much of it is done; None: it is not known."""
    reason: str | None = None
    """Why it failed."""
    result: bytes = b""
    process: Popen[bytes] | None = field(default=None, repr=False)
    thread: threading.Thread = field(init=False, repr=False)

    def status(self) -> dict[str, Any]:
        """The job beside its result, in JSON."""
        return {name: getattr(self, name) for name in _STATUS}


_STATUS = ("id", "kind", "options", "state", "started_ms", "ended_ms", "done", "total", "reason")


class Jobs:
    """The jobs of an open store. Thread-safe."""

    def __init__(self, store: Path, now_ms: Callable[[], int], command: Sequence[str] = COMMAND) -> None:
        self._store, self._now_ms, self._command = store, now_ms, command
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False

    def start(self, kind: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run a command; the job. Raises InvalidArgument: no such kind or option; or too many are running."""
        flags = _flags(kind, options or {})
        with self._lock:
            if self._closed:
                raise ClosedError(f"store {self._store}")
            running = sum(each.state == "running" for each in self._jobs)
            if running >= MOST_RUNNING:
                raise InvalidArgument("kind", kind, f"{running} jobs are running: wait for one to end, or cancel it")
            while len(self._jobs) >= MOST_KEPT:
                self._jobs.remove(next(each for each in self._jobs if each.state != "running"))
            self._count += 1
            job = Job(self._count, kind, options or {}, self._now_ms())
            self._jobs.append(job)
            command = [*self._command, *_KINDS[kind].words, str(self._store), *flags]
            job.thread = threading.Thread(target=self._run, args=(job, command), name="duelog-job", daemon=True)
            job.thread.start()
            return job.status()

    def all(self) -> list[dict[str, Any]]:
        """The jobs, the oldest first, without their results."""
        with self._lock:
            return [each.status() for each in self._jobs]

    def get(self, job_id: int) -> dict[str, Any]:
        """A job with its `result`: of an audit in HTML the text, else the lines of the command; None: there is none."""
        job = self._find(job_id)
        result: Any = job.result.decode() if job.options.get("html") else list(map(json.loads, job.result.splitlines()))
        return {**job.status(), "result": result if job.state == "done" else None}

    def cancel(self, job_id: int) -> None:
        """End a job and wait until it has. Raises InvalidArgument: it has ended, or there is none."""
        job = self._find(job_id)
        with self._lock:
            if job.state != "running":
                raise InvalidArgument("job_id", job_id, f"it is {job.state}")
            job.state = "cancelled"
            process, thread = job.process, job.thread
        if process is not None:
            process.terminate()
        thread.join(_END_S)
        if process is not None and thread.is_alive():
            process.kill()
            thread.join()

    def close(self) -> None:
        """End those that run. A second call does nothing."""
        with self._lock:
            self._closed = True
            running = [each.id for each in self._jobs if each.state == "running"]
        for job_id in running:
            try:
                self.cancel(job_id)
            except InvalidArgument:
                continue  # it has ended by itself

    def _find(self, job_id: int) -> Job:
        with self._lock:
            for job in self._jobs:
                if job.id == job_id:
                    return job
        raise InvalidArgument("job_id", job_id, f"there is no such job; the last {MOST_KEPT} are kept")

    # -- the thread of a job -------------------------------------------------------------------------

    def _run(self, job: Job, command: Sequence[str]) -> None:
        try:
            reason = self._done(job, command)
        except Exception as error:
            _log.warning("job %s (%s) failed", job.id, job.kind, exc_info=True)
            reason = str(error) or type(error).__name__
        with self._lock:
            job.process, job.ended_ms = None, self._now_ms()
            if job.state == "running":
                job.state, job.reason = ("done", None) if reason is None else ("failed", reason)
            if job.state == "done" and job.total is not None:
                job.done = job.total

    def _done(self, job: Job, command: Sequence[str]) -> str | None:
        """Run the command to its end and keep its result; why it failed, None: it did not."""
        from subprocess import DEVNULL, PIPE, Popen  # noqa: PLC0415 - few stores have jobs
        from tempfile import TemporaryFile  # noqa: PLC0415

        with TemporaryFile() as output:
            with self._lock:
                if job.state != "running":
                    return None
                environment = {**os.environ, PROGRESS: PROGRESS}
                job.process = Popen(command, stdin=DEVNULL, stdout=output, stderr=PIPE, env=environment)
            with job.process as process:
                last = self._follow(job, process.stderr)
            if process.returncode not in (0, 1):  # 1: it has findings
                return last or f"exit status {process.returncode}"
            if output.seek(0, os.SEEK_END) > MAX_RESULT_BYTES:
                return f"the result is over {MAX_RESULT_BYTES} bytes: use the command line"
            output.seek(0)
            result = output.read()
        if not job.options.get("html"):
            for line in result.splitlines():
                json.loads(line)
        job.result = result
        return None

    @staticmethod
    def _follow(job: Job, said: IO[bytes] | None) -> str:
        """Hear of the progress until the command ends; the last other line that it said."""
        last = ""
        while said is not None and (line := said.readline(_LINE_BYTES)):
            words = line.split()
            if words[:1] == [PROGRESS.encode()] and len(words) == 3:
                job.done, job.total = int(words[1]), int(words[2])
            else:
                last = line.decode(errors="replace").strip() or last
        return last


def _flags(kind: str, options: Mapping[str, Any]) -> list[str]:
    """Raises InvalidArgument."""
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidArgument("kind", kind, f"expected one of {', '.join(_KINDS)}")
    if not isinstance(options, Mapping):
        raise InvalidArgument("options", options, "expected values by option")
    known = _KINDS[kind].options
    flags = [] if options.get("html") else ["--json"]
    for name, value in options.items():
        if name not in known:
            raise InvalidArgument("options", name, f"options of {kind} are {', '.join(known) or 'none'}")
        flag = f"--{name.replace('_', '-')}"
        if known[name] is bool:
            if not isinstance(value, bool):
                raise InvalidArgument(name, value, "expected true or false")
            flags += [flag] if value else []
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InvalidArgument(name, value, "expected 0 to 1")
        else:
            flags.append(f"{flag}={float(value)}")
    return flags
