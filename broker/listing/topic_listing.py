"""GET_TOPICS_OF_NAMESPACE: the topics of a namespace, or those that a pattern means, within the limits of memory.

Steps in order: count it, wait for the turn of its connection, permission, the list's size as it was last, a heap permit
for it, the list, the permit brought to the list's real size, filter, hash, a direct permit for the frame, the frame.
The heap permit goes back once there is a frame, the direct one when the frame has left the process or the connection
is gone. Where there is no direct permit at once, the list is dropped and its heap permit goes back; it is made again
once the direct permit is there.

Requests of one connection that ask the same while they wait for its turn are one question, answered by the same bytes.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import crc32c
import re2

from ...delayed_store import DelayedStore
from ...store.names import SCHEME
from ..configuration import BrokerConfig
from ..lookup.topic_address import PARTITION_MARK, namespace_of
from ..protocol.commands import GetTopics, GetTopicsResponse, TopicsMode
from ..protocol.frames import head, name_fields
from ..protocol.loop_calls import Workers, started
from ..protocol.peer import Peer
from ..security.permissions import Action, Permissions
from . import memory_limits as memory

_NAMES_AT_ONCE = 1_000
"""Names that are joined at once, so that little memory is enough."""

_SCHEMES = re.compile("(?:non-)?persistent://")
_PARTITION = re.compile(rf"{PARTITION_MARK}[0-9]+\Z")


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str, /) -> object: ...


class UnreadablePattern(ValueError):
    """It is no regular expression of RE2."""


def compiled(pattern: str) -> Pattern:
    """Compile a pattern to be matched against `tenant/namespace/name`. Raises UnreadablePattern.

    A scheme in it is dropped, also behind `\\Q`: names of all lists are of one scheme. RE2 takes linear time, so that a
    pattern cannot hold up the broker.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        found: Pattern = re2.compile(_SCHEMES.sub("", pattern, count=1), options)
    except re2.error as error:
        raise UnreadablePattern(str(error)) from error
    return found


def selected(names: Iterable[str], pattern: Pattern) -> list[str]:
    """The full names whose topic the pattern matches in full; a partition goes by its partitioned topic."""
    return [name for name in names if matches(name, pattern)]


def matches(name: str, pattern: Pattern) -> bool:
    """Return True if `selected` has the name."""
    local = name.removeprefix(SCHEME)
    return bool(pattern.fullmatch(_PARTITION.sub("", local) if PARTITION_MARK in local else local))


def topics_hash(names: Iterable[str]) -> str:
    """The hash of a list, in any order.

    >>> topics_hash(["persistent://tenant/ns/topic1"])
    'fd59a01d'
    """
    found, before = 0, b""
    ordered = sorted(names)
    for start in range(0, len(ordered), _NAMES_AT_ONCE):
        found = int(crc32c.crc32c(before + ",".join(ordered[start : start + _NAMES_AT_ONCE]).encode(), found))
        before = b","
    return found.to_bytes(4, "little").hex()


Key = tuple[int, str, TopicsMode, str | None, str | None]
"""A connection's number, and its question."""


def names_of(store: DelayedStore, namespace: str) -> list[str]:
    """Full names of the topics of `tenant/namespace`, in order. Waits for the disk."""
    return [topic.name for topic in store.topics(namespace)]


class Selection:
    """The names of a list that a pattern selects."""

    def __init__(self, names: list[str], filtered: bool, size: int) -> None:
        """size: of the names, by `list_bytes`."""
        self.names, self.filtered, self.size = names, filtered, size
        self.hash = topics_hash(names)
        self.fields: asyncio.Task[bytes] | None = None
        """The names as they stand in every frame that has them."""


