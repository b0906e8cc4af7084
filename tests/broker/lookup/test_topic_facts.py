"""GET_SCHEMA and GET_OR_CREATE_SCHEMA, and schemas of producers and consumers."""

from __future__ import annotations

import json

import pytest

from duelog import DelayedStore
from duelog.broker.protocol.commands import GetOrCreateSchema, GetSchema, KeyValue, Schema
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.security.permissions import Action
from tests.broker.lookup.stage import ANY, BOTH, Stage
from tests.conftest import OpenStore

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


def test_versions_count_from_zero_and_the_same_schema_keeps_its_version(stage: Stage) -> None:
    """Also one that another followed."""
    assert created(stage, record("a")) == version(0)
    assert created(stage, record("a", "b")) == version(1)
    assert created(stage, record("a")) == version(0)
    assert created(stage, record("a", "b", "c")) == version(2)


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


@pytest.mark.parametrize("asked", [GetSchema(1, "t", version(9)), GetSchema(1, "u"), GetSchema(1, "public/none/t")])
def test_a_schema_that_is_not_there_is_not_found(stage: Stage, asked: GetSchema) -> None:
    """In the answer's own form."""
    created(stage, STRING)
    answer = stage.ask(stage.facts.get_schema, asked)
    assert (answer.request_id, answer.error, answer.schema) == (1, ServerError.TOPIC_NOT_FOUND, None)


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


def test_a_topic_that_is_not_there_gets_no_schema(stage: Stage) -> None:
    """A producer makes it, not a question."""
    answer = stage.ask(stage.facts.get_or_create_schema, GetOrCreateSchema(1, "u", STRING))
    assert answer.error == ServerError.TOPIC_NOT_FOUND


def test_partitions_share_the_schemas_of_their_topic(stage: Stage) -> None:
    """Each stands for all."""
    stage.store.topic("p-partition-0").send(b"m")
    assert created(stage, record("a"), "p-partition-0") == version(0)
    assert stage.facts.schema_version("p-partition-1", record("a", "b")) == version(1)
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "p")).schema_version == version(1)
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "t")).error == ServerError.TOPIC_NOT_FOUND


def test_a_consumer_brings_the_first_schema_and_then_has_to_read_the_last(stage: Stage) -> None:
    """It adds no version; bytes read everything."""
    stage.facts.check_schema("t", record("a"))
    stage.facts.check_schema("t", record("a", "b"))
    stage.facts.check_schema("t", Schema("", b"", 0))
    assert stage.ask(stage.facts.get_schema, GetSchema(1, "t")).schema_version == version(0)


def test_bytes_are_no_version(stage: Stage) -> None:
    """A producer of bytes is let in beside any schema."""
    created(stage, record("a"))
    assert stage.facts.schema_version("t", Schema("", b"", -1)) == b""


def test_a_deleted_topics_schemas_go_with_it(stage: Stage) -> None:
    """And versions begin anew."""
    created(stage, record("a"))
    created(stage, record("b"))
    stage.facts.forget("t")
    assert created(stage, STRING) == version(0)


def test_storing_needs_the_right_to_produce_and_reading_either(open_store: OpenStore) -> None:
    """A refusal stores nothing."""
    store = open_store()
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
