"""GET_SCHEMA and GET_OR_CREATE_SCHEMA, schemas of producers and consumers, and which schema may follow which."""

import json
from types import NoneType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duelog import DelayedStore
from duelog.broker.lookup.compatibility import Compatibility, SchemaType, is_schema, misfit, same
from duelog.broker.protocol.commands import GetOrCreateSchema, GetSchema, KeyValue, Schema
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.security.permissions import Action
from tests.broker.lookup.stage import ANY, BOTH, Stage
from tests.conftest import OpenStore
from tests.proof import length

STRING = Schema("s", b"", 1, [KeyValue("k", "v")])


def record(*names: str) -> Schema:
    """A JSON schema whose fields have defaults."""
    fields = [{"name": name, "type": "int", "default": 0} for name in names]
    return Schema("r", json.dumps({"type": "record", "name": "R", "fields": fields}).encode(), 2, [])


@pytest.fixture
def stage(open_store: OpenStore) -> Stage:
    """With topic `t`."""
    store = open_store()
    store.topic("t").send(b"m")
    return Stage(store)


def version(number: int) -> bytes:
    """The version's bytes on the wire."""
    return number.to_bytes(8, "big")


def created(stage: Stage, schema: Schema, topic: str = "t") -> bytes:
    """The version that the broker answers."""
    answer = stage.ask(stage.facts.get_or_create_schema, GetOrCreateSchema(1, topic, schema))
    assert answer.error is None, answer.message
    return bytes(answer.schema_version)


def test_a_schema_is_given_back_as_it_came(stage: Stage) -> None:
    """The last, or the version asked for; after a restart too."""
    stage.set("public/default", compatibility=ANY)
    created(stage, STRING)
    created(stage, record("a"))
    again = Stage(stage.store)
    answer = again.ask(again.facts.get_schema, GetSchema(5, "t"))
    assert (answer.request_id, answer.schema, answer.schema_version) == (5, record("a"), version(1))
    answer = again.ask(again.facts.get_schema, GetSchema(6, "t", version(0)))
    assert (answer.schema, answer.schema_version) == (STRING, version(0))


def test_a_schema_that_is_not_there_is_not_found(stage: Stage) -> None:
    """In the answer's own form; a producer makes a topic, not a question."""
    created(stage, STRING)
    for asked in (GetSchema(1, "t", version(9)), GetSchema(1, "u"), GetSchema(1, "public/none/t")):
        answer = stage.ask(stage.facts.get_schema, asked)
        assert (answer.request_id, answer.error, answer.schema) == (1, ServerError.TOPIC_NOT_FOUND, None)
    answer = stage.ask(stage.facts.get_or_create_schema, GetOrCreateSchema(1, "u", STRING))
    assert answer.error == ServerError.TOPIC_NOT_FOUND


def test_a_schema_that_does_not_fit_is_incompatible(stage: Stage) -> None:
    """Another type, or one that cannot read what is there; nothing is stored."""
    created(stage, record("a"))
    for schema in (
        STRING,
        Schema("r", b'{"type": "record", "name": "R", "fields": [{"name": "a", "type": "map"}]}', 2),
    ):
        answer = stage.ask(stage.facts.get_or_create_schema, GetOrCreateSchema(1, "t", schema))
        assert (answer.error, answer.schema_version) == (ServerError.INCOMPATIBLE_SCHEMA, None)
        with pytest.raises(Refused):
            stage.facts.schema_version("t", schema)
        with pytest.raises(Refused):
            stage.facts.check_schema("t", schema)
    assert created(stage, record("b")) == version(1)


def test_partitions_share_the_schemas_of_their_topic(stage: Stage) -> None:
    """Each stands for all."""
    stage.store.topic("p-partition-0").send(b"m")
    assert created(stage, record("a"), "p-partition-0") == version(0)
    assert stage.facts.schema_version("p-partition-1", record("a", "b")) == version(1)
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "p")).schema_version == version(1)
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "t")).error == ServerError.TOPIC_NOT_FOUND


