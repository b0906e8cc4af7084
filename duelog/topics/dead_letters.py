"""Dead letters: messages of a subscription whose deliveries all failed, kept until they are requeued or purged.

A dead letter is moved: it is appended to the dead-letter topic and acknowledged where it came from in one transaction,
so it is in exactly one of the two places after a crash. From the first letter on that topic has a subscription of its
own, the keeper, which holds every letter until `requeue` moves it back, `purge` acknowledges it, or a consumer of the
keeper does. Other subscriptions of a dead-letter topic read letters as any topic's messages, and free nothing.

A message of a topic that has a keeper is never dead-lettered again, and no time to live expires what the keeper holds.

Facts about a letter stand in the extra part of its body (store/codec/body.py); a consumer of the topic, Pulsar's too,
finds the origin in the properties REAL_TOPIC, REAL_SUBSCRIPTION and ORIGIN_MESSAGE_ID, why it is there and after how
many deliveries in DEAD_LETTER_REASON and DEAD_LETTER_ATTEMPTS.

Source: Pulsar's DeadLetterPolicy and `initialSubscriptionName`.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pyroaring import BitMap

from duelog.markers.pending_entries import PendingEntries, Successors
from duelog.store.clock import Clock
from duelog.store.codec.body import decode_body, encode_one, occurrence_extra, occurrence_of
from duelog.store.codec.run import RunKind
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import (
    CorruptEntry,
    InvalidArgument,
    ResourceShortage,
    StoreFull,
    UnknownSubscription,
    UnknownTopic,
    checked_list,
)
from duelog.store.held import Held
from duelog.store.limited_log import LimitedLog
from duelog.store.log.scan import RunFinder
from duelog.store.message import MAX_DUE_MS, Message, Occurrence, ReceivedMessage
from duelog.store.names import MAX_TOPIC_BYTES, TopicName
from duelog.store.position import MessageId, Position

from ..delivery.position_set import group_by_ledger
from .ack_flusher import AckFlusher, Acknowledged
from .topic_list import Topics
from .topic_state import SubscriptionState, TopicState

KEEPER = "dead-letters"
"""Name of the subscription that holds the letters of a dead-letter topic."""

_FACTS = "dead_letter"
_ORIGIN_PROPERTIES = (
    "REAL_TOPIC",
    "REAL_SUBSCRIPTION",
    "ORIGIN_MESSAGE_ID",
    "DEAD_LETTER_REASON",
    "DEAD_LETTER_ATTEMPTS",
)
_MAX_BYTES = 1 << 30
_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was dead-lettered.

    payload, key, properties, due_ms, publish_ms and message_id are the message's own, topic and subscription are where
    it came from. reason: what `dead_letter` was told, or the last `retry_later`; else "redeliveries". attempts: how
    often it was delivered. first_ms, last_ms: when the first and the last of these deliveries ended without an
    acknowledgement. dead_ms: when it was dead-lettered. dead_letter_topic, position: where it lies now. All times are
    epoch ms of the store's clock. occurrence: which schedule it is of, if any.
    """

    dead_letter_topic: str
    position: Position
    topic: str
    subscription: str
    message_id: MessageId
    payload: bytes
    key: str | None
    properties: dict[str, str]
    due_ms: int
    publish_ms: int
    reason: str
    attempts: int
    first_ms: int
    last_ms: int
    dead_ms: int
    occurrence: Occurrence | None = None


Letters = DeadLetter | Iterable[DeadLetter]
"""One letter, or several."""


