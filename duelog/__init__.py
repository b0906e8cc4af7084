"""duelog: an embedded, durable log of messages that are due later.

    with DelayedStore.open("data") as store:
        store.topic("reminders").send(b"pay", deliver_after=3600)

Errors are in `duelog.errors`; everything else that callers need is here.
Warnings and errors are logged by loggers under `duelog`; without a configuration of `logging` nothing is printed.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from .connected.connected_store import connect
    from .delayed_store import DelayedStore
    from .sending.outbox import DUPLICATE, Duplicate
    from .subscription import Subscription, SubscriptionAdmin
    from .topic import Topic
    from .topics.dead_letters import DeadLetter
    from .topics.seeking import LogPositions, PublishedAt
    from .topics.topic_events import TopicEvent
    from .transactions import Transaction
    from .upkeep.maintenance import TickResult
    from .upkeep.schedule import Schedule
    from .workers.task_arguments import TaskFunction
    from .workers.task_message import FollowUp, TaskMessage
    from .workers.worker import Worker

    __version__: str
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
    "FollowUp",
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
    "TaskFunction",
    "TaskMessage",
    "TickResult",
    "Topic",
    "TopicEvent",
    "Transaction",
    "Worker",
    "__version__",
    "connect",
]

_HOMES = {
    "duelog.delivery.consumer_arguments": "Failover",
    "duelog.delivery.key_slots": "KeyShared",
    "duelog.markers.pending_entries": "Outcome",
    "duelog.store.clock": "Clock ManualClock SystemClock",
    "duelog.store.config": "StoreConfig",
    "duelog.store.errors": "DuelogError",
    "duelog.store.log.documents": "Document Documents",
    "duelog.store.message": "Message Occurrence ReceivedMessage ScheduledMessage",
    "duelog.store.policy.policies": "DelayedDeliveryPolicies Policies",
    "duelog.store.position": "MessageId MessageIds",
    "duelog.store.received_messages": "ReceivedMessages",
    "duelog.check.check_store": "Finding",
    "duelog.connected.connected_store": "connect",
    "duelog.delayed_store": "DelayedStore",
    "duelog.sending.outbox": "DUPLICATE Duplicate",
    "duelog.subscription": "Subscription SubscriptionAdmin",
    "duelog.topic": "Topic",
    "duelog.transactions": "Transaction",
    "duelog.workers.task_arguments": "TaskFunction",
    "duelog.workers.task_message": "FollowUp TaskMessage",
    "duelog.topics.dead_letters": "DeadLetter",
    "duelog.topics.seeking": "LogPositions PublishedAt",
    "duelog.topics.topic_events": "TopicEvent",
    "duelog.upkeep.maintenance": "TickResult",
    "duelog.upkeep.schedule": "Schedule",
    "duelog.workers.worker": "Worker",
}
"""Modules of the public names, each imported when one of its names is first used: `import duelog` loads no engine."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - it takes longer than all else here

        found: object = version("duelog")
    elif name == "errors":
        found = import_module("duelog.errors")
    else:
        home = next((module for module, names in _HOMES.items() if name in names.split()), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(home), name)
    globals()[name] = found
    return found
