"""Topics and partitions said plainly: what stands in a main log, what waits in which partition."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from duelog import MessageId
from duelog.topics.dead_letters import KEEPER

from .twin_recurring import TwinSchedule
from .twin_subscription import TwinSubscription

Key = tuple[int, int]


def key_of(number: int) -> str | None:
    """The key that every message of a number has."""
    return (None, "a", "b")[number % 3]


def ttl_of(number: int) -> int | None:
    """The time to live in ms with which a message of a number is sent."""
    return (None, None, None, 25, None, None, None, 400)[number % 8]


class TwinLetter(NamedTuple):
    """The origin of a dead letter: where it came from, the id that it had there, and how often it was delivered."""

    topic: str
    subscription: str
    message_id: MessageId
    attempts: int

    @property
    def properties(self) -> dict[str, str]:
        """Properties that tell a consumer of the dead-letter topic where it came from, and why."""
        return {
            "REAL_TOPIC": self.topic,
            "REAL_SUBSCRIPTION": self.subscription,
            "ORIGIN_MESSAGE_ID": str(self.message_id),
            "DEAD_LETTER_REASON": "redeliveries",
            "DEAD_LETTER_ATTEMPTS": str(self.attempts),
        }


@dataclass(eq=False)
class TwinMessage:
    """A message that was sent; `start_ms` is its partition's, None when it went into the main log directly."""

    number: int
    due_ms: int
    publish_ms: int
    message_id: MessageId
    start_ms: int | None = None
    late: bool = False
    """Appended when the frontier of its log had passed its due time."""
    wild: bool = False
    """Appended by another thread in the middle of a tick: where it fires depends on how far the tick was."""
    cancelled: bool = False
    unadmitted: bool = False
    """Appended to take another's place, which it did not get: it is there and never fires."""
    addressee: str | None = None
    retries: int = 0
    readable_ms: int = 0
    """It is not visible in the main log before, for it was written early, or lies after such a one."""
    waits: bool = False
    """It went into the main log before it was due."""
    first_id: MessageId | None = None
    """The id of the message that was postponed first, in a postponed message."""
    letter: TwinLetter | None = None
    """The origin, if it is a dead letter."""
    ttl_ms: int | None = None
    """Its own time to live."""

    @property
    def expires_ms(self) -> int | None:
        return None if self.ttl_ms is None else self.due_ms + self.ttl_ms

    def is_for(self, subscription: str, now_ms: int) -> bool:
        """True if a subscription is to get it: it is addressed to it, or to all, and is not too old."""
        return self.addressee in (None, subscription) and (self.expires_ms is None or self.expires_ms > now_ms)

    @property
    def key(self) -> str | None:
        return key_of(self.number)

    @property
    def order(self) -> Key:
        return self.due_ms, self.message_id.entry_id


@dataclass(eq=False)
class TwinLedger:
    """A ledger of a main log: the messages from number `first` of the topic on, `count` of them."""

    created_ms: int
    first: int
    count: int = 0
    closed_ms: int | None = None
    ledger_id: int = -1
    """The engine's name of it, learned when the two are compared."""


@dataclass
class TwinKey:
    """The message of a deduplication key, and until when the key holds although that has fired."""

    message: TwinMessage
    until_ms: int


@dataclass
class TwinProducer:
    """A producer's numbers: those stored, and the highest that was ever given."""

    stored: dict[int, MessageId] = field(default_factory=dict)
    highest: int = -1

    @property
    def last(self) -> int:
        return max(self.stored, default=-1)

    def numbering(self, first: int | None) -> tuple[int | None, int]:
        """The number to ask for, None where the producer goes on by itself, and the number that a batch begins with.

        It goes on after what is stored; where more may have been tried, it is told to go on after that.
        """
        if first is None and self.highest > self.last:
            first = self.highest + 1
        return first, self.last + 1 if first is None else first


