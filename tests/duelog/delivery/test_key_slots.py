"""Which consumer a key belongs to."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.delivery.key_slots import SLOTS, KeySlots

KEYS = [f"order-{number}" for number in range(3000)]


def owners(*consumers: int) -> dict[str, int | None]:
    """The owner of every key of ``KEYS`` when these are the consumers."""
    slots = KeySlots(consumers)
    return {key: slots.owner_of(key) for key in KEYS}


def test_keys_spread_evenly() -> None:
    """Of 3,000 keys every one of ten consumers has a tenth, give or take a third."""
    counts = Counter(owners(*range(10)).values())
    assert len(counts) == 10
    assert all(200 <= count <= 400 for count in counts.values())


def test_a_consumer_that_joins_takes_keys_and_moves_no_others() -> None:
    """Keys either stay or go to the new consumer; so, the other way round, when one leaves."""
    before, after = owners(4, 7, 9), owners(4, 7, 9, 12)
    assert {after[key] for key in KEYS if before[key] != after[key]} == {12}


def test_the_order_in_which_consumers_came_does_not_matter() -> None:
    """The same consumers give the same owners."""
    assert owners(4, 7, 9) == owners(9, 4, 7)


def test_owners_are_the_same_everywhere() -> None:
    """No seed of a process takes part: some owners, written down."""
    slots = KeySlots([1, 2, 3])
    assert [slots.owner_of(key) for key in ("a", "b", "order-17", "")] == [1, 2, 3, 2]


@settings(deadline=None)
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.booleans())
def test_owners_are_the_same_however_the_consumers_came_and_went(
    before: set[int], after: set[int], ranged: bool
) -> None:
    """Made of other owners, or anew."""
    first = KeySlots(sorted(before), {each: [(each, each)] for each in before} if ranged else None)
    made, anew = KeySlots(sorted(after), None, first), KeySlots(sorted(after))
    assert [made.owner_of(number) for number in range(SLOTS)] == [anew.owner_of(number) for number in range(SLOTS)]


def test_without_consumers_no_key_is_owned() -> None:
    """None stands for no owner."""
    assert KeySlots().owner_of("a") is None