def test_a_consumer_brings_the_first_schema_and_then_has_to_read_the_last(stage: Stage) -> None:
    """It adds no version; bytes read everything, and a producer of bytes is let in beside any schema."""
    stage.facts.check_schema("t", record("a"))
    stage.facts.check_schema("t", record("a", "b"))
    stage.facts.check_schema("t", Schema("", b"", 0))
    assert stage.facts.schema_version("t", Schema("", b"", -1)) == b""
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "t")).schema_version == version(0)


def test_storing_needs_the_right_to_produce_and_reading_either(store: DelayedStore) -> None:
    """A refusal stores nothing."""
    store.topic("t").send(b"m")
    stage = Stage(store, secured=True)
    stage.set("public/default", permissions={"r": frozenset({Action.CONSUME}), "rw": BOTH})
    asked = GetOrCreateSchema(1, "t", STRING)
    assert stage.ask(stage.facts.get_or_create_schema, asked, "r").error == ServerError.AUTHORIZATION
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "t"), "r").error == ServerError.TOPIC_NOT_FOUND
    assert stage.ask(stage.facts.get_or_create_schema, asked, "rw").schema_version == version(0)
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "t"), "r").schema_version == version(0)
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "t"), "stranger").error == ServerError.AUTHORIZATION


def test_two_schemas_at_one_time_get_two_versions(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes second finds the first and is compared with it."""
    store: DelayedStore = open_store()
    stage = Stage(store)
    read, first = stage.facts.versions, [True]

    def overtaken(topic: object) -> object:
        found = read(topic)  # type: ignore[arg-type]
        if first.pop() if first else False:
            stage.facts.schema_version("t", record("a"))
        return found

    monkeypatch.setattr(stage.facts, "versions", overtaken)
    assert stage.facts.schema_version("t", record("b")) == version(1)


def avro(schema: Any, kind: int = SchemaType.AVRO) -> Schema:
    """An Avro schema, or another kind that is written so."""
    return Schema("s", json.dumps(schema).encode(), kind)


def record_of(*fields: dict[str, Any], name: str = "R") -> Schema:
    """A record's."""
    return avro({"type": "record", "name": name, "fields": list(fields)})


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    """A record's field."""
    return {"name": name, "type": kind, **more}


A, B = field("a", "int"), field("b", "string")
B_OPTIONAL = field("b", ["null", "string"], default=None)
NODE = {"type": "record", "name": "Node", "fields": [field("next", ["null", "Node"]), A]}

READS = [
    (record_of(A), record_of(A, B)),  # what a reader does not know, it passes over
    (record_of(A, B_OPTIONAL), record_of(A)),
    (record_of(field("a", "long")), record_of(A)),
    (record_of(field("a", "double")), record_of(field("a", "float"))),
    (record_of(field("a", "bytes")), record_of(field("a", "string"))),
    (record_of(field("a", ["null", "int"])), record_of(A)),
    (record_of(field("new", "int", aliases=["a"])), record_of(A)),
    (record_of(A, name="other.R"), record_of(A)),
    (avro({"type": "array", "items": "long"}), avro({"type": "array", "items": "int"})),
    (avro({"type": "map", "values": "long"}), avro({"type": "map", "values": "int"})),
    (avro({"type": "enum", "name": "E", "symbols": ["x", "y"]}), avro({"type": "enum", "name": "E", "symbols": ["x"]})),
    (avro({"type": "fixed", "name": "F", "size": 2}), avro({"type": "fixed", "name": "F", "size": 2})),
    (avro(NODE), avro({**NODE, "fields": [*NODE["fields"], B]})),
    (record_of(field("a", {"type": "int", "logicalType": "date"})), record_of(A)),
    (avro({"type": {"type": "int"}}), avro("int")),
]

READS_NOT = [
    (record_of(A, B), record_of(A), "b is new and has no default"),
    (record_of(field("a", "string")), record_of(A), "a: int became string"),
    (record_of(A), record_of(field("a", "long")), "a: long became int"),
    (record_of(A), record_of(field("a", ["null", "int"])), "a: null became int"),
    (record_of(field("a", ["null", "string"])), record_of(A), "a: no branch reads int"),
    (avro({"type": "array", "items": "int"}), avro({"type": "array", "items": "long"}), "[]: long became int"),
    (
        avro({"type": "enum", "name": "E", "symbols": ["x"]}),
        avro({"type": "enum", "name": "E", "symbols": ["x", "y"]}),
        "it: symbols y are gone",
    ),
    (
        avro({"type": "fixed", "name": "F", "size": 1}),
        avro({"type": "fixed", "name": "F", "size": 2}),
        "it: its size changed",
    ),
    (avro(NODE), avro({**NODE, "fields": NODE["fields"][:1]}), "a is new and has no default"),
]


@pytest.mark.parametrize(("new", "old"), READS)
def test_a_schema_that_reads_what_is_there_may_follow(new: Schema, old: Schema) -> None:
    """By Avro's rules, for AVRO and JSON alike."""
    assert misfit(new, [old], Compatibility.BACKWARD) is None
    assert misfit(old, [new], Compatibility.FORWARD) is None


@pytest.mark.parametrize(("new", "old", "reason"), READS_NOT)
def test_a_schema_that_cannot_read_what_is_there_is_refused_with_the_place(
    new: Schema, old: Schema, reason: str
) -> None:
    """The text leads to the field."""
    assert misfit(new, [old], Compatibility.BACKWARD) == f"it cannot read what is there: {reason}"
    assert misfit(old, [new], Compatibility.FORWARD) == f"what is there cannot read it: {reason}"
    assert misfit(new, [old], Compatibility.FULL) is not None
    assert misfit(old, [new], Compatibility.FULL) is not None
    assert misfit(new, [old], Compatibility.ALWAYS_COMPATIBLE) is None


def test_a_branch_that_failed_once_does_not_count_as_fitting_later() -> None:
    """A pair of records is taken for fitting only while it is compared."""
    new = {"type": "record", "name": "N", "fields": [field("z", "int")]}
    empty = {"type": "record", "name": "M", "fields": []}
    reader = record_of(field("x", [new, empty]), field("y", "N"))
    writer = record_of(field("x", {"type": "record", "name": "N", "fields": []}), field("y", "N"))
    assert (
        misfit(reader, [writer], Compatibility.BACKWARD)
        == "it cannot read what is there: y.z is new and has no default"
    )


def test_transitive_looks_at_all_earlier_versions() -> None:
    """The others look at the last."""
    versions = [record_of(A), record_of(A, B_OPTIONAL)]
    new = record_of(A, field("b", ["null", "string"]))
    assert misfit(new, versions, Compatibility.BACKWARD) is None
    assert misfit(new, versions, Compatibility.BACKWARD_TRANSITIVE) is not None


@pytest.mark.parametrize("asked", [each for each in Compatibility if each is not Compatibility.ALWAYS_COMPATIBLE])
def test_another_type_never_follows(asked: Compatibility) -> None:
    """But where everything is compatible."""
    assert misfit(avro("int", SchemaType.JSON), [avro("int")], asked) is not None
    assert misfit(Schema("s", b"", SchemaType.STRING), [avro("int")], asked) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        b"7",
        b'{"type": "record", "name": "R"}',
        b'{"type": "record", "name": "int", "fields": []}',
        b'{"type": "array"}',
        b'"array"',
        b'{"type": "enum", "name": "E", "symbols": 7}',
        b'{"type": "record", "name": "R", "fields": [7]}',
        b'{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "aliases": [7]}]}',
        b"[" * 100_000,
        b'{"type":' * 9_000 + b'"int"' + b"}" * 9_000,
    ],
)
def test_a_schema_that_is_none_is_refused(data: bytes) -> None:
    """A broken schema is refused as the first of a topic and after another."""
    schema = Schema("s", data, SchemaType.AVRO)
    assert misfit(schema, [], Compatibility.FULL) is not None
    assert misfit(schema, [avro("int")], Compatibility.FULL) is not None


