"""GET_TOPICS_OF_NAMESPACE: the topics of a namespace, or those that a pattern means."""

from __future__ import annotations

import asyncio

from ...delayed_store import DelayedStore
from ...store.errors import DuelogError
from ..lookup.topic_address import namespace_of
from ..protocol.commands import Error, GetTopics, GetTopicsResponse, TopicsMode
from ..protocol.failures import Refused, server_error
from ..protocol.peer import Peer
from ..security.permissions import Action, Permissions
from .topic_filter import UnreadablePattern, compiled, is_internal, selected, topics_hash

MAX_PATTERN = 50
"""Characters; clients filter by a longer one themselves."""


class TopicListing:
    """Lists topics. Of the event loop's thread."""

    def __init__(self, store: DelayedStore, permissions: Permissions, max_pattern: int = MAX_PATTERN) -> None:
        self._store = store
        self._permissions = permissions
        self._max_pattern = max_pattern
        self._under_way: dict[str, asyncio.Task[list[str]]] = {}

    async def topics(self, peer: Peer, command: GetTopics) -> None:
        """Answer with names, whether they are filtered, and their hash; without names if the client has that hash."""
        try:
            namespace = namespace_of(command.namespace)
            self._permissions.require(peer.role, namespace, *Action)
            names = [] if command.mode == TopicsMode.NON_PERSISTENT else await self.names(namespace)
            names, filtered = await asyncio.to_thread(self._filtered, names, command.pattern)
        except (Refused, DuelogError) as error:
            peer.send(Error(command.request_id, server_error(error), str(error)))
            return
        found = topics_hash(names)
        changed = found != command.topics_hash
        peer.send(GetTopicsResponse(command.request_id, names if changed else [], filtered, found, changed))

    async def names(self, namespace: str) -> list[str]:
        """Full names of the topics of `tenant/namespace`, in order; requests at one time share one list."""
        task = self._under_way.get(namespace)
        if task is None:
            task = self._under_way[namespace] = asyncio.create_task(asyncio.to_thread(self._read, namespace))
            task.add_done_callback(lambda _: self._under_way.pop(namespace))
        return await asyncio.shield(task)

    def _read(self, namespace: str) -> list[str]:
        return [topic.name for topic in self._store.topics(namespace) if not is_internal(topic.name)]

    def _filtered(self, names: list[str], pattern: str | None) -> tuple[list[str], bool]:
        """What the pattern selects; a pattern that is too long or unreadable, nothing: the client filters."""
        if pattern is None or len(pattern) > self._max_pattern:
            return names, False
        try:
            return selected(names, compiled(pattern)), True
        except UnreadablePattern:
            return names, False
