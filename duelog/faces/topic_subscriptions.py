"""The subscriptions of a topic: attaching to them and removing them, and readers, which leave nothing behind."""

from __future__ import annotations

from duelog.store.errors import InvalidArgument, UnknownSubscription

from ..delivery.consumer_arguments import check_subscribing
from ..delivery.dispatcher import SubscriptionType
from ..delivery.failover import Failover
from ..delivery.key_slots import KeyShared
from ..engine import Engine
from ..sending.topic_sender import TopicSender
from ..subscription import Subscription
from ..topics.seeking import SeekTarget
from ..topics.topic_state import TopicState
from .subscription_admin import SubscriptionAdmin


class TopicSubscriptions:
    """What a topic has for those who receive; a part of Topic."""

    _engine: Engine
    sender: TopicSender

    @property
    def name(self) -> str:
        """Full name of the topic."""
        raise NotImplementedError

    def _existing(self) -> TopicState:
        """The topic's state. Raises UnknownTopic."""
        raise NotImplementedError

    def subscribe(
        self,
        name: str,
        *,
        type: SubscriptionType = "exclusive",
        initial_position: str = "earliest",
        failover: Failover | None = None,
        key_shared: KeyShared | None = None,
    ) -> Subscription:
        """Attach a consumer to the subscription `name`, creating it durably where there is none.

        type: "exclusive" (one consumer), "failover" (the first of several gets all, the next takes over), "shared"
        (each message to one of many) or "key_shared" (as shared, and the messages of a key in order, one consumer at a
        time). initial_position, of a new subscription: "earliest", with what the main log still holds, or "latest",
        with what comes into the main log from now on; delayed messages sent before and not due yet come either way,
        wherever they wait. failover: how it takes part in a failover subscription; None: by its arrival.
        key_shared: how it takes part in a key-shared one; None: by the messages' keys. Raises ConsumerBusy,
        InvalidArgument.
        """
        now_ms = self._engine.writing_at()
        check_subscribing(name, type, initial_position, failover, key_shared)
        state = self.sender.topic(now_ms)
        subscription = self._engine.topics.add_subscription(
            state,
            name,
            initial_position == "earliest",
            now_ms,
            lambda: self._engine.delivery.inline.waiting(state, now_ms),
        )
        return Subscription(self._engine, state, subscription, type, failover or key_shared)

    def reader(
        self,
        start: SeekTarget = "earliest",
        *,
        name: str | None = None,
        type: SubscriptionType = "exclusive",
        failover: Failover | None = None,
        key_shared: KeyShared | None = None,
    ) -> Subscription:
        """Attach a consumer from a position or time on, by a subscription that leaves nothing behind.

        It has no record in the store, holds nothing back from being trimmed (what is trimmed before it was read is
        passed over), and vanishes when its last consumer closes. It receives as any subscription does, delays too:
        what it does not acknowledge comes again after `ack_timeout_ms`, where that is set. start: as
        `Subscription.seek`. name: several consumers of one name share one reader, begun where the first of them said;
        None: a name of its own. The rest: as `subscribe`. Dead letters and `retry_later` are for subscriptions
        only. Raises ConsumerBusy, InvalidArgument (also for the name of a subscription).
        """
        self._engine.writing_at()
        state = self.sender.topic(self._engine.clock.now_ms())
        wanted = state.new_reader_name() if name is None else name
        check_subscribing(wanted, type, "earliest", failover, key_shared)
        if wanted in state.subscriptions:
            raise InvalidArgument("name", name, "the topic has a subscription of this name")
        engine = self._engine
        position = engine.target_of(state, start)
        while True:
            now_ms = self._engine.clock.now_ms()
            found = state.reader(wanted, position, self._engine.delivery.inline.waiting(state, now_ms), now_ms)
            try:
                return Subscription(self._engine, state, found, type, failover or key_shared)
            except UnknownSubscription:  # its last consumer has left meanwhile
                if state.deleted:
                    raise

    def unsubscribe(self, name: str) -> None:
        """Remove a subscription and what it holds. Raises UnknownSubscription, UnknownTopic, ConsumerBusy."""
        self._engine.check_writable()
        self._engine.upkeep.removal.remove_subscription(self._existing(), name)

    def clear_inline(self, subscription: str) -> int:
        """Acknowledge, for one subscription alone, what waits in the topic's main log and is not due yet (PIP-448).

        These are messages sent with a delay of at most `inline_delay_ms`; other subscriptions still get them. What
        waits in time partitions, and what is due, stays. Works with consumers attached and without. Durable when it
        returns; how many this subscription had not acknowledged. Raises UnknownTopic, UnknownSubscription, StoreFull,
        StoreFailed.
        """
        self._engine.check_writable()
        return self._engine.delivery.inline.clear(self._existing(), subscription)

    def subscription(self, name: str) -> SubscriptionAdmin:
        """A subscription, to be looked at and changed without attaching. Raises UnknownSubscription, UnknownTopic."""
        topic = self._existing()
        state = topic.subscriptions.get(name)
        if state is None:
            raise UnknownSubscription(self.name, name)
        return SubscriptionAdmin(self._engine, topic, state)

    def subscriptions(self) -> list[str]:
        """Names of the subscriptions. Raises UnknownTopic."""
        return sorted(self._existing().subscriptions)