@dataclass(eq=False, repr=False)
class DeadLetters:
    """The dead letters of an open store. Thread-safe."""

    _main: Environment
    _topics: Topics
    _flusher: AckFlusher
    _clock: Clock
    _pending: PendingEntries
    _wake: Callable[[], None]
    _log: LimitedLog = field(default_factory=lambda: LimitedLog(logging.getLogger("duelog.topics")), init=False)

    # -- in ----------------------------------------------------------------------------------------

    def bury(
        self,
        topic: TopicState,
        subscription: SubscriptionState,
        messages: list[ReceivedMessage],
        reason: str | None = None,
    ) -> None:
        """Move messages that a consumer of the subscription holds to its dead-letter topic, in one transaction.

        reason: why the consumer, which has just failed at them, gives them up; None: too many deliveries failed before
        this one. Raises StoreFull, StoreFailed; then nothing was moved.
        """
        now_ms = self._clock.now_ms()
        target = dead_letter_name(topic.name, subscription.name, subscription.policies.dead_letter_topic)
        grave = self._topics.get_or_create(target, now_ms)
        self._topics.add_subscription(grave, KEEPER, now_ms, earliest=True, keeper=True)
        entries = group_by_ledger([message.position for message in messages])
        bodies = [(message.position, self._letter(subscription, message, now_ms, reason)) for message in messages]

        def work(transaction: Transaction, fresh: Sequence[Mapping[int, BitMap]]) -> None:
            dead = [body for position, body in bodies if _among(fresh[0], position)]
            if dead:
                grave.log.append_messages(transaction, np.full(len(dead), now_ms, dtype=np.int64), dead, now_ms)

        count = self._flusher.acknowledge_with([(topic, subscription, entries)], work)
        with subscription.lock:
            subscription.counts.dead_lettered += count

    def bury_if_possible(
        self, topic: TopicState, subscription: SubscriptionState, messages: list[ReceivedMessage]
    ) -> bool:
        """Bury messages; False if disk space or another resource is short, which is logged: nothing was moved."""
        try:
            self.bury(topic, subscription, messages)
        except (StoreFull, ResourceShortage) as error:
            text = "%s: dead letters of subscription %s cannot be moved, and are tried again: %s"
            self._log.log(logging.WARNING, text, topic.name, subscription.name, error)
            return False
        return True

    @staticmethod
    def _letter(subscription: SubscriptionState, message: ReceivedMessage, now_ms: int, reason: str | None) -> bytes:
        with subscription.lock:
            dispatcher = subscription.dispatcher
            failed = None if dispatcher is None else dispatcher.outstanding.failed_at(message.position)
        first_ms, last_ms = failed or (now_ms, now_ms)
        origin_id = message.message_id
        if message.first_try is not None:
            origin_id, first_ms = message.first_try
        attempts = message.redelivery_count + message.retries
        if reason is not None:
            attempts, last_ms = attempts + 1, now_ms
        told = reason or message.failure or "redeliveries"
        facts = [
            message.topic,
            subscription.name,
            *origin_id,
            message.due_ms,
            message.publish_ms,
            told,
            attempts,
            first_ms,
            last_ms,
        ]
        values = (message.topic, subscription.name, str(origin_id), told, str(attempts))
        origin = dict(zip(_ORIGIN_PROPERTIES, values, strict=True))
        letter = Message(message.payload, key=message.key, properties={**message.properties, **origin})
        return encode_one(letter, now_ms, _MAX_BYTES, {_FACTS: facts, **occurrence_extra(message.occurrence)})[1]

    # -- looking -----------------------------------------------------------------------------------

    def held(
        self,
        topic: TopicName | None = None,
        subscription: str | None = None,
        reason: str | None = None,
        key: str | None = None,
        dead_before_ms: int | None = None,
    ) -> Iterator[DeadLetter]:
        """Letters that keepers hold, topic by topic, oldest first; those for which all that is given holds.

        What cannot be read is passed over: a consumer of the keeper quarantines it. O(entries that keepers hold).
        """
        for grave, keeper in self._topics.keepers():
            for letter in self._of(grave, keeper):
                is_wanted = (
                    (topic is None or letter.topic == str(topic))
                    and (subscription is None or letter.subscription == subscription)
                    and (reason is None or letter.reason == reason)
                    and (key is None or letter.key == key)
                    and (dead_before_ms is None or letter.dead_ms <= dead_before_ms)
                )
                if is_wanted:
                    yield letter

    def _of(self, grave: TopicState, keeper: SubscriptionState) -> Iterator[DeadLetter]:
        for ledger in grave.log.ledgers():
            with keeper.lock:
                held = keeper.acks.unacked(ledger.ledger_id, 0, ledger.entries)
            while held:  # a page in each transaction, so that none is long
                page = held[:_PAGE]
                held -= page
                yield from self._page(str(grave.name), ledger.ledger_id, page)

    def _page(self, grave: str, ledger_id: int, entries: BitMap) -> list[DeadLetter]:
        found = []
        with self._main.read() as raw:
            finder = RunFinder(raw, self._main.name)
            for entry_id in entries:
                try:
                    run = finder.find(ledger_id, entry_id)
                    body = None if run is None or run.kind != RunKind.MESSAGES else run.body(entry_id - run.first_entry)
                    letter = None if body is None else decode_letter(grave, Position(ledger_id, entry_id), body)
                except (CorruptEntry, ValueError) as error:
                    text = "%s: dead letter %d:%d of %s cannot be read and is not listed: %s"
                    where = self._main.path.parent
                    self._log.log(logging.WARNING, text, where, ledger_id, entry_id, grave, error)
                    continue
                if letter is not None:
                    found.append(letter)
        return found

    # -- out ---------------------------------------------------------------------------------------

    def requeue(self, letters: Sequence[DeadLetter], delay_ms: int = 0) -> int:
        """Move letters back to the topics and subscriptions that they came from, in one transaction; how many.

        Each is due `delay_ms` from now, delivered to that subscription alone, and its attempts count from 0. What its
        keeper does not hold any more is passed over. Raises UnknownTopic and UnknownSubscription (the origin is gone),
        InvalidArgument, StoreFull, StoreFailed; then nothing was moved.
        """
        letters = list({(letter.dead_letter_topic, letter.position): letter for letter in letters}.values())
        origins = {letter.topic: self._topics.get(TopicName.parse(letter.topic)) for letter in letters}
        for letter in letters:
            if letter.subscription not in origins[letter.topic].subscriptions:
                raise UnknownSubscription(letter.topic, letter.subscription)
        entries = self._entries_of(letters)
        if not entries:
            return 0
        with Held() as held:
            self._pending.enter_gate(held)
            now_ms = self._clock.now_ms()
            due_ms = now_ms + delay_ms
            if due_ms > MAX_DUE_MS:
                raise InvalidArgument("delay", delay_ms / 1000, "due after the year 9999")
            bodies: dict[str, dict[int, bytes]] = {}
            for row, letter in enumerate(letters):
                message = Message(letter.payload, key=letter.key, properties=letter.properties)
                extra = {"addressee": letter.subscription, "retries": 0, **occurrence_extra(letter.occurrence)}
                bodies.setdefault(letter.topic, {})[row] = encode_one(message, now_ms, _MAX_BYTES, extra)[1]
            dues = [due_ms] * len(letters)
            appends = []
            for name, of_topic in bodies.items():
                new = Successors(origins[name].log, dues, of_topic)
                appends.append((origins[name], self._pending.place(held, new.log.topic_id, due_ms, now_ms), new))

            def work(transaction: Transaction, fresh: Sequence[Mapping[int, BitMap]]) -> None:
                rows = _still_held(letters, entries, fresh)
                for origin, place, new in appends:
                    if origin.deleted:
                        raise UnknownTopic(str(origin.name))
                    self._pending.append(transaction, place, new, [row for row in new.bodies if row in rows], now_ms)

            count = self._flusher.acknowledge_with(entries, work)
        self._wake()
        return count

    def purge(self, letters: Sequence[DeadLetter]) -> int:
        """Drop letters for good, durably, in one transaction; how many of them were still held.

        Raises UnknownTopic, StoreFull, StoreFailed; then nothing was dropped.
        """
        return self._flusher.acknowledge_with(self._entries_of(letters), lambda transaction, fresh: None)

    def _entries_of(self, letters: Iterable[DeadLetter]) -> list[Acknowledged]:
        positions: dict[str, list[Position]] = {}
        for letter in letters:
            grave, _ = self._keeper(letter.dead_letter_topic)
            if letter.position.entry_id < (grave.log.entries_of(letter.position.ledger_id) or 0):
                positions.setdefault(letter.dead_letter_topic, []).append(letter.position)
        return [(*self._keeper(name), group_by_ledger(of_topic)) for name, of_topic in positions.items()]

    def _keeper(self, name: str) -> tuple[TopicState, SubscriptionState]:
        grave = self._topics.get(TopicName.parse(name))
        return grave, grave.subscription(KEEPER)


