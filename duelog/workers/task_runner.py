"""Runs the function of one task for each message that its subscription gets, so many at a time.

One thread receives, no more than there are free slots: a message that is not run at once stays where it is. Functions
run in as many threads as there are slots; coroutines in the event loop of the worker, and what becomes of their
messages is committed in other threads. Waiting for messages is the subscription's, by the store's clock.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from duelog.store.clock import Monitor
from duelog.store.errors import ClockJumped, ClosedError, DuelogError, ResourceShortage, StoreFull
from duelog.store.message import ReceivedMessage

from ..subscription import Subscription
from .task import Task, reason_of

if TYPE_CHECKING:
    from .coroutine_loop import CoroutineLoop

_log = logging.getLogger("duelog.worker")

_WHILE_IT_RUNS = timedelta(days=36_525)
"""A process that dies gives its messages back by that, so that their timeout is for consumers elsewhere."""

_PAUSE_MS = 1_000
"""How long receiving pauses after an error that may pass."""


class TaskRunner:
    """Runs a task from `start` to `close`. `monitor` is notified whenever it has become less busy."""

    def __init__(
        self,
        task: Task,
        subscription: Subscription,
        ack_timeout_ms: Callable[[], int],
        monitor: Monitor,
        loop: CoroutineLoop | None,
    ) -> None:
        """ack_timeout_ms: the acknowledgement timeout in force, 0: none. loop: of a coroutine's task."""
        self.task = task
        self.error: BaseException | None = None
        """What ended receiving, where nothing stopped it."""
        self._subscription = subscription
        self._ack_timeout_ms = ack_timeout_ms
        self._monitor = monitor
        self._loop = loop
        self._slots = threading.Semaphore(task.concurrency)
        self._numbers = itertools.count()
        self._running: dict[int, ReceivedMessage] = {}
        self.receiving = False
        """Whether it may be handed messages."""
        self._stopped = False
        self._closed = False
        self._inbox: queue.SimpleQueue[tuple[int, ReceivedMessage] | None] = queue.SimpleQueue()

    # -- for the worker ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive, in threads that do not keep the process from ending."""
        threads = 0 if self._loop is not None else self.task.concurrency
        self.receiving = True
        for target, count in ((self._receive, 1), (self._run_functions, threads)):
            for _ in range(count):
                threading.Thread(target=target, name=f"duelog-worker-{self.task.name}", daemon=True).start()

    def stop(self) -> None:
        """Receive nothing more; does not wait."""
        with self._monitor.lock:
            self._stopped = True
            self._monitor.notify_all()
        self._slots.release()
        self._subscription.wake()

    @property
    def busy(self) -> bool:
        """Whether a message is running, or may be received. REQUIRES: the monitor."""
        return self.receiving or bool(self._running)

    def close(self) -> int:
        """Give back what still runs, which does not count as a failed delivery; how many messages."""
        with self._monitor.lock:
            self._closed = True
            left = len(self._running)
        for _ in range(self.task.concurrency):
            self._inbox.put(None)
        self._subscription.close(failed=False)
        return left

    # -- receiving -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while not self._stopped:
                self._slots.acquire()
                free = 1
                while free < self.task.concurrency and self._slots.acquire(blocking=False):
                    free += 1
                batch = self._next(free)
                for _ in range(free - len(batch)):
                    self._slots.release()
                if batch and self._ack_timeout_ms():
                    self._subscription.extend(batch, _WHILE_IT_RUNS)
                for message in batch:
                    self._begin(message)
        except BaseException as error:
            if not (isinstance(error, ClosedError) and self._subscription.closed):
                _log.error("task %s stops: %s", self.task.name, error)
                self.error = error
        finally:
            with self._monitor.lock:
                self.receiving = False
                self._monitor.notify_all()

    def _next(self, free: int) -> list[ReceivedMessage]:
        """Messages to be run, at most `free`; none when it is stopped, or after a pause."""
        try:
            return self._subscription.receive_unless(lambda: self._stopped, free)
        except (StoreFull, ClockJumped, ResourceShortage) as error:
            _log.warning("task %s receives nothing: %s", self.task.name, error)
            clock = self._subscription.clock
            until_ms = clock.now_ms() + _PAUSE_MS
            with self._monitor.lock:
                while not self._stopped and clock.now_ms() < until_ms:
                    clock.wait(self._monitor, until_ms)
            return []

    def _begin(self, message: ReceivedMessage) -> None:
        number = next(self._numbers)
        with self._monitor.lock:
            self._running[number] = message
        if self.task.is_spent(message.redelivery_count + message.retries):
            self._end(number, message, None, spent=True)
        elif self._loop is None:
            self._inbox.put((number, message))
        else:
            self._loop.start(self._run_coroutine(self._loop, number, message))

    # -- running -------------------------------------------------------------------------------------

    def _run_functions(self) -> None:
        while (work := self._inbox.get()) is not None:
            if self._closed:  # it was given back
                continue
            error: BaseException | None = None
            try:
                self.task.function(work[1])
            except BaseException as raised:
                error = raised
            self._end(*work, error)

    async def _run_coroutine(self, loop: CoroutineLoop, number: int, message: ReceivedMessage) -> None:
        error: BaseException | None = None
        try:
            await self.task.function(message)
        except BaseException as raised:
            error = raised
        if self._closed:  # its message is given back
            return
        loop.in_thread(self._end, number, message, error)

    def _end(self, number: int, message: ReceivedMessage, error: BaseException | None, spent: bool = False) -> None:
        """A message has come to its end: acknowledge it, or see to its retry; then its slot is free.

        Raises nothing: it ends no thread, whatever goes wrong.
        """
        try:
            if spent:
                self._bury(message, None)
            elif error is None:
                self._subscription.ack(message)
            else:
                self._failed(message, error)
        except ClosedError:
            _log.warning("task %s: %s was given back before it ended", self.task.name, message.message_id)
        except BaseException as refused:
            unforeseen = None if isinstance(refused, DuelogError) else refused
            text = "task %s: %s is delivered again: %s"
            _log.error(text, self.task.name, message.message_id, reason_of(refused), exc_info=unforeseen)
            with suppress(BaseException):  # what was not given back is when the worker stops
                self._subscription.nack(message, delay=timedelta(milliseconds=_PAUSE_MS))
        finally:
            with self._monitor.lock:
                del self._running[number]
                self._monitor.notify_all()
            self._slots.release()

    def _failed(self, message: ReceivedMessage, error: BaseException) -> None:
        failed = message.redelivery_count + message.retries + 1
        try:
            wait_ms = self.task.backoff_ms(failed, error)
        except BaseException as raised:
            _log.error("task %s: its backoff raised; a minute is waited", self.task.name, exc_info=raised)
            wait_ms = 60_000
        reason = reason_of(error)
        if wait_ms is None or self.task.is_spent(failed):
            self._bury(message, reason)
            return
        _log.warning(
            "task %s: %s failed %d times, again in %g s: %s",
            self.task.name,
            message.message_id,
            failed,
            wait_ms / 1000,
            reason,
            exc_info=error,
        )
        try:
            self._subscription.retry_later(message, timedelta(milliseconds=wait_ms), reason=reason)
        except ClosedError:
            raise
        except DuelogError as refused:  # a delay over the policies' maximum, a full disk: it waits in memory
            _log.warning("task %s: the retry waits in memory alone: %s", self.task.name, refused)
            self._subscription.nack(message, delay=timedelta(milliseconds=wait_ms))

    def _bury(self, message: ReceivedMessage, reason: str | None) -> None:
        shown = reason or message.failure or "too many deliveries failed"
        _log.error("task %s: %s becomes a dead letter: %s", self.task.name, message.message_id, shown)
        try:
            self._subscription.dead_letter(message, reason)
        except ClosedError:
            raise
        except DuelogError as refused:
            _log.error("task %s: no dead letter of %s: %s", self.task.name, message.message_id, refused)
            self._subscription.nack(message, delay=timedelta(milliseconds=_PAUSE_MS))
