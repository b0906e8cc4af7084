"""The thread that serves all connections of an open store, what other threads have it do, and those of a pool.

It waits for sockets alone. What may wait for a disk is done by a few threads, begun as they are needed; but what its
connections send is written by the thread that has read it, as one group with all that has come: so a message waits for
no other thread to wake. Where that takes long another takes its place.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_THREADS = 16
_ROUNDS = 8
"""So often sockets are looked at before what has come is written, so that many messages are one group."""
_ALONE = 8
"""They are not once so many turns have had one message each, of the same socket: its client waits for the answer."""
_AWAKE_S = 0.000_15
"""So long it looks for the next message of that client before it sleeps. That takes no more of a processor than to wake
with cold caches, and a durable send a tenth to a sixth less time."""
_LONG_S = 0.003
"""Another thread serves the connections once the one that did has written for so long."""
_QUIET_S = 0.1
"""It waits until it is called where nothing was written for so long."""
_SOON_S = 0.02
"""A time so near is waited for exactly: epoll rounds to milliseconds, upwards."""
_LONGEST_S = 3_600.0
"""It looks again after so long: epoll raises for a wait of more than 24 days."""


class WireLoop:
    """The thread, from `start` to `end`: one of two, the other stands by. Others may call `later`, `submit`, `end`."""

    def __init__(
        self, failed: Callable[[Exception], object], take_up: Callable[[], int], write: Callable[[], None]
    ) -> None:
        """failed: hears in the thread of an error of what it did, which goes on. Raises OSError.

        take_up: asked after each turn how many messages there are to write, by `write`.
        """
        self.selector = selectors.DefaultSelector()
        """Sockets, each with a function that is called with the events that it is ready for. Of the thread."""
        self._failed = failed
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._ended = False
        self._wakes, self._waker = socket.socketpair()
        for end in (self._wakes, self._waker):
            end.setblocking(False)
        self.selector.register(self._wakes, selectors.EVENT_READ, self._drain)
        self.pool = _Pool(_THREADS)
        self._take_up, self._write = take_up, write
        self._served, self._in_row = -1, 0
        """The socket that was served last, and how often in a row it had one message at most. Of the thread."""
        self._turning: int | None = None
        """The thread that takes a turn; None: it writes."""
        self._change = threading.Lock()
        """Held to change the fields below."""
        self._serving: int | None = None
        """The thread that takes turns, also while it writes."""
        self._writing_since: float | None = None
        self._writes = 0
        self._rests = False
        """True while the other thread waits to be called."""
        self._called = threading.Lock()
        self._called.acquire()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Raises RuntimeError: no thread can be started."""
        try:
            for at in range(2):
                thread = threading.Thread(target=self._run, name=f"duelog-control-{at}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            if not self._threads:
                raise

    @property
    def is_here(self) -> bool:
        """True in the thread."""
        return threading.get_ident() == self._turning

    def later(self, call: Callable[[], object]) -> None:
        """Have something done by the thread, soon."""
        self._calls.append(call)
        self._wake()

    def at(self, time_s: float, call: Callable[[], object]) -> None:
        """Have something done by the thread at a time of the monotonic clock. Of the thread."""
        heapq.heappush(self._timers, (time_s, next(self._numbers), call))

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(OSError):  # full: it is woken anyway; closed
                self._waker.send(b"x")

    def _drain(self, _: int) -> None:
        with suppress(BlockingIOError):
            while self._wakes.recv(1 << 12):
                pass

    def _run(self) -> None:
        here = threading.get_ident()
        while not self._ended:
            if self._serving != here:
                self._stand_by(here)
                continue
            self._turning = here
            try:
                self._turn()
                for _ in range(_ROUNDS if self._in_row < _ALONE else 0):  # what has come meanwhile is written with it
                    if self._ended or not self._serve(0):  # a client taken after the end would never be told of it
                        break
            except Exception as error:
                self._failed(error)
            if (waiting := self._take_up()) > 0:
                self._in_row = 0 if waiting > 1 else self._in_row
                self._turning = None
                with self._change:
                    self._writing_since = time.monotonic()
                    self._writes += 1
                    if self._rests:
                        self._call()
                self._write()
                with self._change:
                    if self._serving == here:
                        self._writing_since = None

    def _stand_by(self, here: int) -> None:
        """Wait until the other thread has written for long, and take its place."""
        seen, since = -1, 0.0
        while not self._ended:
            with self._change:
                now = time.monotonic()
                writing_since = now if self._writing_since is None else self._writing_since
                if self._serving is None or now - writing_since >= _LONG_S:
                    self._serving, self._writing_since = here, None
                    return
                if self._writes != seen:
                    seen, since = self._writes, now
                self._rests = self._writing_since is None and now - since >= _QUIET_S
            self._called.acquire(timeout=-1 if self._rests else _LONG_S)

    def _call(self) -> None:
        self._rests = False
        with suppress(RuntimeError):  # it is called already
            self._called.release()

    def _turn(self) -> None:
        if self._calls:  # left by one that has raised
            self._serve(0)
        elif self._in_row < _ALONE or not self._serve_awake():
            timeout = min(max(self._timers[0][0] - time.monotonic(), 0), _LONGEST_S) if self._timers else None
            if timeout is not None and 0 < timeout < _SOON_S:
                timeout = self._wait_exactly(timeout)
            self._serve(timeout)
        self._woken = False
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _serve(self, timeout: float | None) -> bool:
        """Serve the sockets that are ready; False: none are."""
        ready = self.selector.select(timeout)
        for key, events in ready:
            if key.fd != self._served:
                self._served, self._in_row = key.fd, 0
            key.data(events)
        self._in_row += len(ready)
        return bool(ready)

    def _serve_awake(self) -> bool:
        """Serve the sockets that are ready soon; False: none is, and the client sends more seldom."""
        until = time.monotonic() + _AWAKE_S
        while not self._serve(0):
            if time.monotonic() >= until:
                self._in_row = 0
                return False
        return True

    def _wait_exactly(self, seconds: float) -> float:
        """Wait, by a call that knows less than milliseconds, until a socket is ready; the time that is left to wait."""
        with suppress(ValueError):  # its number is too high for that call
            select.select([self.selector], (), (), seconds)
            return 0
        return seconds

    def end(self, last: Callable[[], object]) -> None:
        """End the threads of the pool, once they have done what there is; then the thread, after `last`."""
        self.pool.stop()

        def stop() -> None:
            self._ended = True
            self._call()
            last()

        self.later(stop)
        for thread in self._threads:
            thread.join()
        self.close()

    def close(self) -> None:
        """Close what is open. REQUIRES: the thread was not started, has ended, or is the parent's after fork."""
        self._ended = True
        self.selector.close()
        self._wakes.close()
        self._waker.close()


class _Pool:
    """Threads that do what may wait, begun as they are needed."""

    def __init__(self, most: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._most = most
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._stopped = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have it done, by the caller once the threads have been ended; `work` raises nothing."""
        with self._lock:
            stopped = self._stopped
            self._free -= 1
            if not stopped and self._free < 0 and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name="duelog-request", daemon=True)
                with suppress(RuntimeError):  # none can be started: those that there are do it
                    thread.start()
                    self._threads.append(thread)
                    self._free += 1
            if not stopped:
                self._work.put(work)
        if stopped:
            work()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._free += 1

    def stop(self) -> None:
        """End the threads, once they have done what there is."""
        with self._lock:
            self._stopped = True
            for _ in self._threads:
                self._work.put(None)
        for thread in self._threads:
            thread.join()