def test_key_and_value_are_compared_one_by_one() -> None:
    """Their types stand in the properties."""

    def pair(key: Schema, value: Schema, *kinds: str) -> Schema:
        data = b"".join(len(each.schema_data).to_bytes(4, "big") + each.schema_data for each in (key, value))
        names = ("key.schema.type", "value.schema.type")
        properties = [KeyValue(name, kind) for name, kind in zip(names, kinds, strict=True)]
        return Schema("s", data, SchemaType.KEY_VALUE, properties)

    number = Schema("n", b"", 8)
    old = pair(number, record_of(A), "INT32", "AVRO")
    assert misfit(pair(number, record_of(A, B_OPTIONAL), "INT32", "AVRO"), [old], Compatibility.FULL) is None
    assert misfit(pair(number, record_of(A, B), "INT32", "AVRO"), [old], Compatibility.FULL) is not None
    assert misfit(pair(number, record_of(A), "INT64", "AVRO"), [old], Compatibility.FULL) is not None
    assert misfit(Schema("s", b"\0\0\0\x09x", SchemaType.KEY_VALUE), [], Compatibility.FULL) is not None


def test_what_is_a_schema_and_when_two_are_the_same() -> None:
    """Spaces and the order of members do not make a version; bytes and AUTO_CONSUME are no schema."""
    one = Schema("s", b'{"type": "record", "name": "R", "fields": []}', SchemaType.AVRO)
    other = Schema("x", b'{"name":"R","type":"record","fields":[]}', SchemaType.AVRO)
    assert same(one, other)
    assert not same(one, Schema("s", one.schema_data, SchemaType.JSON))
    assert not same(Schema("s", b"1", 1), Schema("s", b" 1", 1))
    assert [number for number in (-4, -1, 0, 1, 4, 20, 21) if is_schema(Schema("", b"", number))] == [1, 4, 20]
    assert not is_schema(None)


