"""Fixtures that most tests of the engine begin with: a store, its topic `t`, and a consumer of subscription `s`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duelog import DelayedStore, StoreConfig, Subscription, Topic
from tests.conftest import OpenStore, applied
from tests.duelog.store_state import records


@pytest.fixture
def config(request: pytest.FixtureRequest) -> StoreConfig:
    """The configuration of `store`: CONFIG of the test's module where it has one, or a parameter of the test."""
    return getattr(request.module, "CONFIG", StoreConfig())


@pytest.fixture
def store(open_store: OpenStore, config: StoreConfig) -> DelayedStore:
    """An empty store on the manual clock."""
    return open_store(config=config)


@pytest.fixture
def topic(store: DelayedStore) -> Topic:
    """A topic, which the first message or subscription creates."""
    return store.topic("t")


@pytest.fixture
def reader(topic: Topic) -> Subscription:
    """A consumer of an exclusive subscription."""
    return topic.subscribe("s")


@pytest.fixture
def unchanged(store: DelayedStore, topic: Topic) -> Iterator[None]:
    """With a fired message, a delayed one and a subscription: the test changes no record, directory or file."""
    topic.subscribe("s").close()
    topic.send(b"now")
    topic.send(b"later", deliver_after=60)
    applied(store)
    before = records(store)
    yield
    if not store.closed:
        assert records(store) == before
