"""The names that watchers keep: one set for each watched namespace, one view of it for each pattern in it.

A set is read once, and then follows the events of the store. What changed is made into updates, one view at a time and
paced, so that bursts are few updates, and the event loop has most of its time for others. All belongs to the event
loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from ...delayed_store import DelayedStore
from ...store.errors import BrokenInvariant
from ...store.names import SCHEME
from ...topics.topic_events import TopicEvent
from ..protocol.failures import Refused, ServerError
from ..protocol.loop_calls import LoopCalls, Workers
from .memory_limits import list_bytes, name_bytes
from .topic_listing import Pattern, compiled, matches, names_of, selected, topics_hash

_REFERENCE_BYTES = 8
_REST = 4
"""How many times as long as an update took to make the next one is left unmade."""
_SPLITS = 10
"""Updates made of a view at once because a name changed twice; further changes of the name cancel out."""


class Update(NamedTuple):
    """The changes of a view, and the hash of its names after them."""

    new: Sequence[str]
    deleted: Sequence[str]
    hash: str


class View:
    """The names of a namespace that a pattern selects."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.names: list[str] = []
        """In order. Never changed, but replaced."""
        self.size = 0
        """Bytes of the names, by `list_bytes`."""
        self.hash = ""
        self.listeners: dict[object, Callable[[Update], object]] = {}
        self.users = 0
        self.loading: asyncio.Task[None] | None = None
        self.is_ready = False
        self._pending: dict[str, bool] = {}
        """By name, True: it was created, False: deleted."""
        self._splits = 0

    @property
    def is_dirty(self) -> bool:
        return bool(self._pending) and self.is_ready

    def fill(self, names: list[str]) -> None:
        """Take the names that are there. From any thread, before it is ready."""
        self.names = sorted(selected(names, self.pattern))
        self.size = list_bytes(self.names)
        self.hash = topics_hash(self.names)

    def note(self, name: str, created: bool) -> None:
        if name in self._pending and self.is_ready and self._splits < _SPLITS:
            self._splits += 1
            self._make_update()
        if name in self._pending:
            del self._pending[name]  # what it is now, it was at the last update
        else:
            self._pending[name] = created

    def advance(self) -> None:
        self._splits = 0
        self._make_update()

    def _make_update(self) -> None:
        pending, self._pending = self._pending, {}
        new = [name for name, created in pending.items() if created and matches(name, self.pattern)]
        deleted = [name for name, created in pending.items() if not created and matches(name, self.pattern)]
        if new or deleted:
            kept = [name for name in self.names if pending.get(name, True)] if deleted else self.names
            self.names = sorted([*kept, *new])
            self.size += list_bytes(new) - list_bytes(deleted)
            self.hash = topics_hash(self.names)
            update = Update(new, deleted, self.hash)
            for listener in list(self.listeners.values()):
                listener(update)


