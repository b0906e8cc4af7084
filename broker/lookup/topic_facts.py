"""Facts of a topic beside its messages, for producers and consumers: called by workers.

A topic goes by its name in the store; what is kept of a partition is kept of its partitioned topic, but for its epoch.
"""

from __future__ import annotations

from ...store.log.documents import Documents
from ..protocol.commands import Schema
from .resources import Resources, path_of
from .schemas import Schemas
from .topic_address import TopicAddress


class TopicFacts:
    """Reads and records them. Thread-safe; may wait for the disk."""

    def __init__(self, documents: Documents, resources: Resources, schemas: Schemas) -> None:
        self._documents = documents
        self._resources = resources
        self._schemas = schemas

    def deduplicates(self, topic: str) -> bool:
        """True if numbered messages of the topic are stored once."""
        return self._resources.deduplicates(TopicAddress.parse(topic).base)

    def epoch(self, topic: str) -> int | None:
        """The last topic epoch; None: no producer was ever exclusive."""
        document = self._documents.get(_epoch_key(topic))
        return None if document is None else int(document.value)

    def set_epoch(self, topic: str, epoch: int) -> None:
        """Record a topic epoch, durably."""
        self._documents.put(_epoch_key(topic), b"%d" % epoch)

    def schema_version(self, topic: str, schema: Schema) -> bytes:
        """The version of a producer's schema, stored where it is new. Raises Refused."""
        return self._schemas.for_producer(TopicAddress.parse(topic).base, schema)

    def check_schema(self, topic: str, schema: Schema) -> None:
        """Check a consumer's schema, and store the first of a topic. Raises Refused."""
        self._schemas.for_consumer(TopicAddress.parse(topic).base, schema)

    def forget(self, topic: str) -> None:
        """The topic was deleted."""
        address = TopicAddress.parse(topic)
        self._documents.delete(_epoch_key(topic))
        if address.partition < 0 or not self._resources.partitions(address.base):
            self._schemas.forget(address.base)

    def forget_all(self, namespace: str) -> None:
        """The namespace was deleted, with its topics."""
        self._schemas.forget_all(namespace)


def _epoch_key(topic: str) -> str:
    return f"epoch/{path_of(TopicAddress.parse(topic).name)}"
