"""Deleting topics with all that is kept of them: messages, schemas, epochs, settings, partitions."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...delayed_store import DelayedStore
from ...store.errors import InvalidArgument, UnknownTopic
from ...store.names import TopicName
from ..lookup.resources import Resources, path_of
from ..lookup.topic_address import TopicAddress, partition_name
from ..lookup.topic_facts import TopicFacts


@dataclass(eq=False)
class TopicRemoval:
    """For the event loop's thread alone.

    users: how many producers and consumers a topic has. disconnect: closes them. forget: drops its figures.
    """

    _store: DelayedStore
    _resources: Resources
    _facts: TopicFacts
    _users: Callable[[str], int]
    _disconnect: Callable[[str], object]
    _forget: Callable[[str], object]

    async def delete(self, address: TopicAddress, *, force: bool) -> None:
        """Delete a topic, or a partitioned one with its partitions.

        Raises UnknownTopic, InvalidArgument (it has producers or consumers; force closes them).
        """
        partitions = self._resources.partitions(address.name)
        if partitions:
            names = [partition_name(address.name, number) for number in range(partitions)]
        elif await asyncio.to_thread(self._store.topic(str(address.name)).exists):
            names = [address.name]
        else:
            raise UnknownTopic(str(address.name))
        self._refuse_used(names, force=force)
        if partitions:
            await self._resources.partitioned.remove(path_of(address.name))
        await self._delete(names)
        if address.partition < 0:
            await self._resources.deduplication.remove(path_of(address.name))
            if partitions:  # what is set for it beside its partitions
                await asyncio.to_thread(self._store.remove_policies, topic=str(address.name))

    async def delete_all(self, namespace: str) -> None:
        """Delete every topic of a namespace, also of producers and consumers that are there."""
        for path in list(self._resources.partitioned.names(f"{namespace}/")):
            await self._resources.partitioned.remove(path)
            await asyncio.to_thread(self._store.remove_policies, topic=path)
        await self._delete(await self.names(namespace))
        for path in list(self._resources.deduplication.names(f"{namespace}/")):
            await self._resources.deduplication.remove(path)
        await asyncio.to_thread(self._facts.forget_all, namespace)

    async def names(self, namespace: str) -> list[TopicName]:
        return await asyncio.to_thread(lambda: [TopicName.parse(topic.name) for topic in self._store.topics(namespace)])

    def _refuse_used(self, names: Sequence[TopicName], *, force: bool) -> None:
        for name in names:
            if not force and (users := self._users(str(name))):
                raise InvalidArgument("topic", str(name), f"producers and consumers use it: {users}; force closes them")

    async def _delete(self, names: Sequence[TopicName]) -> None:
        for name in names:
            self._disconnect(str(name))
            await asyncio.to_thread(self._forget_and_delete, str(name))
            self._disconnect(str(name))  # those that came meanwhile have a topic that is no more
            self._forget(str(name))

    def _forget_and_delete(self, name: str) -> None:
        self._facts.forget(name)
        try:
            self._store.delete_topic(name)
        except UnknownTopic:
            return  # another was quicker