class Listed:
    """A list, shared by all that asked for it at one time."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.size = memory.list_bytes(names)
        self.selections: dict[str | None, asyncio.Task[Selection]] = {}


@dataclass(eq=False)
class Question:
    """A question of a connection, asked once or many times before it is its turn: one answer, of shared bytes."""

    peer: Peer
    command: GetTopics
    request_ids: list[int] = field(default_factory=list)
    answering: asyncio.Task[None] = field(init=False)


@dataclass(eq=False)
class TopicListing:
    """Lists topics. Of the event loop's thread."""

    _store: DelayedStore
    _permissions: Permissions
    _limiter: memory.DualMemoryLimiter
    _config: BrokerConfig
    _workers: Workers
    _under_way: dict[str, asyncio.Task[Listed]] = field(default_factory=dict, init=False)
    _waiting: dict[Key, Question] = field(default_factory=dict, init=False)
    """Questions whose turn has not come."""

    def __post_init__(self) -> None:
        self.gate = memory.LookupGate(self._config.max_concurrent_lookup_request)
        """Counts listings, and watchers being opened."""

    async def topics(self, peer: Peer, command: GetTopics) -> None:
        """Answer with names, whether they are filtered, and their hash; without names if the client has that hash.

        Returns when the answer has left. Raises Refused, PermitError too, and what the store raises.
        """
        key = (peer.number, command.namespace, command.mode, command.pattern, command.topics_hash)
        with self.gate:
            question = self._waiting.get(key)
            if question is None:
                question = self._waiting[key] = Question(peer, command)
                question.answering = started(self._answer(question, key))
            question.request_ids.append(command.request_id)
            await asyncio.shield(question.answering)

    @asynccontextmanager
    async def within_limits(
        self,
        namespace: str,
        mode: TopicsMode,
        until_left: AsyncExitStack,
        size_of: Callable[[Listed], Awaitable[int]],
        is_gone: Callable[[], bool] | None = None,
    ) -> AsyncIterator[Listed]:
        """Hold heap for the topics of `tenant/namespace` while the body makes an answer of them.

        size_of: bytes of the answer, for which `until_left` gets a direct permit; called again where the answer had to
        wait for direct memory. Raises PermitError, and what the store and `size_of` raise.
        """
        heap, direct = self._limiter.heap, self._limiter.direct
        reserved = 0
        while True:
            async with (
                self._limiter.sizes.estimate((namespace, mode)) as (guess, report),
                heap.holding(guess, is_gone) as permit,
            ):
                listed = Listed([]) if mode == TopicsMode.NON_PERSISTENT else await self._listed(namespace)
                report(listed.size)
                async with heap.updating(permit, listed.size, is_gone):
                    size = await size_of(listed)
                    if size > reserved and direct.has_room(size):
                        await until_left.enter_async_context(direct.holding(size, is_gone))
                        reserved = size
                    if size <= reserved:
                        yield listed
                        return
                    del listed
            await until_left.aclose()
            await until_left.enter_async_context(direct.holding(size, is_gone))
            reserved = size

    async def _answer(self, question: Question, key: Key) -> None:
        peer, command = question.peer, question.command
        try:
            async with self._limiter.turn(peer), AsyncExitStack() as until_left:
                del self._waiting[key]  # the list may be made from here on: who asks later is answered by another
                namespace = namespace_of(command.namespace)
                self._permissions.require(peer.role, namespace, *Action)

                async def size_of(listed: Listed) -> int:
                    found = await self._selected(listed, command.pattern)
                    unchanged = found.hash == command.topics_hash
                    size = memory.frame_bytes(0, 0) if unchanged else memory.frame_bytes(found.size, len(found.names))
                    memory.check_frame(size, self._config)
                    return size

                limits = self.within_limits(namespace, command.mode, until_left, size_of, lambda: peer.closed)
                async with limits as listed:
                    found = await self._selected(listed, command.pattern)
                    changed = found.hash != command.topics_hash
                    names = await self._encoded(found) if changed else b""
                    for number in question.request_ids:
                        answer = GetTopicsResponse(number, (), found.filtered, found.hash, changed)
                        peer.send_frames(head(answer, rest=len(names)), names or None)
                    del listed, found, names
                await memory.all_left(peer)
        finally:
            if self._waiting.get(key) is question:
                del self._waiting[key]

    async def _listed(self, namespace: str) -> Listed:
        """The topics of `tenant/namespace`; requests at one time share one list."""
        task = self._under_way.get(namespace)
        if task is None:
            task = started(self._workers(lambda: Listed(names_of(self._store, namespace))))
            self._under_way[namespace] = task
            task.add_done_callback(lambda _: self._under_way.pop(namespace))
        return await asyncio.shield(task)

    async def _selected(self, listed: Listed, pattern: str | None) -> Selection:
        """Select by the pattern, once for all that share the list."""
        task = listed.selections.get(pattern)
        if task is None:
            select = self._workers(lambda: self._select(listed, pattern))
            task = listed.selections[pattern] = asyncio.create_task(select)
        return await asyncio.shield(task)

    async def _encoded(self, found: Selection) -> bytes:
        """Encode the names for a frame, once for all that share them."""
        if found.fields is None:
            found.fields = asyncio.create_task(self._workers(lambda: name_fields(2, found.names)))
        return await asyncio.shield(found.fields)

    def _select(self, listed: Listed, pattern: str | None) -> Selection:
        """A pattern that is too long or unreadable selects nothing: the client filters."""
        config = self._config
        evaluates = config.enable_broker_side_subscription_pattern_evaluation
        if pattern is not None and evaluates and len(pattern) <= config.subscription_pattern_max_length:
            try:
                names = selected(listed.names, compiled(pattern))
            except UnreadablePattern:
                pass
            else:
                return Selection(names, True, memory.list_bytes(names))
        return Selection(listed.names, False, listed.size)
