"""One consumer of a subscription: what is handed out to it, and what becomes of that.

Deliveries of all consumers of a subscription are in its dispatcher, under its lock; commits are waited for without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pyroaring import BitMap

from duelog.store.clock import Clock
from duelog.store.errors import ClosedError, InvalidArgument, StoreFull
from duelog.store.message import ReceivedMessage
from duelog.store.policy.policies import EffectivePolicies
from duelog.store.position import Position
from duelog.store.received_messages import Facts, ReceivedMessages

from ..delivery.consumer_arguments import entries_of
from ..delivery.dispatcher import Dispatcher, SubscriptionType
from .ack_flusher import AckFlusher
from .dead_letters import DeadLetters
from .inline import InlineMessages
from .seeking import go_to
from .subscription_state import Part, SubscriptionState
from .topic_state import TopicState

_NO_FACTS = Facts(None)

_BURY_AGAIN_MS = 1_000
"""When a message that cannot be moved to the dead letters comes again, to be tried again."""


class Consumer:
    """Attached to a subscription until `close`. Thread-safe."""

    def __init__(
        self,
        topic: TopicState,
        subscription: SubscriptionState,
        type_: SubscriptionType,
        policies: Callable[[], EffectivePolicies],
        inline: InlineMessages,
        flusher: AckFlusher,
        dead_letters: DeadLetters,
        clock: Clock,
        part: Part,
    ) -> None:
        """Attach it; `policies` gives what is in force for the subscription. Raises as `SubscriptionState.attach`."""
        self._topic = topic
        self._subscription = subscription
        self._inline = inline
        self._flusher = flusher
        self._dead_letters = dead_letters
        self._clock = clock
        self.closed = False
        self._id = subscription.attach(
            type_, lambda: inline.reader(topic, subscription), topic.log, policies, part, clock.now_ms()
        )
        if subscription.durable and flusher.log is not None:
            flusher.log.join(subscription.record.subscription_id, subscription.log_held)
        if type_ == "failover":
            topic.changed()  # another may be served now

    def _dispatcher(self) -> Dispatcher:
        """The subscription's deliveries. REQUIRES: its lock. Raises ClosedError."""
        dispatcher = self._subscription.dispatcher
        if dispatcher is None or self.closed:
            raise ClosedError(f"subscription {self._subscription.name!r}")
        return dispatcher

    # -- out ---------------------------------------------------------------------------------------

    def hand_out(self, max_messages: int) -> tuple[ReceivedMessages | None, int | None]:
        """Messages that are due now, at most `max_messages`; and if there are none, when to look again.

        An empty batch: what was due went elsewhere, and more may be. None: nothing is due. When: epoch ms, or None.
        """
        subscription, topic = self._subscription, self._topic
        now_ms = self._clock.now_ms()
        limit = subscription.max_in_flight
        with subscription.lock:
            dispatcher = self._dispatcher()
            if now_ms < subscription.paused_until_ms:
                return None, subscription.pause_ends_ms(now_ms)
            kept_back = dispatcher.kept_back_count
            batch = dispatcher.next_batch(self._id, max_messages, now_ms, limit)
            passed_gone = self._pass_gone(dispatcher)
            kept_more = dispatcher.kept_back_count > kept_back
            passed_over = None if subscription.reader is None else subscription.reader.next_due_ms(now_ms)
            again = (dispatcher.next_redelivery_ms(), passed_over)
            failed = subscription.attempts.changed
        try:
            if failed or (self._flusher.log is not None and self._flusher.log.worn):
                self._note(moved_ledger=False)
            if passed_gone is not None:
                self._note(moved_ledger=passed_gone)
            if kept_more or (batch and subscription.policies.ack_timeout_ms):
                topic.changed()  # others have something to wait for that they did not know of
            if not batch:
                return None, min((ms for ms in again if ms is not None), default=None)
            routed = self._route(batch)
        except BaseException:  # the caller gets none of them, and no delivery has failed
            with subscription.lock:
                self._dispatcher().nack(self._id, batch.positions, now_ms, now_ms, failed=False)
            topic.changed()
            raise
        with subscription.lock:
            subscription.counts.hand_out(routed)
        return routed, None

    def _note(self, *, moved_ledger: bool) -> None:
        """Have what changed with a delivery be written; where there is no space the upkeep tries again, and says so."""
        with suppress(StoreFull):
            self._flusher.acknowledged(self._topic, self._subscription, moved_ledger=moved_ledger)

    def _pass_gone(self, dispatcher: Dispatcher) -> bool | None:
        """Acknowledge what the reader found to be gone; None: nothing, else whether there may be something to trim.

        REQUIRES: the subscription's lock.
        """
        gone = self._subscription.take_gone()
        if not gone:
            return None
        before = dispatcher.acks.mark_delete
        dispatcher.ack(None, gone)
        return self._moved_ledger(before)

    def _route(self, batch: ReceivedMessages) -> ReceivedMessages:
        """Return the messages of a batch for the handler; the rest (for others, expired, dead) is acknowledged."""
        subscription = self._subscription
        buries = subscription.durable and not self._topic.keeps_dead_letters
        limit = subscription.policies.max_redeliveries if buries else -1
        now_ms, expired = self._clock.now_ms(), 0
        expired_ms = subscription.expired_ms(subscription.policies, now_ms)
        if (
            not batch.facts
            and (limit < 0 or max(batch.redelivery_counts) <= limit)
            and (expired_ms < 0 or min(batch.due_ms) > expired_ms)
        ):
            return batch
        wanted, dead, over = [], [], []
        columns = zip(batch.places, batch.redelivery_counts, batch.due_ms, strict=True)
        for row, (place, count, due_ms) in enumerate(columns):
            facts = batch.facts.get(place, _NO_FACTS)
            if due_ms <= expired_ms or not facts.deliverable(subscription.name, now_ms):
                over.append(row)
                expired += facts.addressee in (None, subscription.name)
            elif limit >= 0 and count + facts.retries > limit:
                dead.append(row)
            else:
                wanted.append(row)
        if dead:
            letters = batch.pick(dead)
            if not self._dead_letters.bury_if_possible(self._topic, subscription, letters.to_list()):
                with subscription.lock:
                    at_ms = now_ms + _BURY_AGAIN_MS
                    self._dispatcher().nack(self._id, letters.positions, at_ms, now_ms, failed=False)
        if over:
            passed_over = entries_of(batch.pick(over))
            with suppress(StoreFull):  # as in _note
                self._acknowledge(lambda dispatcher: dispatcher.ack_entries(self._id, passed_over), counted=False)
            with subscription.lock:
                subscription.counts.expired += expired
        return batch if len(wanted) == len(batch) else batch.pick(wanted)

    # -- in ----------------------------------------------------------------------------------------

    def ack(self, entries: Mapping[int, BitMap], *, durable: bool = False) -> int:
        """Acknowledge entries by ledger id; how many were not acknowledged before. Raises InvalidArgument."""
        return self._acknowledge(lambda dispatcher: dispatcher.ack_entries(self._id, entries), durable=durable)

    def ack_cumulative(self, position: Position, *, durable: bool = False) -> int:
        """Acknowledge a position and every one before it; as `ack`."""
        return self._acknowledge(lambda dispatcher: dispatcher.ack_cumulative(position), durable=durable)

    def _acknowledge(self, work: Callable[[Dispatcher], int], *, durable: bool = False, counted: bool = True) -> int:
        with self._subscription.lock:
            dispatcher = self._dispatcher()
            before = dispatcher.acks.mark_delete
            count = work(dispatcher)
            if counted:
                self._subscription.counts.acknowledged += count
            moved = self._moved_ledger(before)
            others_wait = self._subscription.max_in_flight or dispatcher.kept_back_count
        if others_wait:
            self._topic.changed()  # a consumer may hold less than its limit, a key may be free for another
        if count:
            self._flusher.acknowledged(self._topic, self._subscription, moved_ledger=moved)
        if durable:
            self._flusher.flush()
        return count

    def _moved_ledger(self, before: Position) -> bool:
        """Return True if mark-delete has reached the end of a ledger, so that there may be something to trim."""
        after = self._subscription.acks.mark_delete
        return after.ledger_id != before.ledger_id or (
            after != before and self._topic.log.entries_of(after.ledger_id) == after.entry_id + 1
        )

    def dead_letter(self, message: ReceivedMessage, reason: str | None) -> None:
        """Move a message at which the consumer has failed to the dead-letter topic. Raises InvalidArgument."""
        subscription = self._subscription
        if not subscription.durable or self._topic.keeps_dead_letters:
            raise InvalidArgument("message", message, "of a reader, or a dead letter itself, which go nowhere")
        self._dead_letters.bury(self._topic, subscription, [message], reason)

    def nack(self, by_delay: Mapping[int, Sequence[Position]]) -> int:
        """Give back positions by the ms after which they come again; how many the consumer still held."""
        now_ms = self._clock.now_ms()
        count = 0
        with self._subscription.lock:
            for wait_ms, positions in by_delay.items():
                count += self._dispatcher().nack(self._id, positions, now_ms + wait_ms, now_ms)
        if count:
            self._flusher.acknowledged(self._topic, self._subscription, moved_ledger=False)
            self._topic.changed()
        return count

    def extend(self, entries: Mapping[int, BitMap], wait_ms: int | None) -> int:
        """Hold entries by ledger id for `wait_ms` from now, None: for the timeout; how many the consumer still held."""
        now_ms = self._clock.now_ms()
        with self._subscription.lock:
            wait_ms = self._subscription.policies.ack_timeout_ms if wait_ms is None else wait_ms
            count = self._dispatcher().extend(self._id, entries, now_ms + wait_ms)
        self._topic.changed()  # they may come again earlier than receivers know of
        return count

    def report_running(self, since_ms: Callable[[], int | None]) -> None:
        """Have figures say how long the longest running handler has run, until the consumer leaves."""
        with self._subscription.lock:
            self._subscription.running[self._id] = since_ms

    def nack_all(self) -> int:
        """Give back all that the consumer holds, due at once; how many messages."""
        now_ms = self._clock.now_ms()
        with self._subscription.lock:
            count = self._dispatcher().nack_all(self._id, now_ms)
        if count:
            self._flusher.acknowledged(self._topic, self._subscription, moved_ledger=False)
            self._topic.changed()
        return count

    @property
    def active(self) -> bool:
        """True if messages are handed out to it."""
        with self._subscription.lock:
            return self._dispatcher().may_receive(self._id)

    def first_failed_ms(self, position: Position) -> int | None:
        """When the first delivery of a message failed; None: none did."""
        with self._subscription.lock:
            failed = self._dispatcher().outstanding.failed_at(position)
        return None if failed is None else failed[0]

    # -- elsewhere ---------------------------------------------------------------------------------

    def seek(self, position: Position) -> Position:
        """Go to a position, or to the nearest that the log has; where that is. Durable when it returns."""
        subscription, now_ms = self._subscription, self._clock.now_ms()
        with subscription.lock:
            self._dispatcher()
            position = go_to(self._topic, subscription, position, self._inline.waiting(self._topic, now_ms), now_ms)
        self._flusher.mark(subscription, self._clock.now_ms())
        self._flusher.flush()
        return position

    def leave(self, now_ms: int, *, failed: bool = True) -> None:
        """Detach: what was handed out and not acknowledged is handed out again; failed: and counts as delivered."""
        self._subscription.detach(self._id, now_ms, failed=failed)
        if self._subscription.attempts.changed:
            self._flusher.acknowledged(self._topic, self._subscription, moved_ledger=False)
        with self._subscription.lock:
            if self._subscription.durable and not self._subscription.consumers and self._flusher.log is not None:
                self._flusher.log.leave(self._subscription.record.subscription_id)
        if not self._subscription.durable and self._subscription.deleted:
            self._topic.forget_reader(self._subscription)
