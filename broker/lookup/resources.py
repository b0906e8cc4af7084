"""Tenants, namespaces, partitioned topics and their settings: documents of the store, kept in memory.

Owns what is set where and what is in force. It does not know who asks. Reading waits for nothing; a change is a
compare-and-set in a worker, and everything else belongs to the event loop's thread. Delay policies, retention and time
to live are not here: the store keeps them itself.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar

import msgspec

from ...store.errors import CorruptRecord, DocumentChanged
from ...store.log.documents import Document, Documents
from ...store.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, TopicName
from ..security.permissions import Action
from .compatibility import Compatibility

V = TypeVar("V")


class AutoCreation(msgspec.Struct, frozen=True):
    """The rule of creating a topic when a client first asks for it."""

    allowed: bool = True
    partitions: int = 0
    """Partitions of a topic created so; 0: it is a plain topic."""


class NamespaceSettings(msgspec.Struct, frozen=True, rename="camel"):
    """Settings of a namespace; None: the broker's configuration holds."""

    auto_creation: AutoCreation | None = None
    deduplication: bool | None = None
    compatibility: Compatibility | None = None
    permissions: dict[str, frozenset[Action]] = {}
    """By role."""


@dataclass(eq=False)
class Records(Generic[V]):
    """Values by name, each a JSON document. prefix: the beginning of the documents' keys."""

    _documents: Documents
    _prefix: str
    _to_json: Callable[[V], dict[str, Any]]
    _from_json: Callable[[dict[str, Any]], V]

    def __post_init__(self) -> None:
        self._values: dict[str, V] = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read all of them; before the first use."""

        def work() -> dict[str, V]:
            found = self._documents.items(self._prefix)
            return {key.removeprefix(self._prefix): self._read(key, document) for key, document in found}

        self._values = await asyncio.to_thread(work)

    def get(self, name: str) -> V | None:
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
        await self.change(name, lambda before: None)

    def _read(self, key: str, document: Document) -> V:
        try:
            return self._from_json(json.loads(document.value))
        except (ValueError, LookupError, TypeError, msgspec.ValidationError) as error:
            raise CorruptRecord(f"document {key} is of no known form: {error!r}") from error

    def _write(self, key: str, value: V | None, before: Document | None) -> bool:
        """False: another was quicker."""
        expected = None if before is None else before.version
        try:
            if value is not None:
                self._documents.put(key, json.dumps(self._to_json(value), sort_keys=True).encode(), expected=expected)
            else:
                self._documents.delete(key, expected=expected)
        except DocumentChanged:
            return False
        return True


def values_of(documents: Documents, kind: str, member: str) -> Records[Any]:
    """Records of plain values: a document is an object with one member."""
    return Records(documents, f"{kind}/", lambda value: {member: value}, itemgetter(member))


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
        self.tenants: Records[list[str]] = values_of(documents, "tenant", "adminRoles")
        """Administrators by tenant."""
        to_json = partial(msgspec.to_builtins, order="sorted")
        self.namespaces = Records(documents, "namespace/", to_json, partial(msgspec.convert, type=NamespaceSettings))
        self.partitioned: Records[int] = values_of(documents, "partitioned", "partitions")
        """Numbers of partitions by `tenant/namespace/name`."""
        self.deduplication: Records[bool] = values_of(documents, "topic", "deduplication")
        """By `tenant/namespace/name`, where a topic sets it; a partition goes by its partitioned topic."""

    async def load(self) -> None:
        """Read everything; and have there be `public/default`."""
        for records in (self.tenants, self.namespaces, self.partitioned, self.deduplication):
            await records.load()
        if not list(self.tenants.names()):
            await self.tenants.add(DEFAULT_TENANT, [])
            await self.namespaces.add(f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}", NamespaceSettings())

    def administrators(self, tenant: str) -> Collection[str]:
        return self.tenants.get(tenant) or ()

    def granted(self, namespace: str) -> Mapping[str, Collection[Action]]:
        found = self.namespaces.get(namespace)
        return {} if found is None else found.permissions

    def partitions(self, topic: TopicName) -> int:
        """The number of partitions; 0: the topic is not partitioned."""
        return self.partitioned.get(path_of(topic)) or 0

    def auto_creation(self, namespace: str) -> AutoCreation:
        found = self.namespaces.get(namespace)
        return (found and found.auto_creation) or self.defaults.auto_creation

    def deduplicates(self, topic: TopicName) -> bool:
        """True if sequence numbers of a topic's producers are stored. For a partition, pass `TopicAddress.base`."""
        own, namespace = self.deduplication.get(path_of(topic)), self.namespaces.get(topic.namespace_name)
        if own is None and namespace is not None:
            own = namespace.deduplication
        return self.defaults.deduplication if own is None else own

    def compatibility(self, namespace: str) -> Compatibility:
        found = self.namespaces.get(namespace)
        return (found and found.compatibility) or self.defaults.compatibility


def path_of(topic: TopicName) -> str:
    """`tenant/namespace/name`."""
    return "/".join(topic)
