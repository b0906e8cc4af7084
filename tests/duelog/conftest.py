"""Fixtures that most tests of the engine begin with: a store, its topic `t`, and a consumer of subscription `s`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from duelog import DelayedStore, StoreConfig, Subscription, Topic
from tests.conftest import OpenStore, applied
from tests.duelog.reaching import Reached
from tests.duelog.store_state import records


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module with FACES = True by both faces: of an open store, and of one that is connected to.

    A test marked `inside` is of the open store alone.
    """
    if "face" in metafunc.fixturenames and getattr(metafunc.module, "FACES", False):
        inside = metafunc.definition.get_closest_marker("inside") is not None
        metafunc.parametrize("face", ["open"] if inside else ["open", "connected"], indirect=True)


@pytest.fixture
def face(request: pytest.FixtureRequest) -> str:
    """By which face the store is used: "open" or "connected"."""
    return getattr(request, "param", "open")


@pytest.fixture
def store(open_store: OpenStore, config: StoreConfig, face: str) -> Iterator[DelayedStore]:
    """An empty store on the manual clock."""
    if face == "open":
        yield open_store(config=config)
        return
    inside = open_store(config=replace(config, control=True))
    with Reached(inside) as reached:
        yield reached


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
