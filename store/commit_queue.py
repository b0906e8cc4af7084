"""Who waits for a commit, and who leads it: the first in the queue serves everybody behind it, then the next leads.

There is no thread of its own. An interrupt (KeyboardInterrupt) of one caller concerns nobody else: a waiting one
leaves the queue, an interrupted leader puts the others back, and somebody else leads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Request:
    """A unit of work on its way: once `done`, it has a value or an error."""

    __slots__ = ("done", "error", "gate", "leads", "value", "work")

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.leads = False
        self.gate: threading.Lock | None = None
        """Held until the request is done or leads; None: it leads from the beginning, and nobody waits."""

    def open(self) -> None:
        """Let the thread that waits go on."""
        if self.gate is not None:
            self.gate.release()


class CommitQueue:
    """Brings the work of many threads together, and has it served by one of them at a time."""

    def __init__(
        self,
        admit: Callable[[], None],
        serve: Callable[[list[Request]], None],
        broke_off: Callable[[BaseException, bool], None],
    ) -> None:
        """`admit` raises if nothing may be queued any more; it is called under the queue's lock.

        `serve` gives every request its value or its error. `broke_off` is told what it raised instead, and whether
        the leader's own request was done.
        """
        self._admit = admit
        self._serve = serve
        self._broke_off = broke_off
        self._mutex = threading.Lock()
        self._waiting: list[Request] = []
        self._led = False

    def __len__(self) -> int:
        """Requests that wait to be served."""
        return len(self._waiting)

    def run(self, work: Callable[[Any], Any]) -> Any:
        """Have `work` served, by this thread or by another, and return its value or raise its error."""
        request = Request(work)
        try:
            with self._mutex:
                self._admit()
                self._waiting.append(request)
                if self._led:
                    request.gate = threading.Lock()
                    request.gate.acquire()
                else:
                    self._led = request.leads = True
            if request.gate is not None:
                request.gate.acquire()
            if not request.done:
                self._lead(request)
        except BaseException:
            self._leave(request)
            raise
        if request.error is not None:
            raise request.error
        return request.value

    def _leave(self, request: Request) -> None:
        """Take a request out whose caller was interrupted, without taking the others along."""
        with self._mutex:
            if request in self._waiting:
                self._waiting.remove(request)
            request.done = True
            if request.leads:
                self._hand_over(request)

    def _hand_over(self, leader: Request) -> None:
        """Give leadership to the next in the queue. REQUIRES: the mutex."""
        leader.leads = False
        if self._waiting:
            self._waiting[0].leads = True
            self._waiting[0].open()
        else:
            self._led = False

    def _lead(self, own: Request) -> None:
        with self._mutex:
            batch, self._waiting = self._waiting, []
        try:
            self._serve(batch)
        except BaseException as error:
            self._broke_off(error, own.done)
            # An interrupt of this thread is nobody else's business: the others are served without it.
            with self._mutex:
                again = [request for request in batch if request is not own and not request.done]
                self._waiting[:0] = again
            batch = [request for request in batch if request not in again]
            for request in again:
                request.error = None
            raise
        finally:
            for request in batch:
                request.done = True
            with self._mutex:
                self._hand_over(own)
            for request in batch:
                if request is not own:
                    request.open()
