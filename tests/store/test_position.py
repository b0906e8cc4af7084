"""Message ids: one text for one id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.store.errors import InvalidArgument
from duelog.store.position import MAX_ID, MessageId, Position

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


@pytest.mark.parametrize(
    "text",
    ["", ":", "1", "1:", ":1", "1:2:3", "1 :2", " 1:2", "1:2\n", "+1:2", "1:-1", "-1:2", "01:2", "1:02", "1.0:2",
     "1_0:2", "\N{ARABIC-INDIC DIGIT THREE}:4", f"{MAX_ID + 1}:0", f"0:{MAX_ID + 1}", "9" * 5000 + ":1", None, 12,
     b"1:2", (1, 2)],
)  # fmt: skip
def test_other_texts_are_refused(text: object) -> None:
    """A text that str() of an id cannot give is refused with field and value."""
    with pytest.raises(InvalidArgument) as caught:
        MessageId.parse(text)  # type: ignore[arg-type]
    assert caught.value.field == "message_id"
    assert caught.value.value == text
