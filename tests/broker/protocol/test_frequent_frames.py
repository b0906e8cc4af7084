"""Frames made of few pieces are those that the table of commands gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duelog.broker.protocol.commands import Message, MessageIdData, SendReceipt
from duelog.broker.protocol.frames import MessageHeads, ReceiptFrames, head

NUMBERS = st.integers(0, 2**64 - 1)
PARTITIONS = st.integers(-1, 2_000)


@given(NUMBERS, PARTITIONS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_a_receipt(producer: int, partition: int, sequence: int, highest: int, ledger: int, number: int) -> None:
    """With and without a partition and a highest number."""
    expected = head(SendReceipt(producer, sequence, MessageIdData(ledger, number, partition), highest))
    assert ReceiptFrames(producer, partition).frame(sequence, highest, ledger, number) == expected


@given(
    NUMBERS,
    PARTITIONS,
    st.tuples(NUMBERS, NUMBERS),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.none() | NUMBERS,
    st.integers(0, 2**31),
)
def test_a_message(
    consumer: int, partition: int, place: tuple[int, int], count: int, ack_set: list[int], epoch: int | None, size: int
) -> None:
    """With and without a count, a set of what remains, an epoch."""
    expected = head(Message(consumer, MessageIdData(*place, partition), count, ack_set, epoch), size)
    assert MessageHeads(consumer, partition).head(*place, count, ack_set, epoch, size) == expected
