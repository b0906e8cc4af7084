"""A task, and its runner, which runs the function of it for each message that its subscription gets, so many at a time.

One thread receives, no more than there are free slots: a message that is not run at once stays where it is. Functions
run in as many threads as there are slots; coroutines in the event loop of the worker, and what becomes of their
messages is committed in other threads. Waiting for messages is the subscription's, by the store's clock.

One more thread looks at attempts by the store's clock. Of a task with a timeout it has a coroutine's end with an
exception, and gives a function's up, as its thread cannot be stopped. Of any other it extends what is held, so that a
message is not delivered again while its function runs.

What a task returns to be sent goes into the transaction that acknowledges its message.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias

from duelog.store.clock import Monitor
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import (
    ClockJumped,
    ClosedError,
    DuelogError,
    HandlersHang,
    InvalidArgument,
    NotLeader,
    ResourceShortage,
    StoreFull,
)
from duelog.store.listener import call_supplied
from duelog.store.message import ReceivedMessage
from duelog.store.names import TopicName, validate_subscription_name
from duelog.store.position import MessageId

from ..connected.connected_store import ConnectedSubscription
from ..subscription import Subscription
from ..topics.task_activity import (
    MOST_ATTEMPTS,
    MOST_FAILURES,
    MOST_TEXT,
    MOST_TRACEBACK,
    Attempt,
    Failure,
    TaskActivity,
)
from .task_message import TaskMessage, follow

if TYPE_CHECKING:
    from .coroutine_loop import CoroutineLoop, Limit

P = ParamSpec("P")

_log = logging.getLogger("duelog.worker")

Backoff: TypeAlias = Duration | Callable[[int, BaseException], Duration | None]
"""How long to wait before a retry: a duration, doubled with each retry, or what makes one of the number of failed
deliveries and the exception; None from it: no retry."""

LONGEST_BACKOFF_MS = 3_600_000
"""The most that a backoff is doubled to, unless it was longer from the beginning: an hour."""

_HOST = socket.gethostname()
_ROOM = os.path.join(os.path.dirname(__file__), "")


class Hooks(NamedTuple):
    """Functions that hear of a task's attempts: see `Worker.task`."""

    on_start: Callable[[TaskMessage], object] | None = None
    on_success: Callable[[TaskMessage], object] | None = None
    on_retry: Callable[[TaskMessage, BaseException], object] | None = None
    on_dead_letter: Callable[[TaskMessage, BaseException | None], object] | None = None


NO_HOOKS = Hooks()


@dataclass(frozen=True, slots=True)
class Task:
    """See `Worker.task`. Raises InvalidArgument for what is none."""

    function: Callable[[TaskMessage], Any]
    topic: str
    subscription: str
    concurrency: int
    retries: int | None
    backoff: Backoff
    timeout: Duration | None = None
    hooks: Hooks = NO_HOOKS

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument("function", self.function, "expected a function of one message")
        TopicName.parse(self.topic)
        validate_subscription_name(self.subscription)
        for field, lowest, value in (("concurrency", 1, self.concurrency), ("retries", 0, self.retries)):
            if value is None and field == "retries":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidArgument(field, value, f"expected an int of at least {lowest}")
        if not callable(self.backoff):
            duration_ms("backoff", self.backoff)
        for field, hook in self.hooks._asdict().items():
            if hook is not None and not callable(hook):
                raise InvalidArgument(field, hook, "expected a function")
        if self.timeout is not None and duration_ms("timeout", self.timeout) == 0:
            raise InvalidArgument("timeout", self.timeout, "expected more than no time, or None")

    @property
    def timeout_ms(self) -> int | None:
        return None if self.timeout is None else duration_ms("timeout", self.timeout)

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    @property
    def is_coroutine(self) -> bool:
        function = self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def __str__(self) -> str:
        retries = "retries for ever" if self.retries is None else f"retries {self.retries}"
        parts = [f"concurrency {self.concurrency}", retries]
        if self.timeout_ms is not None:
            parts.append(f"timeout {self.timeout_ms / 1000:g} s")
        return f"{self.name} for {self.topic} ({', '.join(parts)})"

    def is_spent(self, failed: int) -> bool:
        return self.retries is not None and failed > self.retries

    def backoff_ms(self, failed: int, error: BaseException) -> int | None:
        """How long to wait after so many failed deliveries; None: for ever. Raises what the function of a task does."""
        if callable(self.backoff):
            wait = self.backoff(failed, error)
            return None if wait is None else duration_ms("backoff", wait)
        first_ms = duration_ms("backoff", self.backoff)
        return max(first_ms, min(first_ms << min(failed - 1, 40), LONGEST_BACKOFF_MS))


