"""Delay policies as values: which scope wins, what they do to due times, and their record."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.store.errors import DelayTooLong, InvalidArgument
from duelog.store.message import MAX_DUE_MS
from duelog.store.names import TopicName
from duelog.store.policy.policies import DelayedDeliveryPolicies, EffectivePolicies, merge

TOPIC = TopicName.parse("shop/mail/reminders")
NOW_MS = 1_790_000_000_123

optional_ms = st.none() | st.integers(0, 10_000)
policies = st.none() | st.builds(
    DelayedDeliveryPolicies, st.none() | st.booleans(), optional_ms, optional_ms, optional_ms
)


def resolve(
    topic: TopicName,
    of_store: DelayedDeliveryPolicies | None,
    of_namespace: DelayedDeliveryPolicies | None,
    of_topic: DelayedDeliveryPolicies | None,
) -> EffectivePolicies:
    """The policies in force for a topic."""
    scopes = (f"topic {topic}", of_topic), (f"namespace {topic.namespace_name}", of_namespace), ("store", of_store)
    return merge([(where, set_there) for where, set_there in scopes if set_there is not None])


@pytest.mark.parametrize("tick_ms", [0, 1, 100, 1000])
@given(delays=st.lists(st.integers(-5_000, 5_000), min_size=1, max_size=20))
def test_a_tick_rounds_up_by_less_than_itself_and_never_down(tick_ms: int, delays: list[int]) -> None:
    """No message is earlier than asked; 0 and 1 are exact; what is due already stays as it is."""
    effective = resolve(TOPIC, DelayedDeliveryPolicies(tick_time_ms=tick_ms), None, None)
    asked = np.array([NOW_MS + delay for delay in delays], dtype=np.int64)
    for before, after in zip(asked.tolist(), effective.apply(asked, NOW_MS).tolist(), strict=True):
        assert before <= after
        if before <= NOW_MS or tick_ms <= 1:
            assert after == before
        else:
            assert after % tick_ms == 0
            assert after - before < tick_ms


def test_a_tick_does_not_round_past_the_latest_due_time() -> None:
    """The last instant that can be asked for is kept."""
    effective = resolve(TOPIC, DelayedDeliveryPolicies(tick_time_ms=1000), None, None)
    assert effective.apply(np.array([MAX_DUE_MS]), NOW_MS).tolist() == [MAX_DUE_MS]


def test_a_delay_of_just_the_maximum_is_taken_and_one_more_is_refused() -> None:
    """The error says what was asked, the limit, and where it was set."""
    effective = resolve(TOPIC, None, DelayedDeliveryPolicies(max_delivery_delay_ms=500), None)
    assert effective.apply(np.array([NOW_MS + 500]), NOW_MS).tolist() == [NOW_MS + 500]
    with pytest.raises(DelayTooLong) as caught:
        effective.apply(np.array([NOW_MS, NOW_MS + 501]), NOW_MS)
    assert (caught.value.asked_ms, caught.value.limit_ms, caught.value.set_at) == (501, 500, "namespace shop/mail")


def test_the_maximum_is_held_against_what_was_asked_not_against_the_tick() -> None:
    """Rounding up to a tick does not make a delay too long."""
    effective = resolve(TOPIC, DelayedDeliveryPolicies(tick_time_ms=1000, max_delivery_delay_ms=500), None, None)
    assert effective.apply(np.array([NOW_MS + 500]), NOW_MS).tolist() == [1_790_000_001_000]


def test_a_fixed_delay_overrides_what_was_asked_and_beats_the_maximum() -> None:
    """Every message gets it: without a delay, with a shorter one, with one over the maximum."""
    effective = resolve(
        TOPIC,
        DelayedDeliveryPolicies(max_delivery_delay_ms=500),
        DelayedDeliveryPolicies(fixed_delivery_delay_ms=2_000),
        None,
    )
    asked = np.array([NOW_MS, NOW_MS + 10, NOW_MS + 9_000_000])
    assert effective.apply(asked, NOW_MS).tolist() == [NOW_MS + 2_000] * 3


def test_a_zero_at_the_topic_turns_off_what_its_namespace_sets() -> None:
    """Maximum, fixed delay and tick alike."""
    of_namespace = DelayedDeliveryPolicies(True, 1000, 5, 7)
    effective = resolve(TOPIC, None, of_namespace, DelayedDeliveryPolicies(None, 0, 0, 0))
    assert effective.is_plain
    assert effective.set_at["tick_time_ms"] == "topic persistent://shop/mail/reminders"
    assert effective.apply(np.array([NOW_MS + 9_999]), NOW_MS).tolist() == [NOW_MS + 9_999]


def test_where_delays_are_off_every_message_is_due_now() -> None:
    """Neither a fixed delay nor the maximum applies then."""
    effective = resolve(TOPIC, None, None, DelayedDeliveryPolicies(False, 1000, 5, 7))
    assert effective.apply(np.array([NOW_MS - 5, NOW_MS + 9_999]), NOW_MS).tolist() == [NOW_MS, NOW_MS]


@pytest.mark.parametrize(
    ("field", "value"),
    [("active", 1), ("tick_time_ms", -1), ("tick_time_ms", True), ("max_delivery_delay_ms", 1.5),
     ("fixed_delivery_delay_ms", MAX_DUE_MS + 1)],
)  # fmt: skip
def test_a_value_that_is_no_policy_is_refused_by_name(field: str, value: object) -> None:
    """The error names the field."""
    with pytest.raises(InvalidArgument) as caught:
        DelayedDeliveryPolicies(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
