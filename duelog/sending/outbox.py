"""Sending without waiting: messages in flight, bounded in bytes, written in batches by a few threads.

Messages of one topic are written in the order in which they were put in. What a topic has waiting when a thread takes
it up is one batch, so that many small sends are one commit. Memory is bounded by back-pressure: a thread that would put
in more than `max_in_flight_bytes` waits until something has been written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from errno import EAGAIN
from pathlib import Path
from typing import NamedTuple

import numpy as np

from duelog.store.clock import Monitor
from duelog.store.codec.body import EncodedBatch
from duelog.store.errors import ClosedError, DuelogError, ResourceShortage
from duelog.store.position import MessageId, MessageIds

_THREADS = 4
_BATCH_ENTRIES = 5_000
_MESSAGE_BYTES = 500
"""What a message in flight takes besides its body: a future, and places in queues."""


Write = Callable[[EncodedBatch, int], MessageIds]
"""Appends a batch to a topic; (batch, the time of sending) -> ids."""


class Outgoing(NamedTuple):
    """One checked message, delay policies applied; as in `EncodedBatch`."""

    future: Future[MessageId]
    due_ms: int
    now_ms: int
    body: bytes
    overridden: bool

    @property
    def size(self) -> int:
        return len(self.body) + _MESSAGE_BYTES


class _Queue:
    """What waits for one topic."""

    __slots__ = ("busy", "items", "name", "write")

    def __init__(self, name: str, write: Write) -> None:
        self.name = name
        self.write = write
        self.items: deque[Outgoing] = deque()
        self.busy = False


class Outbox:
    """Messages on their way into a store. Thread-safe."""

    def __init__(self, max_bytes: int, path: Path) -> None:
        """`path` is the store's, for what errors say."""
        self._path = path
        self._max_bytes = max_bytes
        self._condition = Monitor()
        self._queues: dict[str, _Queue] = {}
        self._bytes = 0
        self._closed = False
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()

    def put(self, topic: str, write: Write, item: Outgoing, *, wait: bool = True) -> Future[MessageId] | None:
        """Take one message for a topic, which `write` appends to; None: there is no capacity, and `wait` is False.

        Raises ClosedError, ResourceShortage.

        A message larger than the bound is taken when nothing else is in flight. The outbox's own threads (a
        callback of a future) never wait, as no other thread would make space.
        """
        with self._condition.lock:
            while not self._closed and self._bytes and self._bytes + item.size > self._max_bytes:
                if getattr(self._own, "working", False):
                    break
                if not wait:
                    return None
                self._condition.wait()
            if self._closed:
                raise ClosedError("store")
            self._bytes += item.size
            queue = self._queues.get(topic)
            if queue is None:
                queue = self._queues[topic] = _Queue(topic, write)
            queue.items.append(item)
            if not queue.busy:
                queue.busy = True
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="duelog-outbox")
                try:
                    self._pool.submit(self._work, queue)
                except RuntimeError as error:  # the pool may still run it, and finds the queue empty
                    queue.items.clear()
                    del self._queues[topic]
                    self._bytes -= item.size
                    self._condition.notify_all()
                    raise ResourceShortage(self._path, "a thread that writes cannot be started", EAGAIN) from error
        return item.future

    def _work(self, queue: _Queue) -> None:
        """Write what waits for a topic, batch by batch, until nothing does."""
        self._own.working = True
        while items := self._take(queue):
            wanted = [item for item in items if item.future.set_running_or_notify_cancel()]
            error: BaseException | None = None
            ids: list[MessageId] = []
            try:
                ids = self._write(queue, wanted)
            except BaseException as broken:
                error = broken
            with self._condition.lock:
                self._bytes -= sum(item.size for item in items)
                self._condition.notify_all()
            for row, item in enumerate(wanted):
                if error is not None:
                    item.future.set_exception(error)
                else:
                    item.future.set_result(ids[row])

    def _take(self, queue: _Queue) -> list[Outgoing]:
        with self._condition.lock:
            items = [queue.items.popleft() for _ in range(min(len(queue.items), _BATCH_ENTRIES))]
            if not items:
                queue.busy = False
                if self._queues.get(queue.name) is queue:
                    del self._queues[queue.name]
            return items

    @staticmethod
    def _write(queue: _Queue, items: list[Outgoing]) -> list[MessageId]:
        if not items:
            return []
        now_ms = items[-1].now_ms
        dues = np.array([item.due_ms for item in items], dtype=np.int64)
        overridden = np.array([item.overridden for item in items])
        batch = EncodedBatch(dues, dues > now_ms, [item.body for item in items], overridden)
        return queue.write(batch, now_ms).to_list()

    def close(self) -> None:
        """Take nothing more, and write what is in flight. A thread that waits for capacity gets ClosedError.

        Raises DuelogError, with nothing done, in the callback of a future, whose end it would wait for for ever.
        """
        if getattr(self._own, "working", False):
            raise DuelogError("a callback of send_async cannot close the store, which waits for the callback to end")
        with self._condition.lock:
            self._closed = True
            pool = self._pool
            self._condition.notify_all()
        if pool is not None:
            pool.shutdown(wait=True)
