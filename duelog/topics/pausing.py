"""Pausing a subscription: it hands nothing out to any consumer, until it is resumed or until a time.

What consumers hold already they may acknowledge and give back. Kept over restarts; of a reader in memory only.
"""

from __future__ import annotations

from datetime import datetime

from duelog.store.env.environment import Environment
from duelog.store.errors import InvalidArgument
from duelog.store.message import at_ms

from .subscription_state import FOR_EVER_MS, SubscriptionState
from .topic_state import TopicState


def pause(
    main: Environment, topic: TopicState, subscription: SubscriptionState, until: datetime | int | None, now_ms: int
) -> None:
    """Pause it until an instant (aware datetime or epoch ms), None: until it is resumed; in place of a pause before.

    Durable when it returns. Raises InvalidArgument for an instant that has passed, UnknownSubscription, StoreFull.
    """
    until_ms = FOR_EVER_MS if until is None else at_ms("until", until)
    if until_ms <= now_ms:
        raise InvalidArgument("until", until, "has passed")
    _set(main, topic, subscription, until_ms)


def resume(main: Environment, topic: TopicState, subscription: SubscriptionState) -> None:
    """End a pause, durably. Raises UnknownSubscription, StoreFull."""
    _set(main, topic, subscription, 0)


def _set(main: Environment, topic: TopicState, subscription: SubscriptionState, until_ms: int) -> None:
    if subscription.durable:
        main.write(lambda transaction: subscription.write_paused(transaction, until_ms))
    else:
        subscription.paused_until_ms = until_ms
    topic.changed()
