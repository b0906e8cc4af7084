"""Jobs done side by side by threads that no interrupt of their caller concerns.

`concurrent.futures` and `threading` take locks in Python: an interrupt (KeyboardInterrupt) of the thread that hands
work over may leave one taken, and then no thread goes on. Here a thread is started by one step, and a job begins when
its lock is taken; what has begun can be waited for, whatever was interrupted.
"""

import _thread
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

_ATTEMPTS = 100
"""How many interrupts a wait outlasts that has to come to its end."""


class _Job:
    """One call, which succeeds once."""

    __slots__ = ("call", "lock", "succeeded", "tried")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.lock = threading.Lock()
        """Held while the call runs."""
        self.succeeded = False
        self.tried = False


class Jobs:
    """Calls that threads take from a list, and their caller with them. For one calling thread at a time."""

    def __init__(self, calls: Iterable[Callable[[], None]], tried: Callable[[], None] = lambda: None) -> None:
        """`tried` is called, by any thread, when `finish` has nothing left to wait for."""
        self._jobs = [_Job(call) for call in calls]
        self._tried = tried
        self._threads = 0
        self._cancelled = False

    def start(self, threads: int) -> None:
        """Have up to so many threads begin; fewer where the system has none left: `finish` does what they leave."""
        for _ in range(min(threads, len(self._jobs))):
            try:
                _thread.start_new_thread(self._help, ())
            except RuntimeError:
                break
            self._threads += 1
        if not self._threads:
            self._tried()

    def _help(self) -> None:
        for job in self._jobs:
            if not job.tried and job.lock.acquire(blocking=False):
                try:
                    with suppress(Exception):  # `finish` tries again, and raises
                        if not self._cancelled:
                            self._run(job)
                finally:
                    job.tried = True
                    job.lock.release()
        if self.are_tried:
            self._tried()

    def _run(self, job: _Job) -> None:
        """REQUIRES: the job's lock."""
        if not job.succeeded:
            job.call()
            job.succeeded = True

    @property
    def are_tried(self) -> bool:
        """True where `finish` has nothing to wait for."""
        return not self._threads or all(job.tried for job in self._jobs)

    def finish(self) -> None:
        """Do what no thread has done, wait for what they are at, and raise the first error of this thread.

        It may be called again: what succeeded is not done twice.
        """
        failed: Exception | None = None
        for job in self._jobs:
            with job.lock:
                try:
                    self._run(job)
                except Exception as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def cancel(self) -> None:
        """Have threads begin no job any more, and wait for those that they are at."""
        self._cancelled = True
        interrupt: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                for job in self._jobs:
                    with job.lock:
                        pass
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
