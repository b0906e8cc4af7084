"""duelog: an embedded, durable log of messages that are due later.

    with DelayedStore.open("data") as store:
        store.topic("reminders").send(b"pay", deliver_after=3600)

Errors are in `duelog.errors`; everything else that callers need is here.
Warnings and errors are logged by loggers under `duelog`; without a configuration of `logging` nothing is printed.
"""

import logging
from importlib.metadata import version

from duelog.delivery.consumer_arguments import Failover
from duelog.delivery.key_slots import KeyShared
from duelog.markers.pending_entries import Outcome
from duelog.store.clock import Clock, ManualClock, SystemClock
from duelog.store.config import StoreConfig
from duelog.store.errors import DuelogError
from duelog.store.log.documents import Document, Documents
from duelog.store.message import Message, Occurrence, ReceivedMessage, ScheduledMessage
from duelog.store.policy.policies import DelayedDeliveryPolicies, Policies
from duelog.store.position import MessageId, MessageIds
from duelog.store.received_messages import ReceivedMessages

from .check.check_store import Finding
from .delayed_store import DelayedStore
from .sending.outbox import DUPLICATE, Duplicate
from .subscription import Subscription, SubscriptionAdmin
from .topic import Topic
from .topics.dead_letters import DeadLetter
from .topics.seeking import LogPositions, PublishedAt
from .topics.topic_events import TopicEvent
from .upkeep.maintenance import TickResult
from .upkeep.schedule import Schedule
from .workers.worker import Worker

__version__ = version("duelog")
"""Version of the installed distribution, as pyproject.toml sets it."""

logging.getLogger("duelog").addHandler(logging.NullHandler())

__all__ = [
    "DUPLICATE",
    "Clock",
    "DeadLetter",
    "DelayedDeliveryPolicies",
    "DelayedStore",
    "Document",
    "Documents",
    "DuelogError",
    "Duplicate",
    "Failover",
    "Finding",
    "KeyShared",
    "LogPositions",
    "ManualClock",
    "Message",
    "MessageId",
    "MessageIds",
    "Occurrence",
    "Outcome",
    "Policies",
    "PublishedAt",
    "ReceivedMessage",
    "ReceivedMessages",
    "Schedule",
    "ScheduledMessage",
    "StoreConfig",
    "Subscription",
    "SubscriptionAdmin",
    "SystemClock",
    "TickResult",
    "Topic",
    "TopicEvent",
    "Worker",
    "__version__",
]