class TwinTopic:
    """A topic: everything that ever stood in its main log, and the ledgers that are kept of it."""

    def __init__(self, name: str, now_ms: int, setting: Callable[[str], int], most: Callable[[], int]) -> None:
        """setting: what the policies say for the topic, by field; most: how many entries a ledger may have now."""
        self.name = name
        self.setting = setting
        self._most = most
        self.main: list[TwinMessage] = []
        self.ledgers = [TwinLedger(now_ms, 0)]
        self.subscriptions: dict[str, TwinSubscription] = {}
        self.schedules: dict[str, TwinSchedule] = {}
        self.producers: dict[str, TwinProducer] = {}
        self.keys: dict[str, TwinKey] = {}
        self.deleted = False
        self.unflushed_until_ms = -1
        """Until then acknowledgements may not have been looked at for trimming."""

    @property
    def first(self) -> int:
        """The first entry kept, counted from the topic's beginning."""
        return self.ledgers[0].first

    def append(self, message: TwinMessage, now_ms: int) -> TwinLedger:
        if self.main:
            message.readable_ms = max(message.readable_ms, self.main[-1].readable_ms)
        self._roll_if_full(now_ms)  # it may have been filled when more was allowed
        tail = self.ledgers[-1]
        self.main.append(message)
        tail.count += 1
        self._roll_if_full(now_ms)
        return tail

    def _roll_if_full(self, now_ms: int) -> None:
        if self.ledgers[-1].count >= self._most():
            self.roll(now_ms)

    @property
    def keeper(self) -> TwinSubscription | None:
        """The subscription of a dead-letter topic that keeps its letters until they are requeued or purged."""
        return self.subscriptions.get(KEEPER)

    def gives(self, place: int, sub: TwinSubscription, now_ms: int) -> bool:
        """True if a subscription is to get a message: it is for it, and has not outlived the policies' time to live."""
        message, ttl_ms = self.main[place], 0 if sub is self.keeper else sub.setting("ttl_ms")
        return message.is_for(sub.name, now_ms) and not (ttl_ms and message.due_ms + ttl_ms <= now_ms)

    def latest(self, now_ms: int) -> int:
        """The place from which on nothing may be read yet."""
        return next((at for at, message in enumerate(self.main) if message.readable_ms > now_ms), len(self.main))

    def waiting(self, now_ms: int) -> list[TwinMessage]:
        """Messages kept in the main log and not due yet, by due time."""
        return sorted(
            (message for message in self.main[self.first :] if message.waits and message.due_ms > now_ms),
            key=lambda message: message.due_ms,
        )

    def roll(self, now_ms: int) -> None:
        """The open ledger is complete when it is closed and all that is in it is due."""
        ledger = self.ledgers[-1]
        dues = [message.due_ms for message in self.main[ledger.first :] if message.waits]
        ledger.closed_ms = max([now_ms, *dues])
        self.ledgers.append(TwinLedger(now_ms, len(self.main)))

    def sizes(self) -> dict[int, int]:
        """Entries by ledger id, of the ledgers that are kept."""
        return {ledger.ledger_id: ledger.count for ledger in self.ledgers}

    def position(self, place: int) -> MessageId:
        ledger = next(ledger for ledger in reversed(self.ledgers) if ledger.first <= place)
        return MessageId(ledger.ledger_id, place - ledger.first)


@dataclass(eq=False)
class TwinLog:
    """A topic's log in one partition."""

    topic: TwinTopic
    messages: list[TwinMessage] = field(default_factory=list)
    pending: list[TwinMessage] = field(default_factory=list)
    frontier: Key = (-1, 0)
    last_marker: TwinLedger | None = None
    holds: bool = False
    """The partition is closed and the ledger of the last marker is kept."""
    fired: int = 0
    left_over: int = 0
    """Entries of a request that failed: they are counted until the partition closes."""

    def add(self, message: TwinMessage) -> None:
        assert message.message_id.entry_id == len(self.messages), "entry ids are dense"
        message.late = message.order <= self.frontier
        self.messages.append(message)
        if not message.unadmitted:
            self.pending.append(message)

    def leave_over(self, entries: int) -> None:
        """A request that failed has left so many entries in all."""
        while len(self.messages) < entries:
            self.messages.append(TwinMessage(0, -1, -1, MessageId(0, len(self.messages)), unadmitted=True))
            self.left_over += 1

    @property
    def unfired(self) -> int:
        """Pending messages as the engine counts them."""
        return len(self.pending) + self.left_over


@dataclass(eq=False)
class TwinPartition:
    """A time partition."""

    start_ms: int
    end_ms: int
    closed: bool = False
    logs: dict[TwinTopic, TwinLog] = field(default_factory=dict)

    def log(self, topic: TwinTopic) -> TwinLog:
        return self.logs.setdefault(topic, TwinLog(topic))

    @property
    def references(self) -> int:
        return sum(log.holds for log in self.logs.values())

    def figures(self, now_ms: int) -> tuple[int, int, str, int, int, int, int]:
        """Start, end, state, topics, messages, pending, holders, as PartitionStats has them."""
        state = "closed" if self.closed else "current" if self.start_ms <= now_ms else "future"
        messages = sum(len(log.messages) for log in self.logs.values())
        pending = sum(log.unfired for log in self.logs.values() if not log.topic.deleted and not self.closed)
        return self.start_ms, self.end_ms, state, len(self.logs), messages, pending, self.references
