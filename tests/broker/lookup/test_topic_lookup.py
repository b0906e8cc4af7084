"""LOOKUP, PARTITIONED_METADATA, names as clients give them, and opening topics for producers and consumers."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from duelog import DelayedStore, Topic
from duelog.broker.lookup.resources import AutoCreation, Defaults, NamespaceSettings
from duelog.broker.lookup.topic_address import (
    TopicAddress,
    namespace_of,
    partition_name,
    shown_subscription,
    stored_subscription,
)
from duelog.broker.protocol.commands import Lookup, LookupKind, MetadataResult, PartitionedMetadata
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.security.permissions import Action
from duelog.store.errors import CorruptRecord
from tests.broker.lookup.stage import BOTH, FORBIDDEN, PARTITIONED, Stage
from tests.broker.peers import FakePeer


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


def opened(stage: Stage, topic: str, action: Action = Action.PRODUCE, role: str | None = None,
           *, create: bool = True) -> Topic:  # fmt: skip
    """The topic that `open` gives after a start."""

    async def run() -> Topic:
        await stage.resources.load()
        peer = FakePeer()
        peer.role = role
        opened, partition = await stage.access.open(action, peer, topic, create)
        assert partition == TopicAddress.parse(opened.name).partition
        return opened

    return asyncio.run(run())


def refused(stage: Stage, topic: str, action: Action = Action.PRODUCE, role: str | None = None,
            *, create: bool = True) -> ServerError:  # fmt: skip
    """The error of an `open` that gives nothing."""
    with pytest.raises(Refused) as caught:
        opened(stage, topic, action, role, create=create)
    return caught.value.error


def test_a_topic_comes_into_being_when_it_is_opened_where_its_namespace_makes_topics(store: DelayedStore) -> None:
    """Unless the client asks not to make it; those that are there are opened."""
    stage = Stage(store)
    assert refused(stage, "t", create=False) == ServerError.TOPIC_NOT_FOUND
    assert stage.topics() == []
    assert opened(stage, "t").name == "persistent://public/default/t"
    assert stage.topics() == ["persistent://public/default/t"]
    assert opened(stage, "t", create=False).exists()
    stage.set("public/default", auto_creation=FORBIDDEN)
    assert refused(stage, "u") == ServerError.TOPIC_NOT_FOUND
    assert opened(stage, "t").exists()


def test_partitions_are_opened_and_their_topic_is_not(store: DelayedStore) -> None:
    """Only its own partitions exist; `-partition-N` of a topic that is not partitioned is a plain topic."""
    stage = Stage(store)
    stage.set("public/default", auto_creation=PARTITIONED)
    stage.ask(stage.lookup.partitions, PartitionedMetadata("t", 1))
    assert opened(stage, "t-partition-2").name.endswith("/t-partition-2")
    assert refused(stage, "t-partition-3") == ServerError.NOT_ALLOWED
    assert refused(stage, "t") == ServerError.NOT_ALLOWED
    assert opened(stage, "plain-partition-9").exists()


def test_rights_are_by_action(store: DelayedStore) -> None:
    """A refusal makes no topic; an administrator of the tenant needs no grant."""
    stage = Stage(store, secured=True)
    stage.set("public/default", permissions={"w": frozenset({Action.PRODUCE}), "r": frozenset({Action.CONSUME})})
    assert refused(stage, "t", Action.PRODUCE, "r") == ServerError.AUTHORIZATION
    assert refused(stage, "t", Action.CONSUME, "w") == ServerError.AUTHORIZATION
    assert stage.topics() == []
    assert opened(stage, "t", Action.CONSUME, "r").exists()
    assert opened(stage, "t", Action.PRODUCE, "w").exists()
    assert opened(stage, "t", Action.PRODUCE, "root").exists()


def test_an_epoch_is_kept_by_topic(store: DelayedStore) -> None:
    """Over a restart, too."""
    stage = Stage(store)
    assert stage.facts.epoch("t") is None
    for epoch in (0, 1, 7):
        stage.facts.set_epoch("t", epoch)
    assert Stage(store).facts.epoch("persistent://public/default/t") == 7
    assert stage.facts.epoch("u") is None
    stage.facts.forget("t")
    assert stage.facts.epoch("t") is None


def test_deduplication_is_asked_for_by_the_topic_then_the_namespace_then_the_broker(store: DelayedStore) -> None:
    """A partition goes by its partitioned topic."""
    stage = Stage(store)

    async def set_topic(value: bool) -> None:
        await stage.resources.deduplication.change("public/default/t", lambda _: value)

    assert not stage.facts.deduplicates("t")
    stage.set("public/default", deduplication=True)
    assert stage.facts.deduplicates("t-partition-1")
    asyncio.run(set_topic(False))
    assert not stage.facts.deduplicates("t-partition-1")
    assert stage.facts.deduplicates("u")


async def test_two_changes_of_one_document_at_a_time_are_both_kept(store: DelayedStore) -> None:
    """The one that comes second is made of what the first one left."""
    first, second = Stage(store), Stage(store)
    overtaken = [True]

    def change(before: NamespaceSettings | None) -> NamespaceSettings:
        assert before is not None
        if overtaken.pop() if overtaken else False:
            store.documents.put("namespace/public/default", b'{"deduplication": true, "autoCreation": null, '
                                b'"compatibility": null, "permissions": {}}')  # fmt: skip
        return replace(before, auto_creation=FORBIDDEN)

    await first.resources.load()
    await first.resources.namespaces.change("public/default", change)
    await second.resources.load()
    expected = NamespaceSettings(auto_creation=FORBIDDEN, deduplication=True)
    for stage in (first, second):
        assert stage.resources.namespaces.get("public/default") == expected


def test_a_document_that_cannot_be_read_is_told_by_its_key(store: DelayedStore) -> None:
    """At the start."""
    store.documents.put("namespace/a/b", b'{"permissions": []}')
    stage = Stage(store)
    with pytest.raises(CorruptRecord, match="namespace/a/b"):
        asyncio.run(stage.resources.load())


@pytest.mark.parametrize(
    ("text", "full", "base", "partition"),
    [
        ("t", "persistent://public/default/t", "persistent://public/default/t", -1),
        ("a/b/t", "persistent://a/b/t", "persistent://a/b/t", -1),
        ("persistent://a/b/t.*[x]+", "persistent://a/b/t.*[x]+", "persistent://a/b/t.*[x]+", -1),
        ("t-partition-0", "persistent://public/default/t-partition-0", "persistent://public/default/t", 0),
        ("t-partition-12", "persistent://public/default/t-partition-12", "persistent://public/default/t", 12),
        (
            "t-partition-1-partition-2",
            "persistent://public/default/t-partition-1-partition-2",
            "persistent://public/default/t-partition-1",
            2,
        ),
    ],
)
def test_a_name_means_a_topic_and_a_partition(text: str, full: str, base: str, partition: int) -> None:
    """Full and short forms."""
    address = TopicAddress.parse(text)
    assert (str(address.name), str(address.base), address.partition) == (full, base, partition)


@pytest.mark.parametrize(
    "local", ["t-partition-", "t-partition-01", "t-partition-x", "t-partition--1", "-partition-1", "t-partition-1-DLQ"]
)
def test_a_name_that_only_resembles_a_partition_is_a_plain_topic(local: str) -> None:
    """Numbers are written in one way, behind a name."""
    address = TopicAddress.parse(local)
    assert address.partition == -1
    assert address.base == address.name


INVALID, NOT_ALLOWED = ServerError.INVALID_TOPIC_NAME, ServerError.NOT_ALLOWED
BROKEN = ("", "a/b", "a/b/c/d", "persistent://a/b", "persistent://a/b/", "kafka://a/b/c", "a b/c/d", "x\0y", "t" * 400)
REFUSED: list[tuple[Callable[[str], object], tuple[str, ...], ServerError]] = [
    (TopicAddress.parse, BROKEN, INVALID),  # also a name whose key the store could not hold
    (TopicAddress.parse, ("non-persistent://public/default/t",), NOT_ALLOWED),  # nothing here forgets
    (lambda base: partition_name(TopicAddress.parse(base).name, 0), ("t" * 370,), INVALID),
    (namespace_of, ("", "public", "a/b/c", "a b/c"), INVALID),
    (stored_subscription, ("", "a\nb", "/" * 100), NOT_ALLOWED),  # clients take that for final
]


def test_a_name_that_breaks_the_rules_is_refused() -> None:
    """Of a topic, a partition, a namespace, a subscription; before anything is made."""
    assert namespace_of("a/b") == "a/b"
    for parse, texts, error in REFUSED:
        for text in texts:
            with pytest.raises(Refused) as caught:
                parse(text)
            assert caught.value.error == error, text


@pytest.mark.parametrize("name", ["s", "a/b", "50%", "a%2Fb", "%25/%2F", "/", "ü/ü"])
def test_a_subscription_is_shown_as_it_was_named(name: str) -> None:
    """The store takes no `/`."""
    stored = stored_subscription(name)
    assert "/" not in stored
    assert shown_subscription(stored) == name