def attempt_id(message: ReceivedMessage) -> MessageId:
    """The id that is one through all attempts of a message: a retry has a new one."""
    return message.message_id if message.first_try is None else message.first_try[0]


def attempt_number(message: ReceivedMessage) -> int:
    """Which attempt at a message this one is, 1 the first."""
    return message.redelivery_count + message.retries + 1


def exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """An exception as logging takes it, its traceback beginning with the function of the task."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_ROOM):
        frames = frames.tb_next
    return type(error), error, frames


def plural(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def reason_of(error: BaseException) -> str:
    """The type and the text of an exception, as dead letters keep it."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = str(error)
    except BaseException:
        text = "its text cannot be had"
    return f"{name}: {text}" if text else name


_PAUSE_MS = 1_000
"""How long receiving pauses after an error that may pass."""

_LOOK_MS = 1_000
"""How often it is looked whether what runs is to be extended, where there is no acknowledgement timeout by now."""


@dataclass(eq=False, slots=True)
class _Attempt:
    """A message that is run. Guarded by the monitor."""

    number: int
    message: TaskMessage
    began_ms: int
    ended: bool = False
    """True once its function has returned."""
    overdue: bool = False
    """True if its time ran out before that; a function's attempt is given up then."""
    stuck: bool = False
    """True if it was given up and no other thread has replaced its own."""
    thread: int | None = None
    """Which runs it, where it is a function."""
    limit: Limit | None = None


