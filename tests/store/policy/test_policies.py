"""Delay policies as values: which scope wins, what they do to due times, and their record."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.store.errors import CorruptRecord, DelayTooLong, FormatMismatch, InvalidArgument
from duelog.store.message import MAX_DUE_MS
from duelog.store.names import TopicName
from duelog.store.policy.policies import (
    DEFAULTS,
    KEEP_ALL,
    POLICY_FIELDS,
    DelayedDeliveryPolicies,
    EffectivePolicies,
    Policies,
    PolicyValue,
    merge,
)
from duelog.store.policy.policy_records import PolicyRecord, Scope

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


def test_a_delay_of_just_the_maximum_is_taken_and_one_more_is_refused() -> None:
    """The error says what was asked, the limit, and where it was set."""
    effective = resolve(TOPIC, None, DelayedDeliveryPolicies(max_delivery_delay_ms=500), None)
    assert effective.apply(np.array([NOW_MS + 500]), NOW_MS).tolist() == [NOW_MS + 500]
    with pytest.raises(DelayTooLong) as caught:
        effective.apply(np.array([NOW_MS, NOW_MS + 501]), NOW_MS)
    assert (caught.value.asked_ms, caught.value.limit_ms, caught.value.set_at) == (501, 500, "namespace shop/mail")


Delays = DelayedDeliveryPolicies
IN_FORCE: list[tuple[str, tuple[Delays | None, Delays | None, Delays | None], list[int], list[int]]] = [
    ("a tick does not round past the latest due time", (Delays(tick_time_ms=1000), None, None),
     [MAX_DUE_MS - NOW_MS], [MAX_DUE_MS - NOW_MS]),
    ("nor makes a delay too long", (Delays(tick_time_ms=1000, max_delivery_delay_ms=500), None, None),
     [500], [1_790_000_001_000 - NOW_MS]),
    ("a fixed delay beats what was asked, and the maximum",
     (Delays(max_delivery_delay_ms=500), Delays(fixed_delivery_delay_ms=2_000), None),
     [0, 10, 9_000_000], [2_000] * 3),
    ("zeros of the topic turn off what its namespace sets",
     (None, Delays(True, 1000, 5, 7), Delays(None, 0, 0, 0)), [9_999], [9_999]),
    ("where delays are off all is due now", (None, None, Delays(False, 1000, 5, 7)), [-5, 9_999], [0, 0]),
]  # fmt: skip


def test_a_due_time_is_what_the_policies_in_force_make_of_what_was_asked() -> None:
    """Of store, namespace and topic: tick, maximum, fixed delay, and delays that are off."""
    for what, scopes, asked, expected in IN_FORCE:
        found = resolve(TOPIC, *scopes).apply(np.array(asked) + NOW_MS, NOW_MS) - NOW_MS
        assert found.tolist() == expected, what
    effective = resolve(TOPIC, *IN_FORCE[3][1])
    assert effective.is_plain
    assert effective.set_at["tick_time_ms"] == "topic persistent://shop/mail/reminders"


@pytest.mark.parametrize(
    ("field", "value"),
    [("active", 1), ("tick_time_ms", -1), ("tick_time_ms", True), ("max_delivery_delay_ms", 1.5),
     ("fixed_delivery_delay_ms", MAX_DUE_MS + 1)],
)  # fmt: skip
def test_a_value_that_is_no_policy_is_refused_by_name(field: str, value: object) -> None:
    """The error names the field."""
    with pytest.raises(InvalidArgument, match=f"^{field}="):
        DelayedDeliveryPolicies(**{field: value})  # type: ignore[arg-type]


VALUES: dict[str, st.SearchStrategy[PolicyValue]] = {
    "active": st.booleans(),
    "replicated": st.booleans(),
    "dead_letter_topic": st.sampled_from(("", "a/b/c", "persistent://a/b/c")),
    "max_redeliveries": st.integers(-1, 9),
}
FIELDS = st.fixed_dictionaries({}, optional={name: VALUES.get(name, st.integers(0, 10_000)) for name in POLICY_FIELDS})


def policies_of(fields: dict[str, PolicyValue]) -> Policies:
    """Policies that set these fields."""
    return Policies(**fields)  # type: ignore[arg-type]


POLICIES = FIELDS.map(policies_of)


@given(POLICIES, st.dictionaries(st.sampled_from("abc"), POLICIES.filter(Policies().__ne__)), st.booleans())
def test_a_record_keeps_every_field_of_its_scope_and_of_the_subscriptions(
    policies: Policies, subscriptions: dict[str, Policies], recorded: bool
) -> None:
    """Fields that are not set stay unset."""
    record = PolicyRecord(policies, subscriptions, recorded)
    assert PolicyRecord.unpack(record.pack()) == record


def test_a_record_that_cannot_be_read_is_damage_and_one_of_another_version_is_not() -> None:
    """Fields that no version has, values out of range, what is no map; the error says which version it is."""
    with pytest.raises(FormatMismatch) as caught:
        PolicyRecord.unpack(msgpack.packb({"version": 4, "retention_ms": 5}))
    assert (caught.value.found, caught.value.expected) == (4, 3)
    wrong: tuple[dict[str, int], ...] = ({"x": 1}, {"ttl_ms": -1}, {"subscriptions": 5})
    for packed in (b"", b"\x01", *(msgpack.packb({"version": 2, **fields}) for fields in wrong)):
        with pytest.raises(CorruptRecord):
            PolicyRecord.unpack(packed)


@given(POLICIES, POLICIES, POLICIES, POLICIES)
def test_each_field_is_taken_from_the_narrowest_of_four_scopes(
    of_store: Policies, of_namespace: Policies, of_topic: Policies, of_subscription: Policies
) -> None:
    """Subscription over topic over namespace over store over the default, field by field, "off" values included."""
    scopes = [("u", of_subscription), ("t", of_topic), ("n", of_namespace), ("s", of_store)]
    effective = merge(scopes)
    for name in POLICY_FIELDS:
        expected = next(
            ((value, where) for where, each in scopes if (value := getattr(each, name)) is not None),
            (DEFAULTS[name], "default"),
        )
        assert (getattr(effective, name), effective.set_at[name]) == expected


def test_where_nothing_is_recorded_everything_is_kept() -> None:
    """Retention for ever, no time to live; what is set somewhere counts all the same."""
    effective = merge([("topic t", Policies(ttl_ms=5))], KEEP_ALL)
    assert (effective.retention_ms, effective.ttl_ms) == (2**63 - 1, 5)
    assert effective.set_at["retention_ms"] == "nothing recorded yet"


def test_scopes_are_named_as_people_read_them() -> None:
    """And what names none, or two, is refused."""
    assert [str(Scope.of()), str(Scope.of("a/b")), str(Scope.of(topic="t")), str(Scope.of(None, "t", "s"))] == [
        "store",
        "namespace a/b",
        "topic persistent://public/default/t",
        "subscription s of topic persistent://public/default/t",
    ]
    for wrong in ({"subscription": "s"}, {"namespace": "a/b", "topic": "t"}, {"topic": "t", "subscription": "a/b"}):
        with pytest.raises(InvalidArgument):
            Scope.of(**wrong)
