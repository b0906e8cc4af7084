"""Names: short and full forms, and what is refused; message ids."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.errors import InvalidArgument
from duelog.store.names import (
    MAX_SUBSCRIPTION_BYTES,
    MAX_TOPIC_BYTES,
    TopicName,
    validate_namespace_name,
    validate_subscription_name,
)
from duelog.store.position import MAX_ID, MessageId, Position

LONGEST = MAX_TOPIC_BYTES - len("persistent://public/default/")
"""Bytes that are left for the name of a topic given in short form."""


@pytest.mark.parametrize(
    ("text", "full"),
    [("reminders", "persistent://public/default/reminders"), ("a", "persistent://public/default/a"),
     ("shop/mail/reminders", "persistent://shop/mail/reminders"),
     ("persistent://shop/mail/reminders", "persistent://shop/mail/reminders"),
     ("persistent://a-b=c:d.e_1/F/x", "persistent://a-b=c:d.e_1/F/x"),
     ("über größe", "persistent://public/default/über größe"), ("提醒", "persistent://public/default/提醒"),
     ("👩‍👧", "persistent://public/default/👩‍👧"), ("a:b?c#d%20", "persistent://public/default/a:b?c#d%20"),
     ("x" * LONGEST, "persistent://public/default/" + "x" * LONGEST),
     ("ü" * (LONGEST // 2), "persistent://public/default/" + "ü" * (LONGEST // 2))],
)  # fmt: skip
def test_short_and_full_forms_have_one_full_form(text: str, full: str) -> None:
    """Every form reads to the same name, whose text reads back."""
    name = TopicName.parse(text)
    assert str(name) == full
    assert TopicName.parse(full) == name
    assert full == f"persistent://{name.namespace_name}/{name.local_name}"


@given(st.text(max_size=30) | st.text(alphabet="ab/:.- \n", max_size=20))
@settings(max_examples=200)
def test_any_text_is_a_name_that_reads_back_or_is_refused(text: str) -> None:
    """There is no third outcome, and a taken name fits the length and has exactly its three parts."""
    try:
        name = TopicName.parse(text)
    except InvalidArgument:
        return
    full = str(name)
    assert TopicName.parse(full) == name
    assert len(full.encode()) <= MAX_TOPIC_BYTES
    assert full.removeprefix("persistent://").split("/") == list(name)


def test_the_longest_namespace_leaves_space_for_a_topic() -> None:
    """The longest namespace that is taken can hold a topic of one byte, and no longer one is taken."""
    longest = "t/" + "n" * (MAX_TOPIC_BYTES - len("persistent://t//x"))
    assert len(str(TopicName.parse(f"{validate_namespace_name(longest)}/x"))) == MAX_TOPIC_BYTES
    with pytest.raises(InvalidArgument):
        validate_namespace_name(longest + "n")


@pytest.mark.parametrize(
    ("validate", "texts"),
    [
        (validate_namespace_name, ["public/default", "a/b", "a-=:._9/Z"]),
        (validate_subscription_name, ["mailer", "a b", "ü" * 100, "x" * MAX_SUBSCRIPTION_BYTES, "-", "a:b"]),
    ],
)
def test_a_good_name_of_a_namespace_or_subscription_is_returned_as_it_is(
    validate: Callable[[str], str], texts: list[str]
) -> None:
    """The parts of a namespace are tenant and namespace."""
    assert [validate(text) for text in texts] == texts


REFUSED: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "topic": (TopicName.parse, [
        "", "/", "//", "a/b", "a/b/", "/b/c", "a//c", "a/b/c/d", "persistent://", "persistent://a", "persistent://a/b",
        "persistent://a/b/", "persistent:///b/c", "persistent://a//c", "persistent://a/b/c/d",
        "persistent://a/b/c://d", "Persistent://a/b/c", "non-persistent://a/b/c", "://a/b/c", "te nant/ns/c",
        "tenant/n s/c", "tenant/ns*/c", "ténant/ns/c", "tenant\n/ns/c", "tenant/ns\n/c", "a\x00b", "a\n", "a\x7f",
        "a\x85b", "a\u2028b", "a\ud800b", "x" * (LONGEST + 1), "ü" * (LONGEST // 2 + 1), "t" * 400 + "/ns/c", None, 7,
        b"reminders"]),
    "namespace": (validate_namespace_name, [
        "", "/", "a", "a/", "/b", "a/b/c", "a b/c", "a/b\n", "ä/b", "a" * 390 + "/b", None, 3, b"a/b"]),
    "subscription": (validate_subscription_name, [
        "", "a/b", "/", "a\n", "\x00", "a\x7f", "a\ud800", "ü" * 100 + "x", "x" * 201, None, 3, b"mailer"]),
    "message_id": (MessageId.parse, [
        "", ":", "1", "1:", ":1", "1:2:3", "1 :2", " 1:2", "1:2\n", "+1:2", "1:-1", "-1:2", "01:2", "1:02", "1.0:2",
        "1_0:2", "\N{ARABIC-INDIC DIGIT THREE}:4", f"{MAX_ID + 1}:0", f"0:{MAX_ID + 1}", "9" * 5000 + ":1", None, 12,
        b"1:2", (1, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_other_texts_are_refused(field: str) -> None:
    """Empty parts or schemes, too long, with a character that is not allowed, what str() of an id cannot give."""
    validate, texts = REFUSED[field]
    for text in texts:
        with pytest.raises(InvalidArgument) as caught:
            validate(text)
        assert (caught.value.field, caught.value.value) == (field, text)


numbers = st.integers(0, MAX_ID)


@given(numbers, numbers)
def test_text_of_an_id_reads_back_as_the_id(ledger_id: int, entry_id: int) -> None:
    """parse() undoes str() over the whole range."""
    message_id = MessageId(ledger_id, entry_id)
    assert MessageId.parse(str(message_id)) == message_id


def test_ids_order_by_ledger_then_entry() -> None:
    """The order of ids is the order of entries in the store."""
    assert sorted([MessageId(2, 0), MessageId(1, 9), MessageId(1, 10)]) == [(1, 9), (1, 10), (2, 0)]
    assert Position is MessageId
