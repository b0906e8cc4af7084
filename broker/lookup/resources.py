"""What there is beside topics: tenants, namespaces, partitioned topics, settings. Documents of the store.

Owns what is set where and what is in force. It does not know who asks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ...store.log.documents import Documents
from ...store.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, TopicName
from ..security.permissions import Action
from .compatibility import Compatibility
from .namespace_settings import AutoCreation, NamespaceSettings, PartitionedTopic, TenantSettings, TopicSettings
from .records import Records

NOTHING: Mapping[str, Collection[Action]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a namespace sets nothing, by the broker's configuration."""

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
        """Likewise; a partition goes by its partitioned topic."""

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
        """Of a partitioned topic; 0: it is none."""
        found = self.partitioned.get(path_of(topic))
        return 0 if found is None else found.partitions

    def auto_creation(self, namespace: str) -> AutoCreation:
        """Whether topics come into being when a client asks for them."""
        found = self.namespaces.get(namespace)
        return (found and found.auto_creation) or self.defaults.auto_creation

    def deduplicates(self, topic: TopicName) -> bool:
        """Whether sequence numbers of a topic's producers are stored. Of a partition: `TopicAddress.base`."""
        own, namespace = self.topics.get(path_of(topic)), self.namespaces.get(topic.namespace_name)
        for found in (own, namespace):
            if found is not None and found.deduplication is not None:
                return found.deduplication
        return self.defaults.deduplication

    def compatibility(self, namespace: str) -> Compatibility:
        """What a new schema has to be."""
        found = self.namespaces.get(namespace)
        return (found and found.compatibility) or self.defaults.compatibility


def path_of(topic: TopicName) -> str:
    """`tenant/namespace/name`."""
    return "/".join(topic)
