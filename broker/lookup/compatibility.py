"""Rules by which a schema may follow those that a topic has.

Schemas of one topic are of one type. AVRO, JSON and PROTOBUF schemas are Avro schemas in JSON, and compared by Avro's
rules; KEY_VALUE is two schemas; all others have to be the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum, StrEnum

from ..protocol.commands import Schema
from .avro_reading import AvroSchema, UnreadableSchema, unreadable


class Compatibility(StrEnum):
    """A namespace's rule for new schemas, by Pulsar's names; TRANSITIVE compares with all earlier ones."""

    ALWAYS_COMPATIBLE = "ALWAYS_COMPATIBLE"
    ALWAYS_INCOMPATIBLE = "ALWAYS_INCOMPATIBLE"
    BACKWARD = "BACKWARD"
    FORWARD = "FORWARD"
    FULL = "FULL"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"


class SchemaType(IntEnum):
    """The types that need more than a comparison."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    KEY_VALUE = 15
    AUTO_CONSUME = 21


_AVRO_LIKE = {SchemaType.JSON, SchemaType.PROTOBUF, SchemaType.AVRO}


def is_schema(schema: Schema | None) -> bool:
    """True if a client names a schema; bytes and AUTO_CONSUME are none."""
    return schema is not None and schema.type > SchemaType.NONE and schema.type != SchemaType.AUTO_CONSUME


def same(one: Schema, other: Schema) -> bool:
    """True if two schemas have one type and content; spaces and the order of members do not count."""
    if one.type != other.type:
        return False
    if one.schema_data == other.schema_data:
        return True
    if one.type not in _AVRO_LIKE:
        return False
    try:
        return bool(json.loads(one.schema_data) == json.loads(other.schema_data))
    except (ValueError, RecursionError):
        return False


def misfit(schema: Schema, earlier: Sequence[Schema], asked: Compatibility) -> str | None:
    """Name the reason why `schema` may not follow the earlier ones, oldest first; None: it may."""
    try:
        if not earlier or asked == Compatibility.ALWAYS_COMPATIBLE:
            return _malformed(schema)
        if asked == Compatibility.ALWAYS_INCOMPATIBLE:
            return "the namespace allows no other schema"
        for each in earlier if asked.endswith("_TRANSITIVE") else earlier[-1:]:
            if not asked.startswith("FORWARD") and (reason := _unreadable(schema, each)):
                return f"it cannot read what is there: {reason}"
            if not asked.startswith("BACKWARD") and (reason := _unreadable(each, schema)):
                return f"what is there cannot read it: {reason}"
    except (UnreadableSchema, ValueError) as error:
        return f"the schema cannot be read: {error}"
    except RecursionError:
        return "the schema is nested too deeply"
    return None


def _malformed(schema: Schema) -> str | None:
    """Raises what makes a schema unusable."""
    if schema.type in _AVRO_LIKE:
        AvroSchema(json.loads(schema.schema_data))
    elif schema.type == SchemaType.KEY_VALUE:
        for part in _key_and_value(schema):
            _malformed(part)
    return None


def _unreadable(reader: Schema, writer: Schema) -> str | None:
    if reader.type != writer.type:
        return f"type {writer.type} became {reader.type}"
    if reader.type in _AVRO_LIKE:
        return unreadable(AvroSchema(json.loads(reader.schema_data)), AvroSchema(json.loads(writer.schema_data)))
    if reader.type == SchemaType.KEY_VALUE:
        for ours, theirs in zip(_key_and_value(reader), _key_and_value(writer), strict=True):
            if ours.name != theirs.name:
                return f"{theirs.name} became {ours.name}"
            if reason := _unreadable(ours, theirs):
                return reason
        return None
    return None if reader.schema_data == writer.schema_data else "it differs"


def _key_and_value(schema: Schema) -> tuple[Schema, Schema]:
    """The two schemas of a KEY_VALUE schema: each with its size before it, their types in the properties."""
    types = {each.key: each.value for each in schema.properties}
    parts, data = [], bytes(schema.schema_data)
    for name in ("key", "value"):
        size = max(int.from_bytes(data[:4], "big", signed=True), 0)
        if len(data) < 4 + size:
            raise UnreadableSchema(f"the {name}'s schema is cut short")
        kind = types.get(f"{name}.schema.type", "NONE")
        number = SchemaType[kind] if kind in SchemaType.__members__ else SchemaType.NONE
        parts.append(Schema(kind, data[4 : 4 + size], number))
        data = data[4 + size :]
    return parts[0], parts[1]
