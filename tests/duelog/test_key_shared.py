"""Key-shared subscriptions: the owner of a key; order by a number of one's own, by ranges, or not at all."""

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog import KeyShared, Message, Subscription, Topic
from duelog.delivery.key_slots import SLOTS, KeySlots, check_apart
from duelog.store.errors import ConsumerBusy, InvalidArgument
from tests.duelog.store_state import received

FACES = True

HEADER = struct.Struct(">HB")
"""A number that stands for the key, and which message of it this is."""


def number_of(payload: bytes, key: str | None) -> int | None:
    """The number stands in the payload, as a front would have it; 0 for none."""
    return HEADER.unpack(payload)[0] or None


def messages(*numbers: int) -> list[Message]:
    """Messages with these numbers for keys."""
    return [Message(HEADER.pack(number, at), key="one and the same") for at, number in enumerate(numbers)]


def join(topic: Topic, **how: Any) -> Subscription:
    """A consumer that orders by the number in the payload."""
    return topic.subscribe("s", type="key_shared", key_shared=KeyShared(number_of, **how))


def got(consumer: Subscription) -> list[tuple[int, int]]:
    """The numbers of what is received now."""
    return [HEADER.unpack(payload) for payload in received(consumer)]


@pytest.mark.inside
def test_a_range_is_one_consumer_s_and_what_is_in_none_waits(topic: Topic) -> None:
    """Both ends are in it; a consumer that comes later gets what waited for it, in order."""
    low, high = join(topic, ranges=[(0, 99), (200, 300)]), join(topic, ranges=[(100, 199)])
    topic.send_batch(messages(1, 99, 100, 199, 200, 300, 301, 65_535, 301))
    assert [number for number, _ in got(low)] == [1, 99, 200, 300]
    assert [number for number, _ in got(high)] == [100, 199]
    rest = join(topic, ranges=[(301, 65_535)])
    assert got(rest) == [(301, 6), (65_535, 7), (301, 8)]


@pytest.mark.inside
def test_ranges_that_overlap_are_refused(topic: Topic) -> None:
    """Those of one consumer, and those of two; no consumer is let in, and what leaves is free."""
    first = join(topic, ranges=[(10, 20)])
    for taken in ([(20, 30)], [(0, 10)], [(12, 13)], [(0, 65_535)], [(0, 5), (20, 20)]):
        with pytest.raises(InvalidArgument, match=r"^ranges="):
            join(topic, ranges=taken)
    assert first.stats().consumers == 1
    join(topic, ranges=[(0, 9), (21, 30)])
    first.close()
    join(topic, ranges=[(10, 20)])


def test_arguments_that_cannot_be_are_named(topic: Topic) -> None:
    """Also a KeyShared for another type, or one that a shared subscription has no use for."""
    bad: list[Any] = [[], [(5, 4)], [(-1, 3)], [(0, 65_536)], [(1, 2, 3)], [(1.0, 2)], 7, [3], ["ab"], [(1, 5), (5, 6)]]
    for ranges in bad:
        with pytest.raises(InvalidArgument, match=r"^ranges="):
            KeyShared(ranges=ranges)
    for field in ("order_by", "may_order", "out_of_order"):
        with pytest.raises(InvalidArgument, match=f"^{field}="):
            KeyShared(**{field: 1})  # type: ignore[arg-type]
    for useless in (KeyShared(), KeyShared(ranges=[(1, 2)]), KeyShared(out_of_order=True)):
        with pytest.raises(InvalidArgument):
            topic.subscribe("s", type="shared", key_shared=useless)


@pytest.mark.inside
def test_a_shared_subscription_keeps_messages_together_that_a_consumer_names(topic: Topic) -> None:
    """At one consumer, in order; those without a name go to any. A consumer that names none may have come first."""
    kept = KeyShared(lambda payload, _: payload[:1].decode() if payload[:1].isalpha() else None)
    first = topic.subscribe("s", type="shared")
    topic.send_batch([Message(text) for text in (b"a1", b"1", b"2", b"3")])
    assert received(first, 1) == [b"a1"]  # before anything is kept together
    second = topic.subscribe("s", type="shared", key_shared=kept)
    third = topic.subscribe("s", type="shared")
    for other in (KeyShared(number_of), KeyShared(number_of, [(0, 9)])):
        with pytest.raises((ConsumerBusy, InvalidArgument)):
            topic.subscribe("s", type="shared", key_shared=other)
    assert received(third, 1) == [b"1"]
    topic.send_batch([Message(f"{letter}{number}".encode()) for number in range(2, 5) for letter in "abcdefghijkl"])
    found = [received(consumer) for consumer in (first, second, third)]
    for letter in b"abcdefghijkl":
        (mine,) = filter(None, ([each for each in payloads if each[0] == letter] for payloads in found))
        assert [each[1:] for each in mine] == [b"2", b"3", b"4"]
    assert all(found)
    assert sum(map(len, found)) == 2 + 36


