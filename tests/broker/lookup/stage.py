"""A broker's lookup room over a store, without a server: what commands are answered with."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from duelog import DelayedStore
from duelog.broker.lookup.compatibility import Compatibility
from duelog.broker.lookup.resources import AutoCreation, Defaults, NamespaceSettings, Resources
from duelog.broker.lookup.topic_facts import TopicFacts
from duelog.broker.lookup.topic_lookup import TopicAccess, TopicLookup, Urls
from duelog.broker.protocol.fields import Command
from duelog.broker.security.permissions import Action, Permissions
from tests.broker.peers import FakePeer, answered


@dataclass
class Stage:
    """The room's services over one store."""

    store: DelayedStore
    defaults: Defaults = field(default_factory=Defaults)
    secured: bool = False

    def __post_init__(self) -> None:
        documents = self.store.documents
        self.resources = Resources(documents, self.defaults)
        self.permissions = Permissions(self.resources if self.secured else None, {"root"})
        self.access = TopicAccess(self.store, self.resources, self.permissions)
        urls = {"": Urls("pulsar://here:6650", "pulsar+ssl://here:6651"), "inner": Urls("pulsar://inner:6650")}
        self.lookup = TopicLookup(self.access, self.resources, urls)
        self.facts = TopicFacts(documents, self.resources, self.access)

    def ask(self, method: Any, command: Command, role: str | None = None) -> Any:
        """The one answer to a command."""
        peer = FakePeer()
        peer.role = role

        async def run() -> None:
            await self.resources.load()
            await answered(method, peer, command)

        asyncio.run(run())
        (answer,) = peer.take()
        return answer

    def set(self, namespace: str, **values: Any) -> None:
        """Have a namespace be set so."""

        async def run() -> None:
            await self.resources.load()
            await self.resources.namespaces.change(namespace, lambda before: NamespaceSettings(**values))

        asyncio.run(run())

    def topics(self) -> list[str]:
        return [topic.name for topic in self.store.topics()]


PARTITIONED = AutoCreation(allowed=True, partitions=3)
FORBIDDEN = AutoCreation(allowed=False)
ANY = Compatibility.ALWAYS_COMPATIBLE
BOTH = frozenset(Action)
