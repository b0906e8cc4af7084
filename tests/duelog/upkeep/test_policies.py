"""Policies of an open store: kept, looked up, and held against what is sent; a lost race is told, scopes differ."""

from typing import Any, cast

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, Policies, StoreConfig, Subscription
from duelog.errors import DelayTooLong, InvalidArgument, PoliciesChanged
from duelog.store.policy.policies import DELAY_FIELDS
from tests.conftest import HOUR_MS, START_MS, OpenStore
from tests.duelog.store_state import received

FACES = True


def sent(store: DelayedStore, topic: str, subscription: str, count: int = 1) -> Subscription:
    """A consumer of a topic with so many messages that are due."""
    consumer = store.topic(topic).subscribe(subscription, type="shared")
    store.topic(topic).send_batch([Message(b"%d" % number) for number in range(count)])
    return consumer


def test_a_lost_race_for_policies_raises_an_error_that_names_both(store: DelayedStore) -> None:
    """The error has the expected and the present policies, and nothing is set."""
    mine = Policies(retention_ms=5)
    store.set_policies(mine, topic="t", expected=None)
    store.set_policies(Policies(retention_ms=7), topic="t", expected=mine)
    with pytest.raises(PoliciesChanged, match=r"retention_ms=7.*retention_ms=5") as caught:
        store.set_policies(Policies(retention_ms=9), topic="t", expected=mine)
    error = caught.value
    assert (error.scope, error.expected, error.found) == (
        "topic persistent://public/default/t", mine, Policies(retention_ms=7)
    )  # fmt: skip
    with pytest.raises(PoliciesChanged, match="nothing was expected"):
        store.set_policies(mine, topic="t", expected=None)
    with pytest.raises(PoliciesChanged, match="nothing is set there"):
        store.set_policies(mine, namespace="a/b", expected=mine)
    assert store.policies(topic="t") == Policies(retention_ms=7)
    with pytest.raises(InvalidArgument, match="expected"):
        store.set_policies(mine, expected=5)  # type: ignore[arg-type]


def test_delay_policies_are_compared_with_the_delay_policies(store: DelayedStore) -> None:
    """They replace no more than these, so a change of the rest is no lost race."""
    store.set_policies(Policies(tick_time_ms=1, retention_ms=5), topic="t")
    store.set_policies(
        DelayedDeliveryPolicies(tick_time_ms=2), topic="t", expected=DelayedDeliveryPolicies(tick_time_ms=1)
    )
    assert store.policies(topic="t") == Policies(tick_time_ms=2, retention_ms=5)
    with pytest.raises(PoliciesChanged):
        store.set_policies(Policies(), topic="t", expected=Policies(tick_time_ms=2))


def test_one_field_is_set_and_unset_without_the_others(open_store: OpenStore) -> None:
    """None unsets; what is no field, or no value of it, is refused by name."""
    store = open_store(config=StoreConfig(ttl_ms=HOUR_MS))
    assert store.update_policies(topic="t", retention_ms=5, ttl_ms=0) == Policies(retention_ms=5, ttl_ms=0)
    assert store.effective_policies("t").ttl_ms == 0
    assert store.update_policies(topic="t", ttl_ms=None) == Policies(retention_ms=5)
    assert store.effective_policies("t").ttl_ms == HOUR_MS
    assert store.update_policies(topic="t", retention_ms=None) == Policies()
    assert store.policies(topic="t") is None
    for wrong in ({"retention": 5}, {"retention": None}, {"ttl_ms": -1}, {"max_redeliveries": -2},
                  {"dead_letter_topic": "a/b"}, {"ack_timeout_ms": 1.5}):  # fmt: skip
        with pytest.raises(InvalidArgument) as caught:
            store.update_policies(topic="t", **wrong)
        assert caught.value.field in (*wrong, "policy")
    assert store.policies(topic="t") is None


def test_what_is_of_a_topic_cannot_be_set_for_a_subscription(store: DelayedStore) -> None:
    """Retention and delay policies; the error names the field, and what was set there stays."""
    for name in ("retention_ms", "retention_bytes", "tick_time_ms", "fixed_delivery_delay_ms"):
        with pytest.raises(InvalidArgument, match=f"^{name}="):
            store.update_policies(topic="t", subscription="s", **cast(dict[str, Any], {name: 5}))
    assert store.all_policies() == {}


def test_policies_of_a_subscription_go_with_it_and_with_its_topic(store: DelayedStore) -> None:
    """One that is made later under the same name begins without them."""
    for _ in range(2):
        sent(store, "t", "s").close()
        store.set_policies(Policies(ttl_ms=5), topic="t", subscription="s")
        store.set_policies(Policies(ttl_ms=9), topic="t", subscription="other")
        store.topic("t").unsubscribe("s")
        assert list(store.all_policies()) == ["subscription other of topic persistent://public/default/t"]
        assert store.effective_policies("t", "s").ttl_ms == 0
        store.delete_topic("t")
        assert store.all_policies() == {}