@pytest.mark.inside
def test_each_message_is_asked_for_its_name_only_where_some_may_have_one(topic: Topic) -> None:
    """Where that cannot be told, as the question itself raises, each is asked."""
    asked = list[bytes]()

    def name(payload: bytes, _: str | None) -> str | None:
        asked.append(payload)
        return "a" if payload[:1] == b"a" else None

    def may_order(payloads: Sequence[bytes]) -> bool:
        return 1 // payloads.count(b"0") < 0 or any(payload[:1] == b"a" for payload in payloads)

    one, other = (
        topic.subscribe("s", type="shared", key_shared=KeyShared(name, may_order=may_order)) for _ in range(2)
    )
    topic.send_batch([Message(text) for text in (b"0", b"1", b"2")])
    assert len(received(one)) == 3
    assert asked == []
    topic.send_batch([Message(text) for text in (b"0", b"a1", b"a2")])
    assert sorted(received(one) + received(other)) == [b"0", b"a1", b"a2"]
    assert len(asked) == 3
    topic.send_batch([Message(text) for text in (b"4", b"a5")])
    assert sorted(received(one) + received(other)) == [b"4", b"a5"]
    assert len(asked) == 5


@pytest.mark.inside
def test_consumers_of_one_subscription_order_in_one_way(topic: Topic) -> None:
    """Another way is refused while a consumer is there; the next that comes alone may have it."""
    first = join(topic)
    for other in (KeyShared(), KeyShared(number_of, [(0, 9)]), KeyShared(number_of, out_of_order=True)):
        with pytest.raises(ConsumerBusy):
            topic.subscribe("s", type="key_shared", key_shared=other)
    topic.send_batch(messages(1, 2))
    assert len(got(first)) == 2
    first.close()
    again = topic.subscribe("s", type="key_shared", key_shared=KeyShared(lambda payload, key: key, out_of_order=True))
    assert len(got(again)) == 2


@pytest.mark.inside
def test_a_function_that_raises_or_gives_something_else_has_messages_go_to_any_consumer(topic: Topic) -> None:
    """Nothing is lost for it."""

    def odd(payload: bytes, key: str | None) -> Any:
        number = HEADER.unpack(payload)[0]
        return [None, 1.5, [], "text"][number] if number < 4 else 1 // 0

    one = topic.subscribe("s", type="key_shared", key_shared=KeyShared(odd))
    other = topic.subscribe("s", type="key_shared", key_shared=KeyShared(odd))
    topic.send_batch(messages(0, 1, 2, 3, 4))
    assert len(got(one)) + len(got(other)) == 5


RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=4)


@settings(deadline=None)
@given(RANGES, RANGES)
def test_ranges_are_apart_where_no_number_is_in_two(some: list[Any], others: list[Any]) -> None:
    """Counting is the twin; and each number belongs to the consumer in whose range it is."""
    counts = [sum(first <= number <= last for first, last in [*some, *others]) for number in range(41)]
    if max(counts) > 1:
        with pytest.raises(InvalidArgument):
            check_apart(some, others)
        return
    check_apart(some, others)
    if not some and not others:
        return
    slots = KeySlots([3, 5], {3: some, 5: others})
    for number in range(41):
        owner = 3 if any(first <= number <= last for first, last in some) else 5 if counts[number] else None
        assert slots.owner_of(number) == slots.owner_of(number + 65_536) == owner


KEYS = [f"order-{number}" for number in range(3000)]


def owners(*consumers: int) -> dict[str, int | None]:
    """The owner of every key of ``KEYS`` when these are the consumers."""
    slots = KeySlots(consumers)
    return {key: slots.owner_of(key) for key in KEYS}


def test_keys_spread_evenly_have_one_owner_everywhere_and_move_only_to_who_joins() -> None:
    """Each of ten has a tenth, give or take a third; no seed of a process takes part, nor the order of coming."""
    counts = Counter(owners(*range(10)).values())
    assert len(counts) == 10
    assert all(200 <= count <= 400 for count in counts.values())
    before, after = owners(4, 7, 9), owners(4, 7, 9, 12)
    assert {after[key] for key in KEYS if before[key] != after[key]} == {12}
    slots = KeySlots([1, 2, 3])
    assert [slots.owner_of(key) for key in ("a", "b", "order-17", "")] == [1, 2, 3, 2]
    assert owners(4, 7, 9) == owners(9, 4, 7)
    assert KeySlots().owner_of("a") is None


@settings(deadline=None)
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.booleans())
def test_owners_are_the_same_however_the_consumers_came_and_went(
    before: set[int], after: set[int], ranged: bool
) -> None:
    """Made of other owners, or anew."""
    first = KeySlots(sorted(before), {each: [(each, each)] for each in before} if ranged else None)
    made, anew = KeySlots(sorted(after), None, first), KeySlots(sorted(after))
    assert [made.owner_of(number) for number in range(SLOTS)] == [anew.owner_of(number) for number in range(SLOTS)]
