"""A consumer of a connection: what it asked for, what it may be sent, what it has and has not acknowledged.

Source of the rules of Key_Shared: Apache Pulsar, HashRangeExclusiveStickyKeyConsumerSelector and KeySharedMeta.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.commands import KeySharedMeta, KeySharedMode, Subscribe, SubscriptionType
from ..protocol.entry import HASH_RANGE
from ..protocol.failures import Refused, ServerError
from ..protocol.frames import MessageHeads
from ..protocol.peer import Peer

if TYPE_CHECKING:
    from ...subscription import Subscription

Range = tuple[int, int]
"""First and last sticky hash."""


class KeySharing(NamedTuple):
    """A consumer's request for a share of the keys."""

    ranges: tuple[Range, ...] | None
    """The sticky hashes that it is to have; None: the subscription divides them."""
    out_of_order: bool
    """Messages of one key may be with several consumers."""

    @classmethod
    def of(cls, asked: KeySharedMeta | None) -> KeySharing:
        """Read the request of a SUBSCRIBE. Raises Refused."""
        if asked is None:
            return cls(ranges=None, out_of_order=False)
        if asked.mode == KeySharedMode.AUTO_SPLIT:
            return cls(None, asked.allow_out_of_order)
        if not asked.ranges:
            raise Refused(ServerError.CONSUMER_ASSIGN, "sticky ranges are asked for, and none is named")
        ranges = tuple(sorted((each.start, each.end) for each in asked.ranges))
        for start, end in ranges:
            if not 0 <= start <= end < HASH_RANGE:
                raise Refused(ServerError.CONSUMER_ASSIGN, f"{start} to {end} is no range of 0 to {HASH_RANGE - 1}")
        _check_apart(ranges, ranges[1:])
        return cls(ranges, asked.allow_out_of_order)

    def check_beside(self, others: Iterable[KeySharing]) -> None:
        """Raise Refused where consumers that are there do not go with it."""
        for other in others:
            if (self.ranges is None) != (other.ranges is None) or self.out_of_order != other.out_of_order:
                raise Refused(ServerError.CONSUMER_BUSY, "the subscription's consumers divide keys in another way")
            if self.ranges is not None and other.ranges is not None:
                for start, end in self.ranges:
                    for first, last in other.ranges:
                        if start <= last and first <= end:
                            message = f"{start} to {end} overlaps {first} to {last} of another consumer"
                            raise Refused(ServerError.CONSUMER_ASSIGN, message)


def _check_apart(ranges: Iterable[Range], following: Iterable[Range]) -> None:
    for (start, end), (first, last) in zip(ranges, following, strict=False):
        if first <= end:
            raise Refused(ServerError.CONSUMER_ASSIGN, f"{start} to {end} overlaps {first} to {last}")


INDIVIDUAL = frozenset({SubscriptionType.SHARED, SubscriptionType.KEY_SHARED})
"""Types of which messages are acknowledged one by one: what a consumer holds of them is counted, and bounded."""


class Delivery(NamedTuple):
    """An entry that a consumer is to be sent."""

    place: int
    blob: memoryview
    messages: int
    redelivery_count: int


@dataclass(slots=True)
class Dispatched:
    """Counted since the start: messages and bytes sent, messages of them sent again, acknowledgements taken."""

    messages: int = 0
    bytes: int = 0
    redelivered: int = 0
    acked: int = 0

    def add(self, other: Dispatched) -> None:
        """Count what another has counted."""
        self.messages += other.messages
        self.bytes += other.bytes
        self.redelivered += other.redelivered
        self.acked += other.acked


class Consumer:
    """One consumer. Runs on the event loop's thread; `engine` is for workers."""

    __slots__ = (
        "acked", "active", "blocked", "bytes_out", "command", "consumer_id", "engine", "epoch", "generation", "heads",
        "held", "messages_out", "name", "opened_at", "peer", "permits", "priority", "redelivered", "sharing", "state",
        "surplus", "type", "unacked", "waits_for_peer",
    )  # fmt: skip

    def __init__(self, peer: Peer, command: Subscribe, name: str, opened_at: float) -> None:
        self.peer = peer
        self.command = command
        self.consumer_id = command.consumer_id
        self.name = name
        self.type = command.type
        self.priority = command.priority_level
        self.sharing = KeySharing(ranges=None, out_of_order=False)
        self.epoch = command.epoch
        """The consumer's epoch, which a client raises to have everything sent again; None: it has none."""
        self.state = "opening"
        """"opening", "ready", then "closed"."""
        self.active: bool | None = None
        """True if the consumer is the served one of a Failover subscription; None for other types."""
        self.engine: Subscription | None = None
        self.heads: MessageHeads | None = None
        self.opened_at = opened_at

        self.permits = 0
        """Messages that it may be sent; below zero by a part of a batch."""
        self.blocked = False
        """True while nothing is sent as too many messages are unacknowledged."""
        self.waits_for_peer = False
        self.held: dict[int, int] = {}
        """Unacknowledged messages of shared types, by the place of their entry."""
        self.unacked = 0
        """Sum of `held`."""
        self.surplus: deque[Delivery] = deque()
        """Handed out by the engine, and not sent for want of permits: at most the entries of a turn."""
        self.generation = 0
        """Raised when what is on its way to it is not to be sent."""
        self.messages_out = 0
        self.bytes_out = 0
        self.redelivered = 0
        self.acked = 0
        """Ids that it has acknowledged; a cumulative acknowledgement is one."""

    @property
    def figures(self) -> Dispatched:
        """Messages sent and acknowledged since the consumer was opened."""
        return Dispatched(self.messages_out, self.bytes_out, self.redelivered, self.acked)

    @property
    def may_be_polled(self) -> bool:
        """True if the consumer can be sent messages now."""
        return self.permits > 0 and not self.blocked and self.state == "ready" and not self.surplus
