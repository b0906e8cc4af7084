"""Answers leave in the order of the SENDs, however their outcomes come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duelog.broker.produce.sends import Reply, ReplyQueue


@given(st.permutations(range(12)))
def test_no_answer_is_early_and_none_is_lost(order: list[int]) -> None:
    """After each outcome those leave whose turn it is: the longest run from the first on."""
    queue: ReplyQueue[None, str] = ReplyQueue()
    replies: list[Reply[None, str]] = [Reply(None, number, 0) for number in range(12)]
    for reply in replies:
        queue.expect(reply)
    left: list[int] = []
    known: set[int] = set()
    for number in order:
        replies[number].outcome = "stored"
        known.add(number)
        left += [each.sequence_id for each in queue.take()]
        run = next((each for each in range(12) if each not in known), 12)
        assert left == list(range(run))
        assert len(queue) == 12 - run
