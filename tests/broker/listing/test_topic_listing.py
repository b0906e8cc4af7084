"""GET_TOPICS_OF_NAMESPACE."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from duelog import DelayedStore
from duelog.broker.listing import topic_listing
from duelog.broker.listing.topic_filter import topics_hash
from duelog.broker.listing.topic_listing import names_of
from duelog.broker.protocol.commands import Error, GetTopics, GetTopicsResponse, TopicsMode
from duelog.broker.protocol.failures import ServerError
from duelog.broker.protocol.peer import Peer
from duelog.broker.security.permissions import Action
from tests.broker.lookup.stage import AnsweredPeer, Stage
from tests.conftest import OpenStore

A, B, P = (f"persistent://public/default/{name}" for name in ("a", "b", "p-partition-0"))


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """With topics of two namespaces."""
    store = open_store()
    for name in ("b", "a", "p-partition-0", "public/other/c"):
        store.topic(name).send(b"m")
    return store


def listed(stage: Stage, pattern: str | None = None, topics_hash: str | None = None,
           mode: TopicsMode = TopicsMode.PERSISTENT, role: str | None = None) -> GetTopicsResponse:  # fmt: skip
    """The answer for public/default."""
    command = GetTopics(1, "public/default", mode, pattern, topics_hash)
    answer = stage.ask(stage.listing.topics, command, role)
    assert isinstance(answer, GetTopicsResponse)
    return answer


def test_a_namespace_is_listed_with_its_hash(store: DelayedStore) -> None:
    """In order, unfiltered, partitions by their own names."""
    answer = listed(Stage(store))
    assert answer == GetTopicsResponse(1, [A, B, P], False, topics_hash([A, B, P]), True)


def test_a_pattern_is_filtered_by_the_broker(store: DelayedStore) -> None:
    """The hash is that of what is listed."""
    answer = listed(Stage(store), "persistent://public/default/(b|p)")
    assert answer == GetTopicsResponse(1, [B, P], True, topics_hash([B, P]), True)


@pytest.mark.parametrize("pattern", ["(", "persistent://public/default/" + "(a|" * 8 + "b"])
def test_a_pattern_that_the_broker_does_not_take_is_left_to_the_client(store: DelayedStore, pattern: str) -> None:
    """Unreadable, or over 50 characters."""
    assert listed(Stage(store), pattern) == GetTopicsResponse(1, [A, B, P], False, topics_hash([A, B, P]), True)


def test_a_client_that_has_the_list_is_told_that_it_has_not_changed(store: DelayedStore) -> None:
    """By the hash, which it is sent again."""
    stage = Stage(store)
    before = listed(stage)
    assert listed(stage, topics_hash=before.topics_hash) == GetTopicsResponse(1, (), False, before.topics_hash, False)
    store.topic("new").send(b"m")
    assert listed(stage, topics_hash=before.topics_hash).changed


def test_there_are_no_topics_that_are_not_persistent(store: DelayedStore) -> None:
    """All of them are persistent ones."""
    stage = Stage(store)
    assert not listed(stage, mode=TopicsMode.NON_PERSISTENT).topics
    assert len(listed(stage, mode=TopicsMode.ALL).topics) == 3


def test_a_listing_needs_a_right_and_a_namespace(store: DelayedStore) -> None:
    """Either right; and a name of two parts."""
    stage = Stage(store, secured=True)
    stage.set("public/default", permissions={"r": frozenset({Action.CONSUME}), "w": frozenset({Action.PRODUCE})})
    for role in ("r", "w", "root"):
        assert len(listed(stage, role=role).topics) == 3
    answer = stage.ask(stage.listing.topics, GetTopics(1, "public/default"), "stranger")
    assert isinstance(answer, Error)
    assert (answer.request_id, answer.error) == (1, ServerError.AUTHORIZATION)
    answer = stage.ask(stage.listing.topics, GetTopics(1, "public"), "root")
    assert answer.error == ServerError.INVALID_TOPIC_NAME


async def test_requests_at_one_time_share_one_list(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace is read once for them."""
    stage = Stage(store)
    reads: list[str] = []

    def counted(store: DelayedStore, namespace: str) -> list[str]:
        reads.append(namespace)
        return names_of(store, namespace)

    monkeypatch.setattr(topic_listing, "names_of", counted)
    asked = GetTopics(1, "public/default")
    # a size that is known: else the first asker goes ahead of the others
    await stage.listing.topics(cast(Peer, AnsweredPeer()), asked)
    reads.clear()
    peers = [AnsweredPeer() for _ in range(20)]
    await asyncio.gather(*(stage.listing.topics(cast(Peer, peer), asked) for peer in peers))
    assert reads == ["public/default"]
    assert [len(answer.topics) for peer in peers for answer in cast(list[GetTopicsResponse], peer.answers)] == [3] * 20
