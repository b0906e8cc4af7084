"""LOOKUP and PARTITIONED_METADATA."""

from __future__ import annotations

import pytest

from duelog import DelayedStore
from duelog.broker.lookup.resources import Defaults
from duelog.broker.protocol.commands import Lookup, LookupKind, MetadataResult, PartitionedMetadata
from duelog.broker.protocol.failures import ServerError
from tests.broker.lookup.stage import BOTH, FORBIDDEN, PARTITIONED, Stage
from tests.conftest import OpenStore


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """An empty store."""
    return open_store()


def test_a_lookup_answers_with_both_addresses_and_makes_nothing(store: DelayedStore) -> None:
    """Also for a pattern's name, which no topic has."""
    stage = Stage(store)
    answer = stage.ask(stage.lookup.lookup, Lookup("persistent://public/default/a.*", 7))
    assert (answer.request_id, answer.response, answer.authoritative) == (7, LookupKind.CONNECT, True)
    assert (answer.url, answer.url_tls) == ("pulsar://here:6650", "pulsar+ssl://here:6651")
    assert stage.topics() == []


def test_a_listener_has_its_own_address(store: DelayedStore) -> None:
    """One that is not configured is told in the words that C++ clients look for."""
    stage = Stage(store)
    assert stage.ask(stage.lookup.lookup, Lookup("t", 1, listener="inner")).url == "pulsar://inner:6650"
    answer = stage.ask(stage.lookup.lookup, Lookup("t", 1, listener="outer"))
    assert (answer.response, answer.error) == (LookupKind.FAILED, ServerError.SERVICE_NOT_READY)
    assert "the broker do not have test listener" in answer.message


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        ("a/b", ServerError.INVALID_TOPIC_NAME),
        ("t" * 400, ServerError.INVALID_TOPIC_NAME),
        ("non-persistent://public/default/t", ServerError.NOT_ALLOWED),
        ("persistent://public/unknown/t", ServerError.TOPIC_NOT_FOUND),
        ("persistent://unknown/default/t", ServerError.TOPIC_NOT_FOUND),
    ],
)
def test_a_name_that_cannot_be_answered_for_is_told_why(store: DelayedStore, topic: str, error: ServerError) -> None:
    """By both commands alike."""
    stage = Stage(store)
    answer = stage.ask(stage.lookup.lookup, Lookup(topic, 1))
    assert (answer.response, answer.error) == (LookupKind.FAILED, error)
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata(topic, 1))
    assert (answer.response, answer.error) == (MetadataResult.FAILED, error)
    assert stage.topics() == []


def test_a_topic_that_is_not_there_has_no_partitions_and_is_not_made(store: DelayedStore) -> None:
    """Its first producer or consumer makes it; a client that asks not to make it learns that it is not there."""
    stage = Stage(store)
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1))
    assert (answer.response, answer.partitions) == (MetadataResult.SUCCESS, 0)
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 2, auto_create=False))
    assert answer.error == ServerError.TOPIC_NOT_FOUND
    assert stage.topics() == []
    store.topic("t").send(b"m")
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 3, auto_create=False))
    assert (answer.response, answer.partitions) == (MetadataResult.SUCCESS, 0)


def test_a_namespace_that_makes_partitioned_topics_makes_one(store: DelayedStore) -> None:
    """With its partitions, once; not for a client that asks not to, and not from the name of a partition."""
    stage = Stage(store)
    stage.set("public/default", auto_creation=PARTITIONED)
    asked = PartitionedMetadata("t", 1, auto_create=False)
    assert stage.ask(stage.lookup.partitions, asked).error == ServerError.TOPIC_NOT_FOUND
    assert stage.ask(stage.lookup.partitions, PartitionedMetadata("u-partition-0", 1)).partitions == 0
    assert stage.topics() == []
    for _ in range(2):
        assert stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1)).partitions == 3
    assert stage.topics() == [f"persistent://public/default/t-partition-{number}" for number in range(3)]
    assert stage.ask(stage.lookup.partitions, asked).partitions == 3
    assert stage.ask(stage.lookup.partitions, PartitionedMetadata("t-partition-2", 1)).partitions == 0


def test_a_partition_is_answered_for_though_it_was_deleted_and_no_topics_are_made(store: DelayedStore) -> None:
    """Its topic has it; a partition beyond is not there."""
    stage = Stage(store)
    stage.set("public/default", auto_creation=PARTITIONED)
    stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1))
    stage.set("public/default", auto_creation=FORBIDDEN)
    store.delete_topic("t-partition-1")
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t-partition-1", 1))
    assert (answer.response, answer.partitions) == (MetadataResult.SUCCESS, 0)
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t-partition-3", 1))
    assert answer.error == ServerError.TOPIC_NOT_FOUND


def test_a_plain_topic_stays_plain_where_partitioned_ones_are_made(store: DelayedStore) -> None:
    """An existing topic keeps its partitions, whatever the policy says."""
    stage = Stage(store)
    stage.set("public/default", auto_creation=PARTITIONED)
    store.topic("t").send(b"m")
    assert stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1)).partitions == 0


def test_a_namespace_that_makes_no_topics_answers_that_there_is_none(store: DelayedStore) -> None:
    """The namespace's setting stands before the broker's."""
    stage = Stage(store, Defaults(auto_creation=PARTITIONED))
    stage.set("public/default", auto_creation=FORBIDDEN)
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1))
    assert (answer.response, answer.error) == (MetadataResult.FAILED, ServerError.TOPIC_NOT_FOUND)
    assert stage.topics() == []


def test_a_client_without_a_right_sees_and_changes_nothing(store: DelayedStore) -> None:
    """The answer is the same for what is there, what is not, and a namespace that is not."""
    stage = Stage(store, Defaults(auto_creation=PARTITIONED), secured=True)
    stage.set("public/default", permissions={"reader": BOTH})
    store.topic("there").send(b"m")
    for topic in ("there", "not-there", "public/unknown/t"):
        for role in ("stranger", None):
            answer = stage.ask(stage.lookup.partitions, PartitionedMetadata(topic, 1), role)
            assert answer.error == ServerError.AUTHORIZATION
            assert stage.ask(stage.lookup.lookup, Lookup(topic, 1), role).error == ServerError.AUTHORIZATION
    assert stage.topics() == ["persistent://public/default/there"]
    assert stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1), "reader").partitions == 3
    assert stage.ask(stage.lookup.lookup, Lookup("t", 1), "root").response == LookupKind.CONNECT


def test_a_partitioned_topic_is_there_after_a_restart(store: DelayedStore) -> None:
    """It is a document."""
    stage = Stage(store, Defaults(auto_creation=PARTITIONED))
    stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1))
    again = Stage(store)
    assert again.ask(again.lookup.partitions, PartitionedMetadata("t", 1, auto_create=False)).partitions == 3
