"""A store that a test of bad input must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duelog import DelayedStore, StoreConfig, Subscription, Topic
from tests.conftest import OpenStore
from tests.duelog.store_state import records

CONFIG = StoreConfig(partition_ms=3_600_000, max_message_bytes=1000)


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store with a topic, a subscription, a fired message and a delayed one."""
    store = open_store(config=CONFIG)
    topic = store.topic("known")
    topic.subscribe("reader").close()
    topic.send(b"now")
    topic.send(b"later", deliver_after=60)
    return store


@pytest.fixture
def topic(store: DelayedStore) -> Topic:
    """The topic that exists."""
    return store.topic("known")


@pytest.fixture
def reader(topic: Topic) -> Iterator[Subscription]:
    """A consumer of the subscription that exists."""
    with topic.subscribe("reader") as subscription:
        yield subscription


@pytest.fixture
def unchanged(store: DelayedStore) -> Iterator[None]:
    """Nothing that a test with this fixture does changes a record, or makes or removes a file."""
    before = records(store)
    yield
    if not store.closed:
        assert records(store) == before
