"""Opening topics for producers and consumers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from duelog import DelayedStore, Topic
from duelog.broker.lookup.resources import NamespaceSettings
from duelog.broker.protocol.commands import PartitionedMetadata
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.security.permissions import Action
from duelog.store.errors import CorruptRecord
from tests.broker.lookup.stage import FORBIDDEN, PARTITIONED, Stage
from tests.conftest import OpenStore


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """An empty store."""
    return open_store()


def opened(stage: Stage, topic: str, action: Action = Action.PRODUCE, role: str | None = None,
           *, create: bool = True) -> Topic:  # fmt: skip
    """The topic that `open` gives after a start."""

    async def run() -> Topic:
        await stage.resources.load()
        opened, address = await stage.access.open(role, topic, action, create=create)
        assert opened.name == str(address.name)
        return opened

    return asyncio.run(run())


def refused(stage: Stage, topic: str, action: Action = Action.PRODUCE, role: str | None = None,
            *, create: bool = True) -> ServerError:  # fmt: skip
    """The error of an `open` that gives nothing."""
    with pytest.raises(Refused) as caught:
        opened(stage, topic, action, role, create=create)
    return caught.value.error


def test_a_topic_comes_into_being_when_it_is_opened(store: DelayedStore) -> None:
    """Unless the client asks not to make it."""
    stage = Stage(store)
    assert refused(stage, "t", create=False) == ServerError.TOPIC_NOT_FOUND
    assert stage.topics() == []
    assert opened(stage, "t").name == "persistent://public/default/t"
    assert stage.topics() == ["persistent://public/default/t"]
    assert opened(stage, "t", create=False).exists()


def test_a_namespace_without_auto_creation_makes_no_topic_but_opens_those_there_are(store: DelayedStore) -> None:
    """For all clients."""
    stage = Stage(store)
    stage.set("public/default", auto_creation=FORBIDDEN)
    store.topic("there").send(b"m")
    assert refused(stage, "t") == ServerError.TOPIC_NOT_FOUND
    assert opened(stage, "there").exists()


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
    store.documents.put("namespace/a/b", b"{}")
    stage = Stage(store)
    with pytest.raises(CorruptRecord, match="namespace/a/b"):
        asyncio.run(stage.resources.load())
