"""duelog: an embedded, durable log of messages that are due later.

    with DelayedStore.open("data") as store:
        store.topic("reminders").send(b"pay", deliver_after=3600)

Errors are in `duelog.errors`; everything else that callers need is here.
"""

from duelog.markers.withdrawal import Outcome
from duelog.store.clock import Clock, ManualClock, SystemClock
from duelog.store.config import StoreConfig
from duelog.store.errors import DuelogError
from duelog.store.message import Message, ReceivedMessage, ScheduledMessage
from duelog.store.policies import DelayedDeliveryPolicies, Policies
from duelog.store.position import MessageId, MessageIds

from .check import Finding
from .dead_letters import DeadLetter
from .delayed_store import DelayedStore
from .maintenance import TickResult
from .recurring import Schedule
from .subscription import Subscription
from .topic import Topic

__all__ = [
    "Clock",
    "DeadLetter",
    "DelayedDeliveryPolicies",
    "DelayedStore",
    "DuelogError",
    "Finding",
    "ManualClock",
    "Message",
    "MessageId",
    "MessageIds",
    "Outcome",
    "Policies",
    "ReceivedMessage",
    "Schedule",
    "ScheduledMessage",
    "StoreConfig",
    "Subscription",
    "SystemClock",
    "TickResult",
    "Topic",
]
