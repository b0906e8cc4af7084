"""Answers to one producer's SENDs, in the order of the SENDs.

The engine finishes messages of several time partitions in any order and refuses a delay at once; a client takes an
answer before its turn for a broken connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

P = TypeVar("P")
O = TypeVar("O")  # noqa: E741 (an outcome)


class Reply(Generic[P, O]):
    """The answer to one SEND."""

    __slots__ = ("came_s", "highest_sequence_id", "outcome", "producer", "sequence_id")

    def __init__(self, producer: P, sequence_id: int, highest_sequence_id: int, came_s: float = 0.0) -> None:
        """came_s: when the SEND came, by a clock that never goes back."""
        self.came_s = came_s
        self.producer = producer
        self.sequence_id = sequence_id
        self.highest_sequence_id = highest_sequence_id
        self.outcome: O | None = None
        """None: not known yet."""


class ReplyQueue(Generic[P, O]):
    """Replies that have not left. Bounded by what its connection may have unanswered."""

    __slots__ = ("_replies",)

    def __init__(self) -> None:
        self._replies: deque[Reply[P, O]] = deque()

    def __len__(self) -> int:
        return len(self._replies)

    def expect(self, reply: Reply[P, O]) -> None:
        """A SEND has come."""
        self._replies.append(reply)

    def take(self) -> Iterator[Reply[P, O]]:
        """Those whose turn it is and whose outcome is known, in order; they are in the queue no more."""
        replies = self._replies
        while replies and replies[0].outcome is not None:
            yield replies.popleft()
