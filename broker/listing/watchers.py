"""WATCH_TOPIC_LIST: the topics that a pattern selects, and from then on their changes, within the limits of memory.

A watcher that finds no memory in time tries again, with pauses, until it or its connection is gone. Its updates are
sent one at a time, after the answer, in the order of the commits.

The names that watchers keep are one set for each watched namespace, and one view of it for each pattern. A set is read
once, and then follows the events of the store. What changed is made into updates, one view at a time and paced, so that
bursts are few updates, and the event loop has most of its time for others. All belongs to the event loop's thread.
"""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...delayed_store import DelayedStore
from ...store.errors import DuelogError
from ...store.names import SCHEME
from ...topics.topic_events import TopicEvent
from ..configuration import BrokerConfig
from ..lookup.topic_address import namespace_of
from ..protocol import commands
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.frames import head, name_fields
from ..protocol.loop_calls import Loop, LoopCalls, Workers, started
from ..protocol.peer import Peer
from ..security.permissions import Action, Permissions
from . import memory_limits as memory
from .topic_listing import Pattern, UnreadablePattern, compiled, matches, names_of, selected, topics_hash

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
        self.pending: dict[str, bool] = {}
        """By name, True: it was created, False: deleted."""
        self._splits = 0

    def fill(self, names: list[str]) -> None:
        """Take the names that are there. From any thread, before it is ready."""
        self.names = sorted(selected(names, self.pattern))
        self.size = memory.list_bytes(self.names)
        self.hash = topics_hash(self.names)

    def note(self, name: str, created: bool) -> None:
        if name in self.pending and self.is_ready and self._splits < _SPLITS:
            self._splits += 1
            self._make_update()
        if name in self.pending:
            del self.pending[name]  # what it is now, it was at the last update
        else:
            self.pending[name] = created

    def advance(self) -> None:
        self._splits = 0
        self._make_update()

    def _make_update(self) -> None:
        pending, self.pending = self.pending, {}
        new = [name for name, created in pending.items() if created and matches(name, self.pattern)]
        deleted = [name for name, created in pending.items() if not created and matches(name, self.pattern)]
        if new or deleted:
            kept = [name for name in self.names if pending.get(name, True)] if deleted else self.names
            self.names = sorted([*kept, *new])
            self.size += memory.list_bytes(new) - memory.list_bytes(deleted)
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
                self.size += memory.name_bytes(name)
            else:
                self.names.discard(name)
                self.size -= memory.name_bytes(name)
            for view in self.views.values():
                view.note(name, created)


@dataclass(eq=False)
class Use:
    """The use of a view by one watcher, by which the set is kept."""

    set: NameSet
    view: View
    _until_closed: ExitStack

    def attach(self, listener: Callable[[Update], object]) -> tuple[list[str], int, str]:
        """(names, their `list_bytes`, their hash) as they are, and have `listener` hear every update after that."""
        self.view.listeners[self] = listener
        self._until_closed.callback(self.view.listeners.pop, self, None)
        return self.view.names, self.view.size, self.view.hash

    def close(self) -> None:
        """Need it no more, and hear nothing more. A second call is nothing."""
        self._until_closed.close()


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
            found.loading = started(self._read(found, namespace))
        with ExitStack() as until_closed:
            found.users += 1
            until_closed.callback(self._release, namespace, found)
            if found.loading is not None:
                await asyncio.shield(found.loading)
            view = found.views.get(pattern)
            if view is None:
                view = found.views[pattern] = View(compiled(pattern))
                view.loading = started(self._fill(view, list(found.names)))
            view.users += 1
            until_closed.callback(self._release_view, found, pattern, view)
            if view.loading is not None:
                await asyncio.shield(view.loading)
            self._check_memory(found, view)
            return Use(found, view, until_closed.pop_all())

    def _release(self, namespace: str, found: NameSet) -> None:
        found.users -= 1
        if not found.users:
            del self._sets[namespace]

    def _release_view(self, found: NameSet, pattern: str, view: View) -> None:
        view.users -= 1
        if not view.users:
            del found.views[pattern]
            self._dirty.pop(view, None)

    async def _read(self, found: NameSet, namespace: str) -> None:
        def work() -> tuple[set[str], int]:
            names = set(names_of(self._store, namespace))
            return names, memory.list_bytes(names)

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
            if view.pending and view.is_ready:
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


_log = logging.getLogger("duelog.broker.listing")

MAX_WAITING = 10_000
"""Changes that wait for a watcher; of more, only what they come to is kept."""

_LARGE = 64 << 10
"""Bytes of an update that is encoded in another thread."""

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 25.0
_JITTER = 0.1


