"""Tenants, namespaces, partitioned topics and their settings: documents of the store, kept in memory.

Owns what is set where and what is in force. It does not know who asks. Reading waits for
nothing; a change is a compare-and-set in a worker, and everything else belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Protocol, Self, TypeVar

from ...store.errors import CorruptRecord, DocumentChanged
from ...store.log.documents import Document, Documents
from ...store.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, TopicName
from ..security.permissions import Action
from .compatibility import Compatibility
from .namespace_settings import AutoCreation, NamespaceSettings, PartitionedTopic, TenantSettings, TopicSettings


class Value(Protocol):
    """A value that a record holds."""

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self: ...


V = TypeVar("V", bound=Value)


class Records(Generic[V]):
    """Values by name."""

    def __init__(self, documents: Documents, kind: str, cls: type[V]) -> None:
        """kind: what the keys of the documents begin with."""
        self._documents = documents
        self._prefix = f"{kind}/"
        self._cls = cls
        self._values: dict[str, V] = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read all of them; before the first use."""

        def work() -> dict[str, V]:
            found = self._documents.items(self._prefix)
            return {key.removeprefix(self._prefix): self._read(key, document) for key, document in found}

        self._values = await asyncio.to_thread(work)

    def get(self, name: str) -> V | None:
        """The value, None if there is none."""
        return self._values.get(name)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Names that begin so, in order."""
        return iter(sorted(name for name in self._values if name.startswith(prefix)))

    async def change(self, name: str, change: Callable[[V | None], V | None]) -> V | None:
        """Put what `change` makes of the value, None for none, durably; that. `change` may be called again."""

        def work() -> V | None:
            key = self._prefix + name
            while True:
                document = self._documents.get(key)
                before = None if document is None else self._read(key, document)
                after = change(before)
                if after == before or self._write(key, after, document):
                    return after

        async with self._changing:
            after = await asyncio.to_thread(work)
            if after is None:
                self._values.pop(name, None)
            else:
                self._values[name] = after
            return after

    async def add(self, name: str, value: V) -> bool:
        """Put a value where there is none; False: there is one."""
        added = False

        def change(before: V | None) -> V:
            nonlocal added
            added = before is None
            return value if before is None else before

        await self.change(name, change)
        return added

    async def remove(self, name: str) -> None:
        """Delete the value."""
        await self.change(name, lambda before: None)

    def _read(self, key: str, document: Document) -> V:
        try:
            return self._cls.from_json(json.loads(document.value))
        except (ValueError, LookupError, TypeError) as error:
            raise CorruptRecord(f"document {key} is of no known form: {error!r}") from error

    def _write(self, key: str, value: V | None, before: Document | None) -> bool:
        """False: another was quicker."""
        expected = None if before is None else before.version
        try:
            if value is not None:
                self._documents.put(key, json.dumps(value.to_json(), sort_keys=True).encode(), expected=expected)
            else:
                self._documents.delete(key, expected=expected)
        except DocumentChanged:
            return False
        return True


NOTHING: Mapping[str, Collection[Action]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings of the broker that hold where a namespace sets nothing."""

    auto_creation: AutoCreation = field(default_factory=AutoCreation)
    deduplication: bool = False
    compatibility: Compatibility = Compatibility.FULL


class Resources:
    """Records by kind, and the questions that the broker has. Of the event loop's thread."""

    def __init__(self, documents: Documents, defaults: Defaults | None = None) -> None:
        """Has nothing until `load`."""
        self.defaults = defaults or Defaults()
        self.tenants = Records(documents, "tenant", TenantSettings)
        self.namespaces = Records(documents, "namespace", NamespaceSettings)
        self.partitioned = Records(documents, "partitioned", PartitionedTopic)
        """By `tenant/namespace/name`."""
        self.topics = Records(documents, "topic", TopicSettings)
        """By `tenant/namespace/name`; a partition goes by its partitioned topic."""

    async def load(self) -> None:
        """Read everything; and have there be `public/default`."""
        for records in (self.tenants, self.namespaces, self.partitioned, self.topics):
            await records.load()
        if not list(self.tenants.names()):
            await self.tenants.add(DEFAULT_TENANT, TenantSettings())
            await self.namespaces.add(f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}", NamespaceSettings())

    def administrators(self, tenant: str) -> Collection[str]:
        """Roles that may do everything in a tenant."""
        found = self.tenants.get(tenant)
        return () if found is None else found.admin_roles

    def granted(self, namespace: str) -> Mapping[str, Collection[Action]]:
        """By role, what it may do in `tenant/namespace`."""
        found = self.namespaces.get(namespace)
        return NOTHING if found is None else found.permissions

    def partitions(self, topic: TopicName) -> int:
        """The number of partitions; 0: the topic is not partitioned."""
        found = self.partitioned.get(path_of(topic))
        return 0 if found is None else found.partitions

    def auto_creation(self, namespace: str) -> AutoCreation:
        """The rule of creating topics when a client asks for them."""
        found = self.namespaces.get(namespace)
        return (found and found.auto_creation) or self.defaults.auto_creation

    def deduplicates(self, topic: TopicName) -> bool:
        """True if sequence numbers of a topic's producers are stored. For a partition, pass `TopicAddress.base`."""
        own, namespace = self.topics.get(path_of(topic)), self.namespaces.get(topic.namespace_name)
        for found in (own, namespace):
            if found is not None and found.deduplication is not None:
                return found.deduplication
        return self.defaults.deduplication

    def compatibility(self, namespace: str) -> Compatibility:
        """The rule for new schemas."""
        found = self.namespaces.get(namespace)
        return (found and found.compatibility) or self.defaults.compatibility


def path_of(topic: TopicName) -> str:
    """`tenant/namespace/name`."""
    return "/".join(topic)
