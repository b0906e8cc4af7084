"""Settings that change while the broker runs."""

from typing import cast

import pytest

from duelog import DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.listing.memory_limits import NAMES, DualMemoryLimiter, DynamicSettings, Limits
from duelog.store.errors import InvalidArgument
from tests.conftest import OpenStore

HEAP = "maxTopicListInFlightHeapMemSizeMB"
TIMEOUT = "maxTopicListInFlightDirectMemSizePermitsAcquireTimeoutMillis"
QUEUE = "maxTopicListInFlightHeapMemSizePermitsAcquireQueueSize"


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """An empty one."""
    return open_store()


def settings_of(store: DelayedStore) -> DynamicSettings:
    """Those of a broker that has its defaults."""
    return DynamicSettings(store.documents, DEFAULTS, cast(DualMemoryLimiter, LIMITS))


class Heard:
    """A limiter that keeps what it is told."""

    def set_limits(self, heap: Limits, direct: Limits) -> None:
        self.limits = (heap, direct)


LIMITS = Heard()
DEFAULTS = BrokerConfig().list_limits()


def test_the_six_names_are_those_that_operators_know() -> None:
    """And each is a setting of the configuration too, with its default."""
    assert DEFAULTS.keys() == set(NAMES)
    assert DEFAULTS == {
        "maxTopicListInFlightHeapMemSizeMB": 100,
        "maxTopicListInFlightDirectMemSizeMB": 100,
        "maxTopicListInFlightHeapMemSizePermitsAcquireTimeoutMillis": 25_000,
        "maxTopicListInFlightDirectMemSizePermitsAcquireTimeoutMillis": 25_000,
        "maxTopicListInFlightHeapMemSizePermitsAcquireQueueSize": 1_000,
        "maxTopicListInFlightDirectMemSizePermitsAcquireQueueSize": 1_000,
    }


async def test_what_is_set_is_in_force_at_once_and_after_a_restart(store: DelayedStore) -> None:
    """Over the configuration; deleted, the configuration's holds again."""
    first = settings_of(store)
    await first.load()
    assert (first.values(), LIMITS.limits) == ({}, (Limits(), Limits()))
    await first.set(HEAP, "7")
    assert LIMITS.limits == (Limits(7 << 20), Limits())
    await first.set(QUEUE, "0")
    await first.set(TIMEOUT, "9")
    assert first.values() == {HEAP: "7", QUEUE: "0", TIMEOUT: "9"}
    again = settings_of(store)
    await again.load()
    assert (again.values(), LIMITS.limits) == (first.values(), (Limits(7 << 20, max_queue=0), Limits(timeout_ms=9)))
    await again.delete(HEAP)
    await again.delete(HEAP)
    assert LIMITS.limits[0] == Limits(max_queue=0)


REFUSED = {HEAP: ["-1", "", "1.5", "x", "9" * 30, "²"], TIMEOUT: ["0"], "other": ["1"]}


async def test_what_cannot_be_set_is_told_by_name_and_value(store: DelayedStore) -> None:
    """And nothing changes."""
    settings = settings_of(store)
    await settings.load()
    for name, texts in REFUSED.items():
        for text in texts:
            with pytest.raises(InvalidArgument, match=name):
                await settings.set(name, text)
    assert settings.values() == {}
