"""A broker's lookup room over a store, without a server: what commands are answered with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from duelog import DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.listing.memory_limits import DualMemoryLimiter, Limits
from duelog.broker.listing.topic_listing import TopicListing
from duelog.broker.lookup.compatibility import Compatibility
from duelog.broker.lookup.resources import AutoCreation, Defaults, NamespaceSettings, Resources
from duelog.broker.lookup.topic_facts import TopicFacts
from duelog.broker.lookup.topic_lookup import TopicAccess, TopicLookup, Urls
from duelog.broker.protocol.commands import decode
from duelog.broker.protocol.fields import Command
from duelog.broker.protocol.loop_calls import Timer, Workers
from duelog.broker.protocol.peer import Peer
from duelog.broker.security.permissions import Action, Permissions
from tests.broker.peers import HeldWorkers

_numbers = count(1)


class AnsweredPeer:
    """A connection that keeps what it is sent."""

    def __init__(self, role: str | None = None) -> None:
        self.number = next(_numbers)
        self.closed = False
        self.role = role
        self.answers: list[Command] = []

    def send(self, command: Command, blob: object = None) -> None:
        self.answers.append(command)

    def send_frames(self, frames: bytes, blob: memoryview | None = None) -> None:
        self.answers.append(decode(frames[8:] + bytes(blob or b"")))

    def on_left(self, call: Callable[[], object]) -> None:
        call()


class AnyLoop:
    """The loop that runs."""

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(delay, callback, *args)

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object:
        return asyncio.get_running_loop().call_soon_threadsafe(callback, *args)


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
        self.limiter = DualMemoryLimiter(Limits(), Limits(), AnyLoop())
        workers = Workers(HeldWorkers())
        self.listing = TopicListing(self.store, self.permissions, self.limiter, BrokerConfig(), workers)
        self.facts = TopicFacts(documents, self.resources, self.access)

    def ask(self, method: Any, command: Command, role: str | None = None) -> Any:
        """The one answer to a command."""
        peer = AnsweredPeer(role)

        async def run() -> None:
            await self.resources.load()
            answering = method(cast(Peer, peer), command)
            if answering is not None:
                await answering

        asyncio.run(run())
        (answer,) = peer.answers
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
