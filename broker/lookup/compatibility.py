"""Rules by which a schema may follow those that a topic has.

Schemas of one topic are of one type. AVRO, JSON and PROTOBUF schemas are Avro schemas in JSON, and compared by Avro's
rules of schema resolution: can data written with one be read with the other. Values of defaults are not looked at, only
whether there are any. KEY_VALUE is two schemas; all others have to be the same.

Source of the rules: Apache Avro, specification, "Schema Resolution".
"""

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any

from ..protocol.commands import Schema


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


# -- Avro's rules --------------------------------------------------------------------------------

_WIDER = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
"""By the type that was written, the other types that read it."""

_PRIMITIVE = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
_NAMED = {"record", "error", "enum", "fixed"}
_COMPLEX = _NAMED | {"array", "map"}


class UnreadableSchema(ValueError):
    """It is no Avro schema."""


class AvroSchema:
    """A schema with its named types."""

    def __init__(self, schema: Any) -> None:
        """Raises UnreadableSchema."""
        self.root = schema
        self.types: dict[str, Mapping[str, Any]] = {}
        self._collect(schema, "")

    def _collect(self, schema: Any, namespace: str) -> None:
        """Take in named types: by full name, and by their own, by which they are told apart between versions too."""
        match schema:
            case list():
                for branch in schema:
                    self._collect(branch, namespace)
            case {"type": str(kind)} if kind in _NAMED:
                name = schema.get("name")
                if not isinstance(name, str) or _short(name) in _PRIMITIVE | _COMPLEX | {""}:
                    raise UnreadableSchema(f"a {kind} without a name of its own")
                namespace = schema.get("namespace") or name.rpartition(".")[0] or namespace
                self.types[_short(name)] = self.types[f"{namespace}.{_short(name)}"] = schema
                if kind in ("record", "error"):
                    for field in _fields(schema):
                        self._collect(field["type"], namespace)
                elif kind == "enum" and not _is_strings(schema.get("symbols")):
                    raise UnreadableSchema(f"enum {name} without symbols")
            case {"type": "array"}:
                self._collect(schema.get("items"), namespace)
            case {"type": "map"}:
                self._collect(schema.get("values"), namespace)
            case {"type": inner}:
                self._collect(inner, namespace)
            case str() if schema not in _COMPLEX:
                pass
            case _:
                raise UnreadableSchema(f"no Avro type: {str(schema)[:100]}")

    def resolve(self, schema: Any) -> tuple[str, Any]:
        """The type of a schema, and the schema with names looked up; a union's type is `union`."""
        while True:
            if isinstance(schema, list):
                return "union", schema
            if isinstance(schema, str):
                found = self.types.get(schema) or self.types.get(_short(schema))
                return (schema, schema) if found is None else (found["type"], found)
            if isinstance(schema["type"], str) and schema["type"] in _COMPLEX:
                return schema["type"], schema
            schema = schema["type"]


def _is_strings(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _fields(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    fields = record.get("fields")
    if not isinstance(fields, list):
        raise UnreadableSchema(f"record {record.get('name')} without fields")
    for field in fields:
        if not isinstance(field, dict) or "type" not in field or not isinstance(field.get("name"), str):
            raise UnreadableSchema(f"record {record.get('name')} has a field without a name or type")
        if not _is_strings(field.get("aliases", [])):
            raise UnreadableSchema(f"aliases of field {field['name']} are no names")
    return fields


def unreadable(reader: AvroSchema, writer: AvroSchema) -> str | None:
    """Name the reason why the reader cannot read all that the writer may have written; None: it can."""
    return _Comparison(reader, writer).reason(reader.root, writer.root, "")


class _Comparison:
    """One comparison; pairs of records that are under way count as fitting, as schemas may be recursive."""

    def __init__(self, reader: AvroSchema, writer: AvroSchema) -> None:
        self._reader = reader
        self._writer = writer
        self._under_way: set[tuple[int, int]] = set()

    def reason(self, reader: Any, writer: Any, path: str) -> str | None:
        kind, reader = self._reader.resolve(reader)
        written, writer = self._writer.resolve(writer)
        if written == "union":
            found = (self.reason(reader, branch, path) for branch in writer)
            return next((reason for reason in found if reason is not None), None)
        if kind == "union":
            reasons = [self.reason(branch, writer, path) for branch in reader]
            return None if None in reasons else f"{path or 'it'}: no branch reads {written}"
        if kind != written:
            return None if kind in _WIDER.get(written, ()) else f"{path or 'it'}: {written} became {kind}"
        match kind:
            case "array":
                return self.reason(reader["items"], writer["items"], f"{path}[]")
            case "map":
                return self.reason(reader["values"], writer["values"], f"{path}{{}}")
            case "enum":
                gone = set(writer["symbols"]) - set(reader["symbols"])
                if gone and "default" not in reader:
                    return f"{path or 'it'}: symbols {', '.join(sorted(gone))} are gone"
            case "fixed":
                if reader.get("size") != writer.get("size"):
                    return f"{path or 'it'}: its size changed"
            case "record" | "error":
                return self._record(reader, writer, path)
        return None

    def _record(self, reader: Mapping[str, Any], writer: Mapping[str, Any], path: str) -> str | None:
        pair = (id(reader), id(writer))
        if pair in self._under_way:
            return None
        self._under_way.add(pair)
        reason = self._fields_reason(reader, writer, path)
        if reason is not None:
            self._under_way.discard(pair)  # another branch of a union may compare them again
        return reason

    def _fields_reason(self, reader: Mapping[str, Any], writer: Mapping[str, Any], path: str) -> str | None:
        written = {field["name"]: field for field in _fields(writer)}
        for field in _fields(reader):
            where = f"{path}.{field['name']}".removeprefix(".")
            names = [field["name"], *field.get("aliases", ())]
            source = next((written[name] for name in names if name in written), None)
            if source is None:
                if "default" not in field:
                    return f"{where} is new and has no default"
            elif (reason := self.reason(field["type"], source["type"], where)) is not None:
                return reason
        return None
