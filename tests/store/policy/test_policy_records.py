"""The record of policies: what stands in it, old ones, later ones, and which scopes there are."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.store.errors import CorruptRecord, FormatMismatch, InvalidArgument
from duelog.store.policy.policies import DEFAULTS, KEEP_ALL, POLICY_FIELDS, Policies, PolicyValue, merge
from duelog.store.policy.policy_records import PolicyRecord, Scope

VALUES: dict[str, st.SearchStrategy[PolicyValue]] = {
    "active": st.booleans(),
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


def test_a_record_of_another_version_is_refused_and_not_taken_for_damage() -> None:
    """The error says which version it is."""
    with pytest.raises(FormatMismatch) as caught:
        PolicyRecord.unpack(msgpack.packb({"version": 4, "retention_ms": 5}))
    assert (caught.value.found, caught.value.expected) == (4, 3)


@pytest.mark.parametrize(
    "packed", [b"", b"\x01", {"version": 2, "x": 1}, {"version": 2, "ttl_ms": -1}, {"version": 2, "subscriptions": 5}]
)
def test_a_record_that_cannot_be_read_is_damage(packed: object) -> None:
    """Fields that no version has, values out of range, what is no map."""
    with pytest.raises(CorruptRecord):
        PolicyRecord.unpack(packed if isinstance(packed, bytes) else msgpack.packb(packed))


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
