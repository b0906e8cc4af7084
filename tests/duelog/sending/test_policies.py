"""Delay policies of a store: kept, looked up, and held against what is sent and rescheduled."""

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message
from duelog.errors import DelayTooLong, InvalidArgument
from duelog.store.policy.policies import DELAY_FIELDS
from tests.conftest import START_MS, OpenStore

Policies = DelayedDeliveryPolicies


def due_ms(store: DelayedStore, topic: str, **asked: int) -> int:
    """When a message is due that asks for this."""
    stored = store.topic(topic).get(store.topic(topic).send(b"x", **asked))  # type: ignore[arg-type]
    assert stored is not None
    return stored.due_ms


def test_policies_are_kept_over_a_restart_at_every_scope(store: DelayedStore, open_store: OpenStore) -> None:
    """Store, namespace and topic each keep their own."""
    store.set_policies(Policies(tick_time_ms=1))
    store.set_policies(Policies(max_delivery_delay_ms=2), namespace="shop/mail")
    store.set_policies(Policies(fixed_delivery_delay_ms=3), topic="shop/mail/t")
    store.close()
    store = open_store()
    assert store.all_policies() == {
        "store": Policies(tick_time_ms=1),
        "namespace shop/mail": Policies(max_delivery_delay_ms=2),
        "topic persistent://shop/mail/t": Policies(fixed_delivery_delay_ms=3),
    }
    effective = store.effective_policies("shop/mail/t")
    assert (effective.tick_time_ms, effective.max_delivery_delay_ms, effective.fixed_delivery_delay_ms) == (1, 2, 3)
    assert {name: effective.set_at[name] for name in DELAY_FIELDS} == {
        "active": "default",
        "tick_time_ms": "store",
        "max_delivery_delay_ms": "namespace shop/mail",
        "fixed_delivery_delay_ms": "topic persistent://shop/mail/t",
    }


def test_a_batch_with_one_delay_too_long_is_refused_in_full(store: DelayedStore) -> None:
    """Nothing of it is stored, and the error has the limit, what was asked and where the limit was set."""
    store.set_policies(Policies(max_delivery_delay_ms=1_000))
    with pytest.raises(DelayTooLong) as caught:
        store.topic("t").send_batch([Message(b"a", deliver_after=1), Message(b"b", deliver_after=2), Message(b"c")])
    assert (caught.value.asked_ms, caught.value.limit_ms, caught.value.set_at) == (2_000, 1_000, "store")
    assert not store.topic("t").exists()
    store.set_policies(Policies(max_delivery_delay_ms=0), topic="t")
    assert len(store.topic("t").send_batch([Message(b"b", deliver_after=2)])) == 1


def test_a_fixed_delay_cannot_be_set_for_the_whole_store(store: DelayedStore) -> None:
    """PIP-437 has it for namespaces and topics."""
    with pytest.raises(InvalidArgument, match="fixed_delivery_delay_ms"):
        store.set_policies(Policies(fixed_delivery_delay_ms=1))
    with pytest.raises(InvalidArgument):
        store.set_policies(Policies(), namespace="a/b", topic="t")


def test_a_deleted_topic_leaves_no_policies_behind(store: DelayedStore) -> None:
    """A topic made later under the same name begins without them."""
    store.topic("t").send(b"x")
    store.set_policies(Policies(active=False), topic="t")
    store.delete_topic("t")
    assert store.policies(topic="t") is None
    assert due_ms(store, "t", deliver_after=60) == START_MS + 60_000


def test_a_retry_is_held_to_the_maximum_and_the_tick_and_not_put_off_by_a_fixed_delay(
    store: DelayedStore, clock: ManualClock
) -> None:
    """It is a delay that a client asks for; one that is refused leaves the message with its consumer."""
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        topic.send(b"x")
        (message,) = consumer.receive(1)
        store.set_policies(Policies(tick_time_ms=1_000, max_delivery_delay_ms=5_000, fixed_delivery_delay_ms=60_000),
                           topic="t")  # fmt: skip
        with pytest.raises(DelayTooLong) as caught:
            consumer.retry_later(message, 5.001)
        assert (caught.value.asked_ms, caught.value.limit_ms) == (5_001, 5_000)
        assert consumer.stats().backlog == 1
        consumer.retry_later(message, 2.5)
        assert [found.due_ms for found in topic.scheduled()] == [START_MS + 3_000]
        clock.advance(3_000)
        (message,) = consumer.receive(1)
        store.set_policies(Policies(active=False), topic="t")
        consumer.retry_later(message, 100)
        consumer.ack(consumer.receive(1))
        assert consumer.stats().backlog == 0