class Watcher:
    """One WATCH_TOPIC_LIST of a connection, and the changes that wait for it."""

    def __init__(
        self, peer: Peer, command: commands.WatchTopicList, namespace: str, on_waiting: Callable[[], object]
    ) -> None:
        """on_waiting: called when there is something to take."""
        self.peer = peer
        self.command = command
        self.namespace = namespace
        self.tasks: set[asyncio.Task[None]] = set()
        self.answered = False
        self.sending = False
        self.use: Use | None = None
        self._on_waiting = on_waiting
        self.updates: deque[Update] = deque()
        self._waiting = 0
        self.behind: dict[str, bool] | None = None
        """The net changes, once too many have waited; True: the name is new, False: it was deleted."""
        self._hash = ""

    @property
    def waiting(self) -> int:
        return sum(len(each.new) + len(each.deleted) for each in self.updates) + len(self.behind or ())

    def clear(self) -> None:
        self.updates.clear()
        self.behind = None
        self._waiting = 0

    def hear(self, update: Update) -> None:
        """Queue an update, or fold it into the net changes where too many wait."""
        self.updates.append(update)
        self._waiting += len(update.new) + len(update.deleted)
        if self.behind is not None or self._waiting > MAX_WAITING:
            self.behind = {} if self.behind is None else self.behind
            for each in self.updates:
                _fold(self.behind, each)
            self.updates.clear()
            self._hash = update.hash
        self._on_waiting()

    def take(self) -> Update | None:
        if self.behind is not None:
            behind, self.behind = self.behind, None
            self._waiting = 0
            if behind:
                new = [name for name, is_new in behind.items() if is_new]
                return Update(new, [name for name, is_new in behind.items() if not is_new], self._hash)
        if not self.updates:
            return None
        update = self.updates.popleft()
        self._waiting -= len(update.new) + len(update.deleted)
        return update


