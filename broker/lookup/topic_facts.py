"""Documents of a topic beside its messages: schemas, one a version, and its epoch; GET_SCHEMA, GET_OR_CREATE_SCHEMA.

A version is a number from 0, on the wire its 8 bytes, big-endian. Partitions share the schemas of their partitioned
topic; each has an epoch of its own.
"""

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...store.errors import DocumentChanged
from ...store.log.documents import Documents
from ...store.names import TopicName
from ..protocol import commands
from ..protocol.failures import Refused, ServerError
from ..protocol.peer import Peer
from ..security.permissions import Action
from .compatibility import Compatibility, is_schema, misfit, same
from .resources import Resources, path_of
from .topic_address import TopicAddress
from .topic_lookup import TopicAccess


class StoredSchema(NamedTuple):
    """A schema and its version."""

    version: int
    schema: commands.Schema

    @property
    def wire_version(self) -> bytes:
        return self.version.to_bytes(8, "big")


@dataclass(eq=False)
class TopicFacts:
    """The schemas and epochs of topics, by their names in the store."""

    _documents: Documents
    _resources: Resources
    _access: TopicAccess

    async def get_schema(self, peer: Peer, command: commands.GetSchema) -> None:
        """Answer with the version asked for, or the last. Raises Refused."""
        address = self._access.admit(peer.role, command.topic, *Action)
        stored = await asyncio.to_thread(self.versions, address.base)
        if command.schema_version:
            version = int.from_bytes(command.schema_version, "big")
            stored = [each for each in stored if each.version == version]
        if not stored:
            raise Refused(ServerError.TOPIC_NOT_FOUND, f"{address.base} has no such schema")
        schema, version_bytes = stored[-1].schema, stored[-1].wire_version
        peer.send(commands.GetSchemaResponse(command.request_id, schema=schema, schema_version=version_bytes))

    async def get_or_create_schema(self, peer: Peer, command: commands.GetOrCreateSchema) -> None:
        """Answer with the version of a schema, stored if it is new and fits. Raises Refused."""
        address = self._access.admit(peer.role, command.topic, Action.PRODUCE)
        if not await self._access.exists(address):
            raise Refused(ServerError.TOPIC_NOT_FOUND, f"topic {address.name} does not exist")
        version = await asyncio.to_thread(self.schema_version, str(address.base), command.schema)
        peer.send(commands.GetOrCreateSchemaResponse(command.request_id, schema_version=version))

    # -- these wait for the disk: for a thread -----------------------------------------------

    def schema_version(self, topic: str, schema: commands.Schema | None) -> bytes:
        """Return the version of a producer's schema, stored if it is new; empty: it has none.

        Refused: IncompatibleSchema.
        """
        base = TopicAddress.parse(topic).base
        if schema is None or not is_schema(schema):
            return b""
        rule = self._resources.compatibility(base.namespace_name)
        return self._take(base, schema, lambda earlier: misfit(schema, earlier, rule))

    def check_schema(self, topic: str, schema: commands.Schema) -> None:
        """Store a consumer's schema where the topic has none; else it has to read the last one.

        Refused: IncompatibleSchema.
        """
        base = TopicAddress.parse(topic).base
        if not is_schema(schema):
            return
        rule = self._resources.compatibility(base.namespace_name)
        if rule not in (Compatibility.ALWAYS_COMPATIBLE, Compatibility.ALWAYS_INCOMPATIBLE):
            rule = Compatibility.BACKWARD
        self._take(base, schema, lambda earlier: misfit(schema, earlier, rule), only_first=True)

    def deduplicates(self, topic: str) -> bool:
        return self._resources.deduplicates(TopicAddress.parse(topic).base)

    def epoch(self, topic: str) -> int | None:
        """Return the last topic epoch; None: no producer was ever exclusive."""
        document = self._documents.get(_epoch_key(topic))
        return None if document is None else int(document.value)

    def set_epoch(self, topic: str, epoch: int) -> None:
        self._documents.put(_epoch_key(topic), b"%d" % epoch)

    def forget(self, topic: str) -> None:
        """Delete the epoch of a topic that was deleted, and its schemas unless other partitions share them."""
        address = TopicAddress.parse(topic)
        self._documents.delete(_epoch_key(topic))
        if address.partition < 0 or not self._resources.partitions(address.base):
            self.forget_schemas(address.base)

    def forget_schemas(self, topic: TopicName) -> None:
        self._delete(_prefix(topic))

    def forget_all(self, namespace: str) -> None:
        """Delete the schemas of a namespace that was deleted: topics need not have come into being."""
        self._delete(f"schema/{namespace}/")

    def _delete(self, prefix: str) -> None:
        for key, _ in list(self._documents.items(prefix)):
            self._documents.delete(key)

    def versions(self, topic: TopicName) -> list[StoredSchema]:
        """Return all schemas, the oldest first."""
        prefix = _prefix(topic)
        return [
            StoredSchema(int(key.removeprefix(prefix), 16), _from_json(document.value))
            for key, document in self._documents.items(prefix)
        ]

    def _take(
        self,
        topic: TopicName,
        schema: commands.Schema,
        reason: Callable[[list[commands.Schema]], str | None],
        *,
        only_first: bool = False,
    ) -> bytes:
        while True:
            stored = self.versions(topic)
            for each in stored:
                if same(schema, each.schema):
                    return each.wire_version
            if (found := reason([each.schema for each in stored])) is not None:
                raise Refused(ServerError.INCOMPATIBLE_SCHEMA, f"{topic}: {found}")
            if stored and only_first:
                return stored[-1].wire_version
            new = StoredSchema(stored[-1].version + 1 if stored else 0, schema)
            try:
                self._documents.put(f"{_prefix(topic)}{new.version:016x}", _to_json(schema), expected=None)
            except DocumentChanged:
                continue  # another was quicker
            return new.wire_version


def _prefix(topic: TopicName) -> str:
    return f"schema/{path_of(topic)}/"


def _to_json(schema: commands.Schema) -> bytes:
    return json.dumps(
        {
            "name": schema.name,
            "type": schema.type,
            "data": base64.b64encode(schema.schema_data).decode(),
            "properties": [[each.key, each.value] for each in schema.properties],
        }
    ).encode()


def _from_json(value: bytes) -> commands.Schema:
    found = json.loads(value)
    properties = [commands.KeyValue(key, value) for key, value in found["properties"]]
    return commands.Schema(found["name"], base64.b64decode(found["data"]), found["type"], properties)


def _epoch_key(topic: str) -> str:
    return f"epoch/{path_of(TopicAddress.parse(topic).name)}"
