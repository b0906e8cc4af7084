"""/admin/v2/schemas: the schemas of a topic; those of a partition are its topic's."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from ..admin.http_request import HttpError, Request, existing_namespace, one_of, value_of
from ..admin.routing import Need, Route
from ..lookup.compatibility import SchemaType, is_schema, misfit, same
from ..lookup.resources import Resources
from ..lookup.topic_facts import StoredSchema, TopicFacts
from ..protocol.commands import KeyValue, Schema

_TOPIC = "/admin/v2/schemas/{tenant}/{namespace}/{topic}/"

_NUMBERS = {
    "NONE": 0, "STRING": 1, "JSON": 2, "PROTOBUF": 3, "AVRO": 4, "BOOLEAN": 5, "INT8": 6, "INT16": 7, "INT32": 8,
    "INT64": 9, "FLOAT": 10, "DOUBLE": 11, "DATE": 12, "TIME": 13, "TIMESTAMP": 14, "KEY_VALUE": 15, "INSTANT": 16,
    "LOCAL_DATE": 17, "LOCAL_TIME": 18, "LOCAL_DATE_TIME": 19, "PROTOBUF_NATIVE": 20,
}  # fmt: skip
"""Numbers of schema types by the names that REST has for them."""

_NAMES = {number: name for name, number in _NUMBERS.items()}


@dataclass(eq=False)
class RestSchemas:
    """For the event loop's thread alone."""

    _facts: TopicFacts
    _resources: Resources

    def routes(self) -> list[Route]:
        either, produce = Need.EITHER, Need.PRODUCE
        return [
            Route("GET", _TOPIC + "schema", self.last, "The last schema of a topic", either),
            Route("GET", _TOPIC + "schema/{version}", self.one, "A version of a topic's schema", either),
            Route("GET", _TOPIC + "schemas", self.all, "Every version of a topic's schema", either),
            Route("POST", _TOPIC + "schema", self.create, "Store a schema, where it fits", produce, body="object"),
            Route("POST", _TOPIC + "compatibility", self.fits, "Whether a schema fits", either, body="object"),
            Route("POST", _TOPIC + "version", self.version, "The version of a schema", either, body="object"),
            Route("DELETE", _TOPIC + "schema", self.delete, "Delete the schemas of a topic", Need.TENANT),
        ]

    async def last(self, request: Request) -> dict[str, Any]:
        """404 if there is none."""
        return _shown((await self._stored(request))[-1])

    async def one(self, request: Request) -> dict[str, Any]:
        """Versions are numbers from 0."""
        version = request.number("version", 0)
        for each in await self._stored(request):
            if each.version == version:
                return _shown(each)
        raise HttpError(404, f"{request.topic.base} has no schema of version {version}")

    async def all(self, request: Request) -> dict[str, Any]:
        """The first one first."""
        return {"getSchemaResponses": [_shown(each) for each in await self._stored(request)]}

    async def create(self, request: Request) -> dict[str, Any]:
        """409 if it does not fit; a schema that is there keeps its version. The topic need not exist yet."""
        existing_namespace(self._resources, request)
        schema = _schema_of(request)
        if not is_schema(schema):
            raise HttpError(412, "type='NONE': such a schema is not stored")
        found = await asyncio.to_thread(self._facts.schema_version, str(request.topic.base), schema)
        return {"version": int.from_bytes(found, "big")}

    async def fits(self, request: Request) -> dict[str, Any]:
        namespace, schema = existing_namespace(self._resources, request), _schema_of(request)
        asked = self._resources.compatibility(namespace)
        stored = await asyncio.to_thread(self._facts.versions, request.topic.base)
        reason = await asyncio.to_thread(misfit, schema, [each.schema for each in stored], asked)
        return {"isCompatibility": reason is None, "schemaCompatibilityStrategy": str(asked)}

    async def version(self, request: Request) -> dict[str, Any]:
        """-1: it is not there."""
        existing_namespace(self._resources, request)
        schema = _schema_of(request)
        stored = await asyncio.to_thread(self._facts.versions, request.topic.base)
        return {"version": next((each.version for each in stored if same(schema, each.schema)), -1)}

    async def delete(self, request: Request) -> dict[str, Any]:
        stored = await self._stored(request)
        await asyncio.to_thread(self._facts.forget_schemas, request.topic.base)
        return {"version": stored[-1].version}

    async def _stored(self, request: Request) -> list[StoredSchema]:
        existing_namespace(self._resources, request)
        found = await asyncio.to_thread(self._facts.versions, request.topic.base)
        if not found:
            raise HttpError(404, f"{request.topic.base} has no schema")
        return found


def _shown(stored: StoredSchema) -> dict[str, Any]:
    """Write `GetSchemaResponse`. When it was stored is not known."""
    schema = stored.schema
    return {
        "version": stored.version,
        "type": _NAMES.get(schema.type, "NONE"),
        "timestamp": 0,
        "data": _joined(schema) if schema.type == SchemaType.KEY_VALUE else schema.schema_data.decode(errors="replace"),
        "properties": {each.key: each.value for each in schema.properties},
    }


def _schema_of(request: Request) -> Schema:
    """`PostSchemaPayload`. HttpError 412."""
    body = request.object()
    number = _NUMBERS[one_of("type", body.get("type"), _NUMBERS)]
    properties = value_of(body, "properties", dict, {})
    for name, value in properties.items():
        if not isinstance(value, str):
            raise HttpError(412, f"properties.{name}: expected a text")
    text = value_of(body, "schema", str, "")
    try:
        data = _split(text) if number == SchemaType.KEY_VALUE else text.encode()
        pairs = [KeyValue(*map(_checked, each)) for each in properties.items()]
    except (ValueError, RecursionError) as error:
        raise HttpError(412, f"schema: cannot be read: {error}") from error
    return Schema(request.topic.base.local_name, data, number, pairs)


def _checked(text: str) -> str:
    text.encode()
    return text


def _joined(schema: Schema) -> str:
    """A KEY_VALUE schema as REST has it: one object of two, each JSON or an empty text."""
    parts, data = {}, schema.schema_data
    for name in ("key", "value"):
        size = max(int.from_bytes(data[:4], "big", signed=True), 0)
        part, data = data[4 : 4 + size], data[4 + size :]
        try:
            parts[name] = json.loads(part) if part else ""
        except ValueError:
            parts[name] = part.decode(errors="replace")
    return json.dumps(parts)


def _split(text: str) -> bytes:
    """The inverse of `_joined`."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("expected an object of key and value")
    data = b""
    for name in ("key", "value"):
        part = found.get(name, "")
        raw = part.encode() if isinstance(part, str) else json.dumps(part).encode()
        data += len(raw).to_bytes(4, "big") + raw
    return data