def dead_letter_name(topic: TopicName, subscription: str, chosen: str | None) -> TopicName:
    """The policy `dead_letter_topic` where it is set, or `<topic>-<subscription>-DLQ` beside the topic.

    A name that would be too long ends in a digest of it instead, cut before that.
    """
    if chosen:
        return TopicName.parse(chosen)
    local = f"{topic.local_name}-{subscription}-DLQ"
    name = topic._replace(local_name=local)
    over = len(str(name).encode()) - MAX_TOPIC_BYTES
    if over <= 0:
        return name
    end = f"-{hashlib.sha256(local.encode()).hexdigest()[:32]}-DLQ"
    kept = local.encode()[: -over - len(end)].decode(errors="ignore")
    return topic._replace(local_name=kept + end)


def _still_held(
    letters: Iterable[DeadLetter], entries: Sequence[Acknowledged], fresh: Sequence[Mapping[int, BitMap]]
) -> set[int]:
    """Places among the letters of those that are acknowledged by this call alone."""
    of_topic = {str(topic.name): each for (topic, _, _), each in zip(entries, fresh, strict=True)}
    return {
        row for row, letter in enumerate(letters) if _among(of_topic.get(letter.dead_letter_topic, {}), letter.position)
    }


def checked_letters(letters: Letters) -> list[DeadLetter]:
    """One letter, or several, as a list. Raises InvalidArgument."""
    found = checked_list("letters", [letters] if isinstance(letters, DeadLetter) else letters, "dead letters")
    for at, letter in enumerate(found):
        if not isinstance(letter, DeadLetter):
            raise InvalidArgument(f"letters[{at}]", letter, "expected a DeadLetter")
    return found


def _among(entries: Mapping[int, BitMap], position: Position) -> bool:
    return position.entry_id in entries.get(position.ledger_id, ())


def decode_letter(grave: str, position: Position, body: bytes) -> DeadLetter | None:
    """The letter of a body, None where it is none. Raises ValueError."""
    dead_ms, payload, key, properties, extra = decode_body(body)
    facts = None if extra is None else extra.get(_FACTS)
    if facts is None:
        return None
    kinds = (str, str, int, int, int, int, str, int, int, int)
    if type(facts) is not list or [type(fact) for fact in facts] != list(kinds):
        raise ValueError(f"facts {facts!r} of a dead letter are malformed")
    topic, subscription, ledger_id, entry_id, *rest = facts
    own = {name: value for name, value in (properties or {}).items() if name not in _ORIGIN_PROPERTIES}
    origin_id = MessageId(ledger_id, entry_id)
    times = (*rest, dead_ms, occurrence_of(extra))
    return DeadLetter(grave, position, topic, subscription, origin_id, payload, key, own, *times)
