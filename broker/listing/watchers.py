"""WATCH_TOPIC_LIST: the topics that a pattern selects, and from then on their changes, within the limits of memory.

A watcher that finds no memory in time tries again, with pauses, until it or its connection is gone. Its updates are
sent one at a time, after the answer, in the order of the commits.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...store.errors import DuelogError
from ..configuration import BrokerConfig
from ..lookup.topic_address import namespace_of
from ..protocol.commands import (
    Error,
    Success,
    TopicsMode,
    WatchTopicList,
    WatchTopicListClose,
    WatchTopicListSuccess,
    WatchTopicUpdate,
)
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.frames import head, head_before, name_fields
from ..protocol.loop_calls import Loop, Workers
from ..protocol.peer import Peer
from ..security.permissions import Action, Permissions
from .memory_limits import (
    DualMemoryLimiter,
    LookupGate,
    PermitError,
    PermitQueueFull,
    PermitTimeout,
    all_left,
    check_frame,
    frame_bytes,
    list_bytes,
)
from .name_sets import NameSets, Update, Use
from .topic_listing import UnreadablePattern, compiled

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

    def __init__(self, peer: Peer, command: WatchTopicList, namespace: str, on_waiting: Callable[[], object]) -> None:
        """on_waiting: called when there is something to take."""
        self.peer = peer
        self.command = command
        self.namespace = namespace
        self.tasks: set[asyncio.Task[None]] = set()
        self.answered = False
        self.sending = False
        self.use: Use | None = None
        self._on_waiting = on_waiting
        self._updates: deque[Update] = deque()
        self._waiting = 0
        self._behind: dict[str, bool] | None = None
        """The net changes, once too many have waited; True: the name is new, False: it was deleted."""
        self._hash = ""

    @property
    def waiting(self) -> int:
        return sum(len(each.new) + len(each.deleted) for each in self._updates) + len(self._behind or ())

    @property
    def has_waiting(self) -> bool:
        return bool(self._updates) or self._behind is not None

    def clear(self) -> None:
        self._updates.clear()
        self._behind = None
        self._waiting = 0

    def hear(self, update: Update) -> None:
        """Queue an update, or fold it into the net changes where too many wait."""
        self._updates.append(update)
        self._waiting += len(update.new) + len(update.deleted)
        if self._behind is not None or self._waiting > MAX_WAITING:
            self._behind = {} if self._behind is None else self._behind
            for each in self._updates:
                _fold(self._behind, each)
            self._updates.clear()
            self._hash = update.hash
        self._on_waiting()

    def take(self) -> Update | None:
        if self._behind is not None:
            behind, self._behind = self._behind, None
            self._waiting = 0
            if behind:
                new = [name for name, is_new in behind.items() if is_new]
                return Update(new, [name for name, is_new in behind.items() if not is_new], self._hash)
        if not self._updates:
            return None
        update = self._updates.popleft()
        self._waiting -= len(update.new) + len(update.deleted)
        return update


@dataclass(eq=False)
class Watchers:
    """All watchers of a broker. Of the event loop's thread. gate: counts watchers being opened."""

    _permissions: Permissions
    _limiter: DualMemoryLimiter
    _config: BrokerConfig
    _gate: LookupGate
    _sets: NameSets
    _workers: Workers
    _loop: Loop
    _of_peer: dict[int, dict[int, Watcher]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return sum(map(len, self._of_peer.values()))

    @property
    def waiting(self) -> int:
        return sum(each.waiting for watchers in self._of_peer.values() for each in watchers.values())

    def watch(self, peer: Peer, command: WatchTopicList) -> None:
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
                peer.send(Error(before.command.request_id, ServerError.SERVICE_NOT_READY, text))
            _end(before)
        watcher = Watcher(peer, command, namespace, lambda: self._send_later(watcher))
        watchers[command.watcher_id] = watcher
        self._start(watcher, self._answer(watcher))

    def close(self, peer: Peer, command: WatchTopicListClose) -> None:
        """End a watcher; a request that was not answered is not answered."""
        watcher = self._of_peer.get(peer.number, {}).get(command.watcher_id)
        if watcher is not None:
            self._forget(watcher)
            _end(watcher)
        peer.send(Success(command.request_id))

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
        except PermitError as failed:
            error = Error(command.request_id, ServerError.TOO_MANY_REQUESTS, str(failed))
        except (Refused, DuelogError) as failed:
            error = Error(command.request_id, server_error(failed), str(failed))
        except Exception:
            _log.exception("a watcher of %s failed", watcher.namespace)
            error = Error(command.request_id, ServerError.UNKNOWN, "the broker has failed to serve the request")
        if error is not None:
            self._forget(watcher)
            watcher.peer.send(error)
            return
        watcher.answered = True
        self._send_later(watcher)

    async def _open(self, watcher: Watcher) -> None:
        """One try, in the steps of a listing. Raises PermitError, Refused, what the store raises; nothing is kept."""
        command, peer = watcher.command, watcher.peer
        limiter, key = self._limiter, (watcher.namespace, TopicsMode.PERSISTENT)
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
            size = frame_bytes(size, len(names))
            check_frame(size, self._config)
            await until_left.enter_async_context(limiter.direct.holding(size, lambda: peer.closed))
            fields = await self._workers(partial(name_fields, 3, names))
            success = WatchTopicListSuccess(command.request_id, command.watcher_id, found)
            del names
            peer.send_frames(head_before(success, len(fields)), fields or None)
            await all_left(peer)

    # -- updates ---------------------------------------------------------------------------------

    def _send_later(self, watcher: Watcher) -> None:
        if watcher.answered and not watcher.sending and watcher.has_waiting:
            watcher.sending = True
            self._start(watcher, self._send(watcher))

    async def _send(self, watcher: Watcher) -> None:
        try:
            while (update := watcher.take()) is not None:
                await self._retrying(partial(self._send_one, watcher, update))
        except PermitError:
            pass  # the connection is gone, or the broker ends
        except Exception:
            _log.exception("updates of %s for %s failed", watcher.namespace, watcher.peer.address)
            watcher.peer.close("what it watches cannot be told")  # it will ask anew
        finally:
            watcher.sending = False

    async def _send_one(self, watcher: Watcher, update: Update) -> None:
        peer = watcher.peer
        names = len(update.new) + len(update.deleted)
        size = frame_bytes(list_bytes(update.new) + list_bytes(update.deleted), names)
        async with self._limiter.turn(peer), self._limiter.direct.holding(size, lambda: peer.closed):
            command = WatchTopicUpdate(watcher.command.watcher_id, update.hash, update.new, update.deleted)
            frames = head(command) if size < _LARGE else await self._workers(partial(head, command))
            peer.send_frames(frames)
            await all_left(peer)

    async def _retrying(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work`, again after a pause where it got no permit in time.

        Pauses are 100 ms, doubled each time up to 25 s, less up to a tenth at random.
        """
        pause_s = FIRST_BACKOFF_S
        while True:
            try:
                return await work()
            except (PermitTimeout, PermitQueueFull):
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
