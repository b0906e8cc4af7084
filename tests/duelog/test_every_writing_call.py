"""A store open read-only: each call that changes something raises ReadOnly, and no byte of the store is another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from duelog import (
    DelayedStore,
    Documents,
    ManualClock,
    Message,
    MessageId,
    Policies,
    StoreConfig,
    SubscriptionAdmin,
    Topic,
)
from duelog.errors import ClosedError, ReadOnly
from tests.conftest import START_MS

CONFIG = StoreConfig(partition_ms=3_600_000)


@dataclass
class Opened:
    """A store open read-only, what is in it, and its bytes when it was opened."""

    store: DelayedStore
    topic: Topic
    subscription: SubscriptionAdmin
    message_id: MessageId


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a message, a subscription, a schedule and a document."""
    path = tmp_path_factory.mktemp("read_only") / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("a")
        topic.subscribe("s").close()
        topic.send(b"x", deliver_after=10)
        topic.every("daily", cron="0 9 * * *")
        store.documents.put("d", b"1")
    return path


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    """The store open read-only."""
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=True) as store:
        topic = store.topic("a")
        message = next(each for each in topic.scheduled() if each.payload == b"x")
        yield Opened(store, topic, topic.subscription("s"), message.message_id)


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a store with its bytes, but for LMDB's lock files, in which readers are registered."""
    return {str(each): each.read_bytes() for each in path.rglob("*") if each.is_file() and each.name != "lock.mdb"}


Call = Callable[[Opened], Any]

WRITES: dict[type, dict[str, Call]] = {
    DelayedStore: {
        "accept_clock": lambda it: it.store.accept_clock(),
        "create_topics": lambda it: it.store.create_topics(["b"]),
        "delete_topic": lambda it: it.store.delete_topic("a"),
        "flush": lambda it: it.store.flush(),
        "hand_over": lambda it: it.store.hand_over(),
        "on_topics": lambda it: it.store.on_topics(print),
        "purge_dead_letters": lambda it: it.store.purge_dead_letters([]),
        "remove_policies": lambda it: it.store.remove_policies(topic="a"),
        "report_to": lambda it: it.store.report_to(None),  # type: ignore[arg-type]  # it is not looked at
        "requeue_dead_letters": lambda it: it.store.requeue_dead_letters([]),
        "save_snapshots": lambda it: it.store.save_snapshots(),
        "send_batch": lambda it: it.store.send_batch([("b", Message(b"x"))]),
        "save_manifest": lambda it: it.store.save_manifest(),
        "set_policies": lambda it: it.store.set_policies(Policies(ttl_ms=5), topic="a"),
        "tick": lambda it: it.store.tick(),
        "transaction": lambda it: it.store.transaction(),
        "listen": lambda it: it.store.listen("localhost", 0, admit=lambda *_: lambda *_: None),
        "update_policies": lambda it: it.store.update_policies(topic="a", ttl_ms=5),
    },
    Topic: {
        "cancel": lambda it: it.topic.cancel(it.message_id),
        "cancel_batch": lambda it: it.topic.cancel_batch([it.message_id]),
        "cancel_key": lambda it: it.topic.cancel_key("k"),
        "cancel_keys": lambda it: it.topic.cancel_keys(["k"]),
        "clear_inline": lambda it: it.topic.clear_inline("s"),
        "create": lambda it: it.store.topic("b").create(),
        "every": lambda it: it.topic.every("hourly", cron="0 * * * *"),
        "fire_now": lambda it: it.topic.fire_now(it.message_id),
        "pause_schedule": lambda it: it.topic.pause_schedule("daily"),
        "producer": lambda it: it.topic.producer("p"),
        "put": lambda it: it.topic.put(b"x", done=print),
        "reader": lambda it: it.topic.reader(),
        "remove_schedule": lambda it: it.topic.remove_schedule("daily"),
        "reschedule": lambda it: it.topic.reschedule(it.message_id, deliver_after=1),
        "reschedule_batch": lambda it: it.topic.reschedule_batch([it.message_id], deliver_after=1),
        "resume_schedule": lambda it: it.topic.resume_schedule("daily"),
        "send": lambda it: it.topic.send(b"x"),
        "send_async": lambda it: it.topic.send_async(b"x"),
        "send_batch": lambda it: it.topic.send_batch([]),
        "send_payloads": lambda it: it.topic.send_payloads([b"x"]),
        "subscribe": lambda it: it.topic.subscribe("s"),
        "unsubscribe": lambda it: it.topic.unsubscribe("s"),
    },
    SubscriptionAdmin: {
        "expire": lambda it: it.subscription.expire(START_MS),
        "pause": lambda it: it.subscription.pause(),
        "reset": lambda it: it.subscription.reset("latest"),
        "resume": lambda it: it.subscription.resume(),
        "skip": lambda it: it.subscription.skip(1),
    },
    Documents: {
        "delete": lambda it: it.store.documents.delete("d"),
        "put": lambda it: it.store.documents.put("d", b"2"),
    },
}

READS: dict[type, set[str]] = {
    DelayedStore: {
        *("all_policies", "backup", "check", "clock", "close", "closed", "config", "dead_letters", "documents"),
        *("effective_policies", "kept_by", "open", "partitions", "path", "policies", "stats", "suspended", "topic"),
        *("calendar", "connections", "jobs", "overview", "receiving", "snapshots", "timeline", "topic_rows", "topics"),
        "timeline_by_topic",
    },
    Topic: {
        *("count", "exists", "get", "ledgers", "name", "position_of", "positions", "producer_number", "scheduled"),
        *("find", "keys", "schedules", "sender", "state", "stats", "subscription", "subscriptions"),
    },
    SubscriptionAdmin: {"name", "peek", "stats", "tasks", "topic"},
    Documents: {"get", "items"},
}


@pytest.mark.parametrize("face", WRITES, ids=lambda face: face.__name__)
def test_a_writing_call_raises_read_only_and_changes_nothing(opened: Opened, path: Path, face: type) -> None:
    """The error is of its own, and still one of those that programs caught before.

    A method that is new goes into one of the lists above: so no writing call is left without its test.
    """
    public = {name for name in dir(face) if not name.startswith("_")}
    assert public == WRITES[face].keys() | READS[face]
    assert not WRITES[face].keys() & READS[face]
    before = contents(path)
    for name, call in WRITES[face].items():
        with pytest.raises(ReadOnly, match="is open read-only: nothing can be changed") as caught:
            call(opened)
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, ClosedError)
        assert contents(path) == before, name
        assert opened.topic.state(opened.message_id) == "scheduled"