@dataclass(eq=False)
class Watchers:
    """All watchers of a broker. Of the event loop's thread. gate: counts watchers being opened."""

    _permissions: Permissions
    _limiter: memory.DualMemoryLimiter
    _config: BrokerConfig
    _gate: memory.LookupGate
    _sets: NameSets
    _workers: Workers
    _loop: Loop
    _of_peer: dict[int, dict[int, Watcher]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return sum(map(len, self._of_peer.values()))

    @property
    def waiting(self) -> int:
        return sum(each.waiting for watchers in self._of_peer.values() for each in watchers.values())

    def watch(self, peer: Peer, command: commands.WatchTopicList) -> None:
        """Answer with the topics, without names if the client has their hash, and send what changes from then on.

        A number in use is watched anew. Raises Refused.
        """
        namespace = namespace_of(command.namespace)
        self._permissions.require(peer.role, namespace, *Action)
        self._check_pattern(command.pattern)
        watchers = self._of_peer.setdefault(peer.number, {})
        before = watchers.get(command.watcher_id)
        if before is None and len(watchers) >= self._config.max_topic_list_watchers_per_connection:
            raise Refused(ServerError.NOT_ALLOWED, f"a connection may have {len(watchers)} watchers")
        if before is not None:
            if not before.answered:
                text = "the watcher was asked for again"
                peer.send(commands.Error(before.command.request_id, ServerError.SERVICE_NOT_READY, text))
            _end(before)
        watcher = Watcher(peer, command, namespace, lambda: self._send_later(watcher))
        watchers[command.watcher_id] = watcher
        self._start(watcher, self._answer(watcher))

    def close(self, peer: Peer, command: commands.WatchTopicListClose) -> None:
        """End a watcher; a request that was not answered is not answered."""
        watcher = self._of_peer.get(peer.number, {}).get(command.watcher_id)
        if watcher is not None:
            self._forget(watcher)
            _end(watcher)
        peer.send(commands.Success(command.request_id))

    def gone(self, peer: Peer) -> None:
        for watcher in self._of_peer.pop(peer.number, {}).values():
            _end(watcher)

    def moved(self, is_here: Callable[[str], bool]) -> None:
        """Close connections that watch a namespace which another broker serves now, so that clients ask again."""
        for watchers in list(self._of_peer.values()):
            for watcher in watchers.values():
                if not is_here(watcher.namespace):
                    watcher.peer.close(f"namespace {watcher.namespace} is served by another broker now")
                    break

    def close_all(self) -> None:
        for watchers in list(self._of_peer.values()):
            for watcher in watchers.values():
                _end(watcher)
        self._of_peer.clear()
        self._sets.close()

    def _check_pattern(self, pattern: str) -> None:
        most = self._config.subscription_pattern_max_length
        if not self._config.enable_broker_side_subscription_pattern_evaluation:
            raise Refused(ServerError.NOT_ALLOWED, "the broker does not evaluate patterns")
        if len(pattern) > most:
            reason = f"a pattern of {len(pattern)} characters; {most} are allowed"
            raise Refused(ServerError.NOT_ALLOWED, reason)
        try:
            compiled(pattern)
        except UnreadablePattern as error:
            raise Refused(ServerError.INVALID_TOPIC_NAME, f"pattern {pattern!r}: {error}") from error

    def _start(self, watcher: Watcher, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        watcher.tasks.add(task)
        task.add_done_callback(watcher.tasks.discard)

    def _forget(self, watcher: Watcher) -> None:
        watchers = self._of_peer.get(watcher.peer.number, {})
        if watchers.get(watcher.command.watcher_id) is watcher:
            del watchers[watcher.command.watcher_id]
            if not watchers:
                del self._of_peer[watcher.peer.number]

    # -- opening ---------------------------------------------------------------------------------

    async def _answer(self, watcher: Watcher) -> None:
        """Send the topics, when there is memory for them, and from then on their changes."""
        command, error = watcher.command, None
        try:
            with self._gate:
                await self._retrying(lambda: self._open(watcher))
        except (Refused, DuelogError) as failed:
            error = commands.Error(command.request_id, server_error(failed), str(failed))
        except Exception:
            _log.exception("a watcher of %s failed", watcher.namespace)
            error = commands.Error(
                command.request_id, ServerError.UNKNOWN, "the broker has failed to serve the request"
            )
        if error is not None:
            self._forget(watcher)
            watcher.peer.send(error)
            return
        watcher.answered = True
        self._send_later(watcher)

    async def _open(self, watcher: Watcher) -> None:
        """One try, in the steps of a listing. Raises Refused, what the store raises; nothing is kept."""
        command, peer = watcher.command, watcher.peer
        limiter, key = self._limiter, (watcher.namespace, commands.TopicsMode.PERSISTENT)
        async with limiter.turn(peer), AsyncExitStack() as until_left:
            async with (
                limiter.sizes.estimate(key) as (guess, report),
                limiter.heap.holding(guess, lambda: peer.closed) as permit,
            ):
                use = watcher.use = await self._sets.open(watcher.namespace, command.pattern)
                until_left.push(partial(_close_if_failed, watcher))
                names, size, found = use.attach(watcher.hear)
                report(use.set.size)
                async with limiter.heap.updating(permit, use.set.size, lambda: peer.closed):
                    pass  # the set keeps the names from here on, within a limit of its own
            if found == command.topics_hash:
                names, size = [], 0
            size = memory.frame_bytes(size, len(names))
            memory.check_frame(size, self._config)
            await until_left.enter_async_context(limiter.direct.holding(size, lambda: peer.closed))
            fields = await self._workers(partial(name_fields, 3, names))
            success = commands.WatchTopicListSuccess(command.request_id, command.watcher_id, found)
            del names
            peer.send_frames(head(success, rest=len(fields)), fields or None)
            await memory.all_left(peer)

    # -- updates ---------------------------------------------------------------------------------

    def _send_later(self, watcher: Watcher) -> None:
        if watcher.answered and not watcher.sending and (watcher.updates or watcher.behind is not None):
            watcher.sending = True
            self._start(watcher, self._send(watcher))

    async def _send(self, watcher: Watcher) -> None:
        try:
            while (update := watcher.take()) is not None:
                await self._retrying(partial(self._send_one, watcher, update))
        except memory.PermitError:
            pass  # the connection is gone, or the broker ends
        except Exception:
            _log.exception("updates of %s for %s failed", watcher.namespace, watcher.peer.address)
            watcher.peer.close("what it watches cannot be told")  # it will ask anew
        finally:
            watcher.sending = False

    async def _send_one(self, watcher: Watcher, update: Update) -> None:
        peer = watcher.peer
        names = len(update.new) + len(update.deleted)
        size = memory.frame_bytes(memory.list_bytes(update.new) + memory.list_bytes(update.deleted), names)
        async with self._limiter.turn(peer), self._limiter.direct.holding(size, lambda: peer.closed):
            command = commands.WatchTopicUpdate(watcher.command.watcher_id, update.hash, update.new, update.deleted)
            frames = head(command) if size < _LARGE else await self._workers(partial(head, command))
            peer.send_frames(frames)
            await memory.all_left(peer)

    async def _retrying(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work`, again after a pause where it got no permit in time.

        Pauses are 100 ms, doubled each time up to 25 s, less up to a tenth at random.
        """
        pause_s = FIRST_BACKOFF_S
        while True:
            try:
                return await work()
            except (memory.PermitTimeout, memory.PermitQueueFull):
                over = asyncio.Event()
                timer = self._loop.call_later(pause_s * (1 - random.random() * _JITTER), over.set)
                pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
                try:
                    await over.wait()
                finally:
                    timer.cancel()


def _fold(net: dict[str, bool], update: Update) -> None:
    """Fold an update into the net changes: a name that was created and deleted again is none, nor the other way."""
    for is_new, names in ((True, update.new), (False, update.deleted)):
        for name in names:
            if net.get(name, is_new) != is_new:
                del net[name]
            else:
                net[name] = is_new


def _close_if_failed(watcher: Watcher, kind: object, *_: object) -> None:
    if kind is not None:
        _release(watcher)


def _release(watcher: Watcher) -> None:
    use, watcher.use = watcher.use, None
    if use is not None:
        use.close()
    watcher.clear()


def _end(watcher: Watcher) -> None:
    watcher.answered = False
    _release(watcher)
    for task in watcher.tasks:
        task.cancel()
