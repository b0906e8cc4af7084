"""Who waits for a commit, and who leads it: the first in the queue serves everybody behind it, then the next leads.

There is no thread of its own. Those that were served go on one after the other, each woken by the one before, and the
last wakes the next leader: woken all at once they would only wait for the interpreter, each of them twice.

An interrupt (KeyboardInterrupt) of one caller concerns nobody else: a waiting one leaves the queue, or its place among
those that go on, an interrupted leader puts the others back, and somebody else leads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Request:
    """A unit of work on its way: once `done`, it has a value or an error."""

    __slots__ = ("done", "error", "following", "gate", "goes_on", "leads", "left", "value", "work")

    def __init__(self, work: Any) -> None:
        self.work = work
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.leads = False
        self.gate: threading.Lock | None = None
        """Held until the request goes on or leads; None: it leads from the beginning, and nobody waits."""
        self.goes_on = False
        """Served and woken: it has to wake the next."""
        self.left = False
        """Its caller was interrupted, and waits no more."""
        self.following: Request | None = None
        """Who goes on after it."""


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

    def unless_led(self, action: Callable[[], T | None]) -> T | None:
        """Do something of little work while nobody leads, nor can begin to; None, with nothing done: somebody leads."""
        with self._mutex:
            return None if self._led else action()

    def run(self, work: Any) -> Any:
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
                if request.goes_on:
                    with self._mutex:
                        self._pass_on(request)
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
            request.done = request.left = True
            if request.leads or request.goes_on:
                self._pass_on(request)

    def _pass_on(self, request: Request) -> None:
        """Wake who goes on after a request, or the next leader. REQUIRES: the mutex."""
        request.leads = request.goes_on = False
        following = request.following
        while following is not None and following.left:
            following = following.following
        if following is not None:
            following.goes_on = True
        elif self._waiting:
            following = self._waiting[0]
            following.leads = True
        else:
            self._led = False
            return
        assert following.gate is not None
        following.gate.release()

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
            last = own
            for request in batch:
                request.done = True
                if request is not own:
                    last.following = request
                    last = request
            with self._mutex:
                self._pass_on(own)
