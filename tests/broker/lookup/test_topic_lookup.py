"""LOOKUP and PARTITIONED_METADATA."""

from __future__ import annotations

import pytest

from duelog import DelayedStore
from duelog.broker.lookup.resources import AutoCreation, Defaults
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


@pytest.mark.parametrize(
    ("creation", "there", "asked", "answers", "made"),
    [
        (None, (), "t", (0, ServerError.TOPIC_NOT_FOUND), 0),
        (None, ("t",), "t", (0, 0), 0),
        (PARTITIONED, (), "t", (3, 3), 3),
        (PARTITIONED, (), "u-partition-0", (0, ServerError.TOPIC_NOT_FOUND), 0),
        (PARTITIONED, ("t",), "t", (0, 0), 0),
        (FORBIDDEN, (), "t", (ServerError.TOPIC_NOT_FOUND,) * 2, 0),
    ],
    ids=["makes-none", "plain", "makes-partitions", "no-partition", "stays-plain", "forbidden"],
)
def test_a_topic_has_the_partitions_that_it_has_or_that_its_namespace_makes(
    store: DelayedStore,
    creation: AutoCreation | None,
    there: tuple[str, ...],
    asked: str,
    answers: tuple[int | ServerError, int | ServerError],
    made: int,
) -> None:
    """Its first producer makes a plain one; a client that asks not to make any, before and after, learns what is there.

    The namespace's setting stands before the broker's; a topic that is there keeps its partitions.
    """
    stage = Stage(store, Defaults(auto_creation=PARTITIONED if creation is FORBIDDEN else AutoCreation()))
    stage.set("public/default", auto_creation=creation)
    for name in there:
        store.topic(name).send(b"m")

    def ask(auto_create: bool) -> int | ServerError:
        answer = stage.ask(stage.lookup.partitions, PartitionedMetadata(asked, 1, auto_create=auto_create))
        assert answer.response == (MetadataResult.FAILED if answer.error else MetadataResult.SUCCESS)
        return ServerError(answer.error) if answer.error else int(answer.partitions)

    assert ask(False) == (0 if there else ServerError.TOPIC_NOT_FOUND)
    assert (ask(True), ask(True), ask(False)) == (answers[0], *answers)
    assert len(stage.topics()) == len(there) + made


def test_a_partition_is_answered_for_though_it_was_deleted_and_no_topics_are_made(store: DelayedStore) -> None:
    """Its topic has it, after a restart, too; a partition beyond is not there."""
    before = Stage(store)
    before.set("public/default", auto_creation=PARTITIONED)
    before.ask(before.lookup.partitions, PartitionedMetadata("t", 1))
    before.set("public/default", auto_creation=FORBIDDEN)
    store.delete_topic("t-partition-1")
    stage = Stage(store)
    assert stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1)).partitions == 3
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t-partition-1", 1))
    assert (answer.response, answer.partitions) == (MetadataResult.SUCCESS, 0)
    answer = stage.ask(stage.lookup.partitions, PartitionedMetadata("t-partition-3", 1))
    assert answer.error == ServerError.TOPIC_NOT_FOUND


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
