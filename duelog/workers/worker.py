"""Worker: functions run for messages, in one process, from a signal to begin to a signal to end."""

import inspect
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, overload

from duelog.store.clock import Clock, Monitor, SystemClock
from duelog.store.config import StoreConfig
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import ClosedError, InvalidArgument
from duelog.store.names import TopicName

from ..connected.connected_store import ConnectedStore, connect
from ..delayed_store import DelayedStore
from ..opening import stored_span_ms
from .task_arguments import Codec, TaskFunction, takes_a_message
from .task_message import TaskMessage
from .task_runner import Backoff, Hooks, Task, TaskRunner, plural

_log = logging.getLogger("duelog.worker")

Handler = TypeVar("Handler", bound=Callable[[TaskMessage], Any])
P = ParamSpec("P")
R = TypeVar("R")


class TaskDecorator(Protocol):
    """Makes a task of a function: of a message, which stays as it is, or of arguments, which can be sent."""

    @overload
    def __call__(self, function: Handler, /) -> Handler: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> TaskFunction[P, R]: ...


class Worker:
    """Runs functions for the messages of topics, each at least once, until it is stopped.

        worker = Worker("data")


        @worker.task("mails", concurrency=8, retries=5, backoff=10)
        def send_mail(message: TaskMessage) -> None: ...


        worker.run()

    A message is acknowledged when its function returns. One whose function raises is run again after the backoff, by a
    retry that survives a restart; after `retries` of them it becomes a dead letter, with the type and the text of the
    last exception as its reason. A crash counts as a failed delivery of what was running, so that a message that kills
    its process becomes a dead letter too. `timeout` bounds an attempt. Where there is none, a message is held for as
    long as its function runs, whatever `Policies.ack_timeout_ms` says.

    Functions run in threads, coroutines in one event loop in a thread. No order is kept, and nothing limits rates or
    prefers topics: use one task a topic, with the concurrency that it is to have. Thread-safe; a context manager that
    starts and stops it; may be started again.
    """

    def __init__(
        self,
        store: DelayedStore | str | os.PathLike[str],
        *,
        name: str = "worker",
        config: StoreConfig | None = None,
        drain: Duration = 30,
        connect: bool = False,
    ) -> None:
        """Without opening anything yet.

        store: an open or connected one, which stays so; or a path, opened with `config` from `start` to `stop`; None:
        as it is. connect: connect to the process that has the store at that path open, in place of opening it.
        name: of the tasks' subscriptions, which the store keeps, where they have none of their own. drain: how long
        `stop` waits for what is running, seconds or a timedelta. Raises InvalidArgument.
        """
        if not isinstance(store, (DelayedStore, str, os.PathLike)):
            raise InvalidArgument("store", store, "expected a DelayedStore or a path")
        if config is not None and isinstance(store, DelayedStore):
            raise InvalidArgument("config", config, "the store is open already")
        self._connects = connect
        self.name = name
        self._drain_ms = duration_ms("drain", drain)
        self._given = store
        self._config = config
        self._tasks: list[Task] = []
        self._store: DelayedStore | None = None
        self._runners: list[TaskRunner] = []
        self._ending = ExitStack()
        self._clock: Clock = SystemClock()
        """That of the store, while it runs."""
        self._began_ms = 0
        self._left = 0
        """Messages that the last `stop` gave back."""
        self._connecting = threading.Lock()
        self._connection: tuple[int, DelayedStore | None] = (0, None)
        """By which a process sends tasks that runs none, and which process that is."""
        self._changing = threading.Lock()
        """Held while it starts or stops."""
        self._monitor = Monitor()
        self._asked = False
        self._hurry = False

    # -- before it runs ------------------------------------------------------------------------------

    def task(
        self,
        topic: str,
        *,
        subscription: str | None = None,
        concurrency: int = 8,
        retries: int | None = 5,
        backoff: Backoff = 1,
        timeout: Duration | None = None,
        codec: Codec | None = None,
        on_start: Callable[[TaskMessage], object] | None = None,
        on_success: Callable[[TaskMessage], object] | None = None,
        on_retry: Callable[[TaskMessage, BaseException], object] | None = None,
        on_dead_letter: Callable[[TaskMessage, BaseException | None], object] | None = None,
    ) -> TaskDecorator:
        """Have the function or coroutine function below run for each message of `topic`, which need not exist.

        It takes the message, in one parameter annotated as such or not at all; or arguments of its own, which JSON and
        its annotations have: then it becomes a `TaskFunction`, whose `send` has a worker call it with them. A method
        of an object is one too. A `FollowUp` that it returns, or a list of them, is sent in the transaction that
        acknowledges its message; a coroutine or generator fails the attempt; whatever else it returns is ignored.

        subscription: None: the worker's name. concurrency: how many messages it runs at a time; it holds no others.
        retries: how often a message is run again before it is a dead letter; None: any number of times. Where
        `max_redeliveries` is in force and less, that counts. backoff: seconds or a timedelta before the first retry,
        doubled with each up to an hour; or a function of the number of failed deliveries and the exception, which gives
        one, or None: no retry.

        timeout: how long one attempt may take by the store's clock, seconds or a timedelta; None: any time. Then it has
        failed, with a TimeoutError. In a coroutine that is raised where it awaits; a thread in which it has something
        run (`asyncio.to_thread`) goes on, and keeps the process from ending. A function's thread cannot be
        stopped: the attempt is given up, whatever comes of it later is ignored, and another thread takes the place of
        the one that hangs. That holds for as many threads as `concurrency` says; each that hangs beyond them is one
        less that runs messages, and when none is left the task ends with HandlersHang. `ack_timeout_ms` counts from the
        end of the timeout.

        codec: writes and reads arguments, such as `msgspec.msgpack`; None: JSON. on_start, on_success, on_retry,
        on_dead_letter: called for an attempt that begins, one whose message is acknowledged, one that failed and is run
        again, and one whose message is a dead letter (the exception is None where deliveries before it were too many).
        They must be quick; what they raise is logged. Raises InvalidArgument.
        """

        of = TopicName.parse(topic)

        def decorate(function: Any, /) -> Any:
            name = self.name if subscription is None else subscription
            made, handler = function, function
            if inspect.isroutine(function) and not takes_a_message(function):
                made = TaskFunction(function, topic, self._sending, codec)
                handler = made.handler()
            hooks = Hooks(on_start, on_success, on_retry, on_dead_letter)
            task = Task(handler, topic, name, concurrency, retries, backoff, timeout, hooks)
            with self._changing:
                if self._store is not None:
                    raise InvalidArgument("task", task.name, f"worker {self.name!r} runs already")
                if any((TopicName.parse(each.topic), each.subscription) == (of, name) for each in self._tasks):
                    raise InvalidArgument("topic", topic, f"another task has its subscription {name!r}")
                self._tasks.append(task)
            return made

        return decorate

    def _sending(self) -> DelayedStore:
        """The store that tasks are sent to: that of the worker, or while it is stopped a connection of this process."""
        if self._store is not None or isinstance(self._given, DelayedStore) or not self._connects:
            return self.store
        with self._connecting:
            pid, connection = self._connection
            if connection is None or connection.closed or pid != os.getpid():
                connection = connect(self._given, name=self.name)
                self._connection = os.getpid(), connection
        return connection

    def connect_to(self, place: str | os.PathLike[str]) -> None:
        """Have `start` connect to the process that has a store open, whatever store the worker was made with."""
        self._given, self._connects = place, True

    # -- running -------------------------------------------------------------------------------------

    @property
    def store(self) -> DelayedStore:
        """The open store, for functions that send. Raises ClosedError while the worker is stopped."""
        store = self._given if isinstance(self._given, DelayedStore) else self._store
        if store is None:
            raise ClosedError(f"worker {self.name!r}")
        return store

    def start(self) -> None:
        """Begin to run tasks in threads, and return. Raises InvalidArgument, and as `DelayedStore.open`."""
        with self._changing, ExitStack() as undo:
            if self._store is not None or not self._tasks:
                reason = "it runs already" if self._tasks else "it has no task"
                raise InvalidArgument("worker", self.name, reason)
            given = self._given
            if isinstance(given, DelayedStore):
                store = given
            elif self._connects:
                store = undo.enter_context(connect(given, name=self.name))
            else:
                span_ms = stored_span_ms(Path(given)) if self._config is None else None
                config = self._config if span_ms is None else StoreConfig(partition_ms=span_ms)
                store = undo.enter_context(DelayedStore.open(given, config))
            loop = None
            if any(task.is_coroutine for task in self._tasks):
                from .coroutine_loop import CoroutineLoop  # noqa: PLC0415 - asyncio is much to import for threads

                loop = CoroutineLoop()
                undo.callback(lambda: loop.close(wait=not self._left))
            runners = []
            for task in self._tasks:
                subscription = store.topic(task.topic).subscribe(task.subscription, type="shared")
                undo.callback(subscription.close, failed=False)
                timeout_ms = partial(_ack_timeout_ms, store, task)
                in_loop = loop if task.is_coroutine else None
                runners.append(TaskRunner(task, subscription, timeout_ms, self._monitor, in_loop, self.name))
                self._clock = subscription.clock
            self._store, self._runners = store, runners
            self._began_ms = self._clock.now_ms()
            tasks = ", ".join(map(str, self._tasks))
            place = store.place if isinstance(store, ConnectedStore) else store.path
            _log.info("worker %s starts: duelog %s, store %s: %s", self.name, version("duelog"), place, tasks)
            for runner in runners:
                runner.start()
            self._ending = undo.pop_all()

    def request_stop(self) -> None:
        """Have `run`, or the next one, come to its end, without waiting for that; twice: nor for what is running."""
        with self._monitor.lock:
            self._hurry = self._asked
            self._asked = True
            self._monitor.notify_all()

    def stop(self) -> int:
        """Take no new messages, wait for those that run, by the store's clock at most `drain`, give back the rest.

        How many were given back: they are delivered again, to the next that asks, without counting as failed; threads
        that run them go on, coroutines are cancelled. Does nothing while it is stopped. Not to be called by a task.
        """
        with self._changing:
            store = self._store
            if store is None:
                return 0
            for runner in self._runners:
                runner.stop()
            deadline_ms = self._clock.now_ms() + self._drain_ms
            with self._monitor.lock:
                self._asked = True
                while self._busy and not self._hurry and self._clock.now_ms() < deadline_ms:
                    self._clock.wait(self._monitor, deadline_ms)
            with self._ending:
                self._store = None
                self._left = sum(runner.close() for runner in self._runners)
                if not (store.closed or isinstance(store, ConnectedStore)):  # whose process flushes by itself
                    store.flush()
                self._asked = self._hurry = False
            took_s = (self._clock.now_ms() - self._began_ms) / 1000
        outcomes = sum((runner.outcomes for runner in self._runners), Counter[str]())
        done, failed = plural(outcomes["acknowledged"], "message"), plural(outcomes["failed"], "attempt")
        _log.info("worker %s ends after %g s: %s acknowledged, %s failed", self.name, took_s, done, failed)
        if self._left:
            were = "was" if self._left == 1 else "were"
            left = plural(self._left, "message")
            _log.warning("worker %s: %s had not ended and %s given back", self.name, left, were)
        return self._left

    @property
    def _busy(self) -> bool:
        return any(runner.busy for runner in self._runners)

    def run(self) -> int:
        """Start, run until SIGTERM, SIGINT or `request_stop`, and stop; how many messages were given back.

        For the main thread of a process: in another one, signals are not heard. A second signal ends the waiting for
        what is running. Raises what ended a task, such as StoreFailed or HandlersHang, once all have stopped; and as
        `start`.
        """
        with self._signals():
            self.start()
            runners = self._runners
            try:
                with self._monitor.lock:
                    while not self._asked and all(runner.receiving for runner in runners):
                        self._monitor.wait()
            finally:
                left = self.stop()
        for runner in runners:
            if runner.error is not None:
                raise runner.error
        return left

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def heard(number: int, frame: FrameType | None) -> None:
            # Another thread takes the lock: this one may hold it, and may be about to wait.
            threading.Thread(target=self.request_stop, name="duelog-worker-signal", daemon=True).start()

        before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._store is None else "running"
        return f"<Worker {self.name!r}, {plural(len(self._tasks), 'task')}, {state}>"


def _ack_timeout_ms(store: DelayedStore, task: Task) -> int:
    return store.effective_policies(task.topic, task.subscription).ack_timeout_ms