ALIASES: st.SearchStrategy[Any] = st.lists(st.sampled_from(["R", "a", 7])) | st.none()
NAMES = st.sampled_from(["int", "long", "string", "null", "record", "enum", "fixed", "array", "map", "R", "x.R", "", 7])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    NAMES | st.none() | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {"type": inner},
            optional={
                "name": NAMES,
                "namespace": NAMES,
                "items": inner,
                "values": inner,
                "size": inner,
                "symbols": st.lists(NAMES, max_size=2) | inner,
                "default": inner,
                "fields": inner
                | st.lists(
                    st.fixed_dictionaries({"name": NAMES, "type": inner}, optional={"aliases": ALIASES}), max_size=3
                ),
            },
        )
    ),
    max_leaves=12,
)
"""Near to Avro schemas, and seldom one."""


@pytest.mark.series
@settings(
    max_examples=length("DUELOG_SCHEMA_EXAMPLES", 150, 1_000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(SCHEMAS, SCHEMAS, st.sampled_from(list(Compatibility)))
def test_whatever_a_client_calls_a_schema_gets_an_answer(new: Any, old: Any, asked: Compatibility) -> None:
    """It fits, or there is a reason."""
    assert isinstance(misfit(avro(new), [avro(old)], asked), (str, NoneType))
    assert isinstance(misfit(avro(new), [], asked), (str, NoneType))
    assert misfit(avro(new), [avro(new)], Compatibility.FULL) is None or misfit(avro(new), [], asked) is not None


@given(st.binary(max_size=40), st.integers(0, 22), st.binary(max_size=40))
def test_bytes_that_are_no_schema_get_an_answer(new: bytes, kind: int, old: bytes) -> None:
    """Arbitrary bytes of every schema type are judged, and raise nothing."""
    properties = [KeyValue("key.schema.type", "AVRO"), KeyValue("value.schema.type", "KEY_VALUE")]
    schemas = [Schema("s", data, kind, properties) for data in (new, old)]
    assert isinstance(misfit(schemas[0], schemas[1:], Compatibility.FULL), (str, NoneType))