class NameSet:
    """The topics of a namespace."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.size = 0
        """By `list_bytes`."""
        self.views: dict[str, View] = {}
        """By pattern."""
        self.users = 0
        self.loading: asyncio.Task[None] | None = None
        self._early: dict[str, bool] | None = {}
        """Events that came while the names were read; None: they have been read."""

    @property
    def kept_bytes(self) -> int:
        return self.size + _REFERENCE_BYTES * sum(len(view.names) for view in self.views.values())

    def fill(self, names: set[str], size: int) -> None:
        """Take the names that were read, and then the events that came meanwhile."""
        early, self._early = self._early or {}, None
        self.names, self.size = names, size
        for name, created in early.items():
            self.apply(name, created)

    def apply(self, name: str, created: bool) -> None:
        """Take an event, perhaps one of before the names were read."""
        if self._early is not None:
            self._early[name] = created
        elif created != (name in self.names):
            if created:
                self.names.add(name)
                self.size += name_bytes(name)
            else:
                self.names.discard(name)
                self.size -= name_bytes(name)
            for view in self.views.values():
                view.note(name, created)


class Use:
    """The use of a view by one watcher."""

    def __init__(self, sets: NameSets, namespace: str, found: NameSet, pattern: str) -> None:
        self._sets = sets
        self._namespace = namespace
        self._pattern = pattern
        self._closed = False
        self.set = found
        self.view: View | None = None
        found.users += 1

    def attach(self, listener: Callable[[Update], object]) -> tuple[list[str], int, str]:
        """(names, their `list_bytes`, their hash) as they are, and have `listener` hear every update after that."""
        view = self.view
        if view is None:
            raise BrokenInvariant("a use of names was not opened")
        view.listeners[self] = listener
        return view.names, view.size, view.hash

    def close(self) -> None:
        """Need it no more, and hear nothing more. A second call is nothing."""
        if not self._closed:
            self._closed = True
            if self.view is not None:
                self.view.listeners.pop(self, None)
            self._sets.release(self._namespace, self.set, self._pattern, self.view)


class NameSets:
    """The sets of all watched namespaces."""

    def __init__(self, store: DelayedStore, workers: Workers, calls: LoopCalls, max_bytes: int) -> None:
        """max_bytes: all names together, 0: no limit. Listens to the store until `close`."""
        self._store = store
        self._workers = workers
        self._loop = calls.loop
        self._max_bytes = max_bytes
        self._sets: dict[str, NameSet] = {}
        self._dirty: OrderedDict[View, None] = OrderedDict()
        self._scheduled = False
        self._not_before = 0.0
        self._end = store.on_topics(lambda events: calls.post(lambda: self._hear(events)))

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def kept_bytes(self) -> int:
        return sum(each.kept_bytes for each in self._sets.values())

    def close(self) -> None:
        self._end()

    async def open(self, namespace: str, pattern: str) -> Use:
        """Open the view of a pattern that RE2 reads, kept until the use of it is closed.

        Raises Refused: TooManyRequests, where there is no memory for another one, and what the store raises.
        """
        found = self._sets.get(namespace)
        if found is None:
            found = self._sets[namespace] = NameSet()
            found.loading = _started(self._read(found, namespace))
        use = Use(self, namespace, found, pattern)
        try:
            if found.loading is not None:
                await asyncio.shield(found.loading)
            view = found.views.get(pattern)
            if view is None:
                view = found.views[pattern] = View(compiled(pattern))
                view.loading = _started(self._fill(view, list(found.names)))
            view.users += 1
            use.view = view
            if view.loading is not None:
                await asyncio.shield(view.loading)
            self._check_memory(found, view)
        except BaseException:
            use.close()
            raise
        return use

    def release(self, namespace: str, found: NameSet, pattern: str, view: View | None) -> None:
        if view is not None:
            view.users -= 1
            if not view.users:
                del found.views[pattern]
                self._dirty.pop(view, None)
        found.users -= 1
        if not found.users:
            del self._sets[namespace]

    async def _read(self, found: NameSet, namespace: str) -> None:
        def work() -> tuple[set[str], int]:
            names = set(names_of(self._store, namespace))
            return names, list_bytes(names)

        found.fill(*await self._workers(work))
        found.loading = None

    async def _fill(self, view: View, names: list[str]) -> None:
        await self._workers(lambda: view.fill(names))
        view.is_ready, view.loading = True, None
        self._schedule([view])

    def _check_memory(self, found: NameSet, view: View) -> None:
        """Refuse a view that is new and too much, unless it is the only one."""
        alone = len(self._sets) == len(found.views) == 1
        if not alone and view.users == 1 and 0 < self._max_bytes < self.kept_bytes:
            raise Refused(ServerError.TOO_MANY_REQUESTS, f"watchers keep more than {self._max_bytes} bytes of names")

    def _hear(self, events: list[TopicEvent]) -> None:
        touched = {}
        for kind, name, _ in events:
            namespace = name.removeprefix(SCHEME).rpartition("/")[0]
            found = self._sets.get(namespace)
            if found is not None:
                found.apply(name, kind == "created")
                touched[namespace] = found
        for each in touched.values():
            self._schedule(each.views.values())

    def _schedule(self, views: Iterable[View] = ()) -> None:
        for view in views:
            if view.is_dirty:
                self._dirty[view] = None
        if self._dirty and not self._scheduled:
            self._scheduled = True
            self._loop.call_later(max(0.0, self._not_before - self._loop.time()), self._advance)

    def _advance(self) -> None:
        self._scheduled = False
        if self._dirty:
            view, _ = self._dirty.popitem(last=False)
            started = self._loop.time()
            view.advance()
            ended = self._loop.time()
            self._not_before = ended + _REST * (ended - started)
            self._schedule()


def _started(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task of its own; what it raises is for those that wait for it, if any do still."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