class TaskRunner:
    """Runs a task from `start` to `close`. `monitor` is notified whenever it has become less busy."""

    def __init__(
        self,
        task: Task,
        subscription: Subscription,
        ack_timeout_ms: Callable[[], int],
        monitor: Monitor,
        loop: CoroutineLoop | None,
        worker: str,
    ) -> None:
        """ack_timeout_ms: the acknowledgement timeout in force, 0: none. loop: of a coroutine's task.

        worker: its name.
        """
        self.task = task
        self._worker = worker
        self._began_ms = 0
        self.error: BaseException | None = None
        """The error that ended receiving; None: it runs, or was stopped."""
        self._subscription = subscription
        self._connected = subscription if isinstance(subscription, ConnectedSubscription) else None
        self._ack_timeout_ms = ack_timeout_ms
        self._monitor = monitor
        self._loop = loop
        self._slots = threading.Semaphore(task.concurrency)
        self._numbers = itertools.count()
        self._running: dict[int, _Attempt] = {}
        self._hanging: dict[int, _Attempt] = {}
        """Attempts that were given up and whose functions have not ended."""
        self._failures: deque[tuple[Failure, traceback.TracebackException]] = deque(maxlen=MOST_FAILURES)
        """The last ones; without the frames, which would keep what their variables hold."""
        self.receiving = False
        """True while it may be handed messages."""
        self.outcomes = Counter[str]()
        """How many attempts ended how: "acknowledged", "failed"."""
        self._stopped = False
        self._closed = False
        self._idle = False
        """True while the thread that extends waits for something to run."""
        self._inbox: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()

    # -- for the worker ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive, in threads that do not keep the process from ending."""
        self.receiving = True
        self._began_ms = self._subscription.clock.now_ms()
        self._start_thread(self._receive)
        for _ in range(0 if self._loop is not None else self.task.concurrency):
            self._start_thread(self._run_functions)
        if self.task.timeout_ms is None:
            self._start_thread(self._extend)
        else:
            self._start_thread(self._watch, self.task.timeout_ms)
        self._subscription.report_task(self.activity)

    def _start_thread(self, target: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        name = f"duelog-worker-{self.task.name}"
        threading.Thread(target=target, name=name, args=args, kwargs=kwargs, daemon=True).start()

    def stop(self) -> None:
        """Receive nothing more; does not wait."""
        with self._monitor.lock:
            self._stopped = True
            self._monitor.notify_all()
        self._slots.release()
        self._subscription.wake()

    @property
    def busy(self) -> bool:
        """True if a message is running, or may be received. REQUIRES: the monitor."""
        return self.receiving or bool(self._running)

    def activity(self) -> TaskActivity:
        """Tell what runs, the longest running first, one that was given up too, and what failed last."""
        with self._monitor.lock:
            attempts = {**self._running, **self._hanging}
            failures, outcomes = list(self._failures), self.outcomes.copy()
        running = sorted((each for each in attempts.values() if not each.ended), key=lambda each: each.began_ms)
        return TaskActivity(
            self._worker[:MOST_TEXT],
            self.task.name[:MOST_TEXT],
            _HOST,
            os.getpid(),
            self._began_ms,
            self.task.concurrency,
            len(running),
            outcomes["acknowledged"],
            outcomes["failed"],
            tuple(
                Attempt(each.message.message_id, attempt_number(each.message), each.began_ms, each.overdue)
                for each in running[:MOST_ATTEMPTS]
            ),
            tuple(
                replace(failure, traceback="".join(trace.format())[-MOST_TRACEBACK:])
                for failure, trace in reversed(failures)
            ),
        )

    def close(self) -> int:
        """Give back what still runs, which does not count as a failed delivery; how many messages."""
        with self._monitor.lock:
            self._closed = True
            left = len(self._running)
            self._monitor.notify_all()
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
                if batch and self.task.timeout_ms is not None and (timeout_ms := self._ack_timeout_ms()):
                    hold = timedelta(milliseconds=self.task.timeout_ms + timeout_ms)
                    self._subscription.extend(batch, hold)
                for message in batch:
                    self._begin(TaskMessage.of(message, self._subscription))
        except BaseException as error:
            self._stop_for(error)
        finally:
            with self._monitor.lock:
                self.receiving = False
                self._monitor.notify_all()

    def _stop_for(self, error: BaseException) -> None:
        """Receive nothing more because of an error, unless that says that the subscription was closed."""
        if not (isinstance(error, ClosedError) and self._subscription.closed):
            _log.error("task %s stops: %s", self.task.name, error)
            self.error = error
        self.stop()

    def _next(self, free: int) -> list[ReceivedMessage]:
        """Messages to be run, at most `free`; none when it is stopped, or after a pause."""
        try:
            return self._subscription.receive_unless(lambda: self._stopped, free)
        except (StoreFull, ClockJumped, NotLeader, ResourceShortage) as error:
            _log.warning("task %s receives nothing: %s", self.task.name, error)
            clock = self._subscription.clock
            until_ms = clock.now_ms() + _PAUSE_MS
            with self._monitor.lock:
                while not self._stopped and clock.now_ms() < until_ms:
                    clock.wait(self._monitor, until_ms)
            return []

    def _begin(self, message: TaskMessage) -> None:
        attempt = _Attempt(next(self._numbers), message, self._subscription.clock.now_ms())
        if self._loop is not None and self.task.timeout_ms is not None:
            attempt.limit = self._loop.limit()
        spent = self.task.is_spent(message.redelivery_count + message.retries)
        with self._monitor.lock:
            attempt.ended = spent
            self._running[attempt.number] = attempt
            if self._idle or self.task.timeout_ms is not None:
                self._monitor.notify_all()
        if spent:
            self._end(attempt, None, spent=True)
        elif self._loop is None:
            self._inbox.put(attempt)
        else:
            self._loop.start(self._run_coroutine(self._loop, attempt))

    # -- running -------------------------------------------------------------------------------------

    def _run_functions(self) -> None:
        while (attempt := self._inbox.get()) is not None:
            if self._closed:  # it was given back
                continue
            with self._monitor.lock:
                attempt.thread = threading.get_ident()
                is_late = attempt.overdue
            error: BaseException | None = None
            result = None
            try:
                if not is_late:
                    self._tell(self.task.hooks.on_start, attempt.message)
                    result = self.task.function(attempt.message)
            except BaseException as raised:
                error = raised
            with self._monitor.lock:
                attempt.ended = True
                attempt.thread = None
            if not attempt.overdue:
                self._end(attempt, error, result)
            elif not self._ended_late(attempt, error):
                return

    async def _run_coroutine(self, loop: CoroutineLoop, attempt: _Attempt) -> None:
        error: BaseException | None = None
        result = None
        try:
            self._tell(self.task.hooks.on_start, attempt.message)
            if attempt.limit is None:
                result = await self.task.function(attempt.message)
            else:
                result = await attempt.limit.hold(self.task.function(attempt.message))
        except BaseException as raised:
            error = raised
        with self._monitor.lock:
            attempt.ended = True
        if self._closed:  # its message is given back
            return
        if attempt.overdue and type(error) is TimeoutError and not error.args:
            error = TimeoutError(self._took_longer()).with_traceback((error.__cause__ or error).__traceback__)
        loop.in_thread(self._end, attempt, error, result)

    @staticmethod
    def _tell(hook: Callable[P, object] | None, *args: P.args, **kwargs: P.kwargs) -> None:
        if hook is not None:
            call_supplied(hook, *args, **kwargs)

    # -- what takes long -----------------------------------------------------------------------------

    def _extend(self) -> None:
        """Hold what runs for longer than the acknowledgement timeout, until the task is closed."""
        clock = self._subscription.clock
        while True:
            lease_ms = 0
            try:
                lease_ms = self._ack_timeout_ms()
                with self._monitor.lock:
                    running = [each.message for each in self._running.values() if not each.ended]
                if lease_ms and running:
                    self._subscription.extend(running)
            except DuelogError as error:
                if self._closed or isinstance(error, ClosedError):
                    return
                _log.warning("task %s: what runs is not extended: %s", self.task.name, error)
            look_ms = clock.now_ms() + (max(lease_ms // 3, 1) if lease_ms else _LOOK_MS)
            with self._monitor.lock:
                while not self._closed and (not self._running or clock.now_ms() < look_ms):
                    self._idle = not self._running
                    clock.wait(self._monitor, None if self._idle else look_ms)
                self._idle = False
                if self._closed:
                    return

    # -- what takes too long -------------------------------------------------------------------------

    def _watch(self, timeout_ms: int) -> None:
        """Look at what runs until it is closed; `timeout_ms`: how long that may take."""
        clock = self._subscription.clock
        try:
            while True:
                with self._monitor.lock:
                    running = [each for each in self._running.values() if not (each.ended or each.overdue)]
                    overdue = [each for each in running if each.began_ms + timeout_ms <= clock.now_ms()]
                    for attempt in overdue:
                        attempt.overdue = True
                        if self._loop is None:
                            attempt.stuck = len(self._hanging) >= self.task.concurrency
                            self._hanging[attempt.number] = attempt
                    if self._closed:
                        return
                    if not overdue:
                        clock.wait(self._monitor, running[0].began_ms + timeout_ms if running else None)
                for attempt in overdue:
                    self._cut_short(attempt, timeout_ms)
        except BaseException as error:
            if not self._closed:
                self._stop_for(error)

    def _cut_short(self, attempt: _Attempt, timeout_ms: int) -> None:
        """The time of an attempt is over. Raises HandlersHang where no thread is left."""
        if self._loop is not None:
            if attempt.limit is not None:
                self._loop.end(attempt.limit)
            return
        self._start_thread(self._give_up, attempt, self._stack_of(attempt))
        with self._monitor.lock:
            stuck = sum(each.stuck for each in self._hanging.values())
            hanging = len(self._hanging)
        if stuck == self.task.concurrency:
            raise HandlersHang(self.task.name, hanging, timeout_ms / 1000)

    def _give_up(self, attempt: _Attempt, stack: str) -> None:
        """End an attempt whose function hangs, and run others in the place of its thread, if there may be one more."""
        lost = ", and no other takes its place: too many hang" if attempt.stuck else ""
        text = "task %s: %s is given up: %s; its thread hangs%s\n%s"
        _log.error(text, self.task.name, attempt_id(attempt.message), self._took_longer(), lost, stack)
        self._end(attempt, TimeoutError(self._took_longer()))
        if not attempt.stuck:
            self._run_functions()

    def _ended_late(self, attempt: _Attempt, error: BaseException | None) -> bool:
        """A function has come to its end that was given up: nothing comes of it. Whether its thread is needed again."""
        with self._monitor.lock:
            del self._hanging[attempt.number]
        took_s = (self._subscription.clock.now_ms() - attempt.began_ms) / 1000
        outcome = "it returned" if error is None else reason_of(error)
        text = "task %s: %s ended after %g s, when it had been given up, which is ignored: %s"
        _log.warning(text, self.task.name, attempt_id(attempt.message), took_s, outcome)
        if attempt.stuck:
            self._slots.release()
        return attempt.stuck

    def _took_longer(self) -> str:
        return f"it took longer than {(self.task.timeout_ms or 0) / 1000:g} s"

    def _stack_of(self, attempt: _Attempt) -> str:
        frame = None if attempt.thread is None else sys._current_frames().get(attempt.thread)
        frames = [] if frame is None else traceback.extract_stack(frame)
        own = [at for at, each in enumerate(frames) if each.filename == __file__]
        return "".join(traceback.format_list(frames[own[-1] + 1 :])).rstrip() if own else "where is not known"

    # -- what becomes of a message -------------------------------------------------------------------

    def _end(
        self, attempt: _Attempt, error: BaseException | None, result: object = None, *, spent: bool = False
    ) -> None:
        """A message has come to its end: acknowledge it, or see to its retry; then its slot is free.

        Raises nothing: it ends no thread, whatever goes wrong.
        """
        message = attempt.message
        try:
            followed = False
            if error is None and result is not None:
                try:
                    followed = follow(message, result)
                except ClosedError:
                    raise
                except Exception as refused:
                    error = refused
            if spent:
                self._bury(message, None)
            elif error is None:
                if followed:
                    pass
                elif self._connected is None:
                    self._subscription.ack(message)
                else:  # nobody looks at the count, for which a thread would wait
                    self._connected.ack_soon([message.position])
            else:
                self._failed(message, error)
            outcome = "acknowledged" if error is None and not spent else "failed"
            with self._monitor.lock:
                self.outcomes[outcome] += 1
            if outcome == "acknowledged":
                self._tell(self.task.hooks.on_success, message)
        except ClosedError:
            _log.warning("task %s: %s was given back before it ended", self.task.name, attempt_id(message))
        except BaseException as refused:
            unforeseen = None if isinstance(refused, DuelogError) else refused
            text = "task %s: %s is delivered again: %s"
            _log.error(text, self.task.name, attempt_id(message), reason_of(refused), exc_info=unforeseen)
            with suppress(BaseException):  # what was not given back is when the worker stops
                self._subscription.nack(message, delay=timedelta(milliseconds=_PAUSE_MS))
        finally:
            with self._monitor.lock:
                del self._running[attempt.number]
                if self._stopped:
                    self._monitor.notify_all()
            if not attempt.stuck:
                self._slots.release()

    def _failed(self, message: TaskMessage, error: BaseException) -> None:
        if not self._subscription.holds(message):  # a transaction has acknowledged it, or another has it by now
            text = "task %s: %s failed, and is not held any more: %s"
            _log.warning(text, self.task.name, attempt_id(message), reason_of(error), exc_info=exc_info(error))
            return
        failed = attempt_number(message)
        try:
            wait_ms = self.task.backoff_ms(failed, error)
        except BaseException as raised:
            _log.error("task %s: its backoff raised; a minute is waited", self.task.name, exc_info=exc_info(raised))
            wait_ms = 60_000
        reason = reason_of(error)
        if wait_ms is None or self.task.is_spent(failed):
            self._bury(message, reason, error)
            return
        _log.warning(
            "task %s: %s failed, attempt %d%s, again in %g s: %s",
            self.task.name,
            attempt_id(message),
            failed,
            "" if self.task.retries is None else f" of {self.task.retries + 1}",
            wait_ms / 1000,
            reason,
            exc_info=exc_info(error),
        )
        try:
            self._subscription.retry_later(message, timedelta(milliseconds=wait_ms), reason=reason)
        except ClosedError:
            raise
        except DuelogError as refused:  # a delay over the policies' maximum, a full disk: it waits in memory
            _log.warning("task %s: the retry waits in memory alone: %s", self.task.name, refused)
            self._subscription.nack(message, delay=timedelta(milliseconds=wait_ms))
        self._note(message, error, reason, wait_ms)
        self._tell(self.task.hooks.on_retry, message, error)

    def _bury(self, message: TaskMessage, reason: str | None, error: BaseException | None = None) -> None:
        """Make a dead letter of it; reason: why this attempt failed, None: those before it were too many."""
        shown = reason or message.failure or "too many deliveries failed"
        attempts = plural(message.redelivery_count + message.retries + (reason is not None), "attempt")
        text = "task %s: %s becomes a dead letter after %s: %s"
        told = None if error is None else exc_info(error)
        _log.error(text, self.task.name, attempt_id(message), attempts, shown, exc_info=told)
        try:
            self._subscription.dead_letter(message, reason)
        except ClosedError:
            raise
        except DuelogError as refused:
            _log.error("task %s: no dead letter of %s: %s", self.task.name, attempt_id(message), refused)
            self._subscription.nack(message, delay=timedelta(milliseconds=_PAUSE_MS))
            return
        if error is not None:
            self._note(message, error, shown, None)
        self._tell(self.task.hooks.on_dead_letter, message, error)

    def _note(self, message: TaskMessage, error: BaseException, reason: str, wait_ms: int | None) -> None:
        """Keep a failure for those who ask what the task does."""
        now_ms, number = self._subscription.clock.now_ms(), attempt_number(message)
        again_ms = None if wait_ms is None else now_ms + wait_ms
        failure = Failure(message.message_id, number, now_ms, again_ms, reason[:MOST_TEXT], "")
        kind, raised, frames = exc_info(error)
        trace = traceback.TracebackException(kind, raised, frames, lookup_lines=False, compact=True)
        with self._monitor.lock:
            self._failures.append((failure, trace))