def test_a_running_subscription_follows_an_acknowledgement_timeout(store: DelayedStore, clock: ManualClock) -> None:
    """Switched on for what is held already, made shorter for what was handed out before, switched off again."""
    consumer = sent(store, "t", "s", 2)
    assert received(consumer) == [b"0", b"1"]
    clock.advance(HOUR_MS)
    store.update_policies(topic="t", ack_timeout_ms=HOUR_MS)
    clock.advance(HOUR_MS - 1)
    assert received(consumer) == []
    clock.advance(1)
    assert received(consumer) == [b"0", b"1"]
    clock.advance(1_000)
    store.update_policies(namespace="public/default", ack_timeout_ms=5)
    assert received(consumer) == []
    store.update_policies(topic="t", ack_timeout_ms=1_000)
    assert received(consumer) == [b"0", b"1"]
    store.update_policies(topic="t", ack_timeout_ms=0)
    clock.advance(100 * HOUR_MS)
    assert received(consumer) == []


def test_a_subscription_has_policies_of_its_own(store: DelayedStore, clock: ManualClock) -> None:
    """Redeliveries, dead-letter topic, backoff and time to live by subscription; the other goes by its topic."""
    store.set_policies(Policies(max_redeliveries=0, nack_backoff_ms=0), topic="t")
    store.set_policies(Policies(max_redeliveries=-1, nack_backoff_ms=50), topic="t", subscription="patient")
    store.set_policies(Policies(dead_letter_topic="graves"), topic="t", subscription="hasty")
    store.topic("graves").subscribe("digger").close()
    hasty, patient = sent(store, "t", "hasty"), sent(store, "t", "patient", 0)
    for consumer in (hasty, patient):
        consumer.nack(consumer.receive(1))
    assert received(hasty) == []
    with store.topic("graves").subscribe("digger") as digger:
        assert received(digger) == [b"0"]
    assert received(patient) == []
    clock.advance(50)
    assert received(patient) == [b"0"]
    effective = store.effective_policies("t", "patient")
    assert effective.set_at["nack_backoff_ms"] == "subscription patient of topic persistent://public/default/t"
    own = store.all_policies()[effective.set_at["nack_backoff_ms"]]
    assert own == Policies(max_redeliveries=-1, nack_backoff_ms=50)


def due_ms(store: DelayedStore, topic: str, **asked: int) -> int:
    """When a message is due that asks for this."""
    stored = store.topic(topic).get(store.topic(topic).send(b"x", **asked))  # type: ignore[arg-type]
    assert stored is not None
    return stored.due_ms


def test_policies_are_kept_over_a_restart_at_every_scope(store: DelayedStore, open_store: OpenStore) -> None:
    """Store, namespace and topic each keep their own."""
    store.set_policies(DelayedDeliveryPolicies(tick_time_ms=1))
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=2), namespace="shop/mail")
    store.set_policies(DelayedDeliveryPolicies(fixed_delivery_delay_ms=3), topic="shop/mail/t")
    store.close()
    store = open_store()
    assert store.all_policies() == {
        "store": DelayedDeliveryPolicies(tick_time_ms=1),
        "namespace shop/mail": DelayedDeliveryPolicies(max_delivery_delay_ms=2),
        "topic persistent://shop/mail/t": DelayedDeliveryPolicies(fixed_delivery_delay_ms=3),
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
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000))
    with pytest.raises(DelayTooLong) as caught:
        store.topic("t").send_batch([Message(b"a", deliver_after=1), Message(b"b", deliver_after=2), Message(b"c")])
    assert (caught.value.asked_ms, caught.value.limit_ms, caught.value.set_at) == (2_000, 1_000, "store")
    assert not store.topic("t").exists()
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=0), topic="t")
    assert len(store.topic("t").send_batch([Message(b"b", deliver_after=2)])) == 1


def test_a_fixed_delay_cannot_be_set_for_the_whole_store(store: DelayedStore) -> None:
    """PIP-437 has it for namespaces and topics."""
    with pytest.raises(InvalidArgument, match="fixed_delivery_delay_ms"):
        store.set_policies(DelayedDeliveryPolicies(fixed_delivery_delay_ms=1))
    with pytest.raises(InvalidArgument):
        store.set_policies(DelayedDeliveryPolicies(), namespace="a/b", topic="t")


def test_a_deleted_topic_leaves_no_policies_behind(store: DelayedStore) -> None:
    """A topic made later under the same name begins without them."""
    store.topic("t").send(b"x")
    store.set_policies(DelayedDeliveryPolicies(active=False), topic="t")
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
        rules = DelayedDeliveryPolicies(tick_time_ms=1_000, max_delivery_delay_ms=5_000, fixed_delivery_delay_ms=60_000)
        store.set_policies(rules, topic="t")
        with pytest.raises(DelayTooLong) as caught:
            consumer.retry_later(message, 5.001)
        assert (caught.value.asked_ms, caught.value.limit_ms) == (5_001, 5_000)
        assert consumer.stats().backlog == 1
        consumer.retry_later(message, 2.5)
        assert [found.due_ms for found in topic.scheduled()] == [START_MS + 3_000]
        clock.advance(3_000)
        (message,) = consumer.receive(1)
        store.set_policies(DelayedDeliveryPolicies(active=False), topic="t")
        consumer.retry_later(message, 100)
        consumer.ack(consumer.receive(1))
        assert consumer.stats().backlog == 0
