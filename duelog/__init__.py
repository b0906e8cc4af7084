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
    from duelog.delivery.consumer_arguments import Failover as Failover
    from duelog.delivery.key_slots import KeyShared as KeyShared
    from duelog.markers.pending_entries import Outcome as Outcome
    from duelog.store.clock import Clock as Clock
    from duelog.store.clock import ManualClock as ManualClock
    from duelog.store.clock import SystemClock as SystemClock
    from duelog.store.config import StoreConfig as StoreConfig
    from duelog.store.errors import DuelogError as DuelogError
    from duelog.store.log.documents import Document as Document
    from duelog.store.log.documents import Documents as Documents
    from duelog.store.message import Message as Message
    from duelog.store.message import Occurrence as Occurrence
    from duelog.store.message import ReceivedMessage as ReceivedMessage
    from duelog.store.message import ScheduledMessage as ScheduledMessage
    from duelog.store.policy.policies import DelayedDeliveryPolicies as DelayedDeliveryPolicies
    from duelog.store.policy.policies import Policies as Policies
    from duelog.store.position import MessageId as MessageId
    from duelog.store.position import MessageIds as MessageIds
    from duelog.store.received_messages import ReceivedMessages as ReceivedMessages

    from .check.check_store import Finding as Finding
    from .connected.connected_store import connect as connect
    from .delayed_store import DelayedStore as DelayedStore
    from .sending.outbox import DUPLICATE as DUPLICATE
    from .sending.outbox import Duplicate as Duplicate
    from .subscription import Subscription as Subscription
    from .subscription import SubscriptionAdmin as SubscriptionAdmin
    from .topic import Topic as Topic
    from .topics.dead_letters import DeadLetter as DeadLetter
    from .topics.seeking import LogPositions as LogPositions
    from .topics.seeking import PublishedAt as PublishedAt
    from .topics.topic_events import TopicEvent as TopicEvent
    from .transactions import Transaction as Transaction
    from .upkeep.maintenance import TickResult as TickResult
    from .upkeep.schedule import Schedule as Schedule
    from .workers.task_arguments import TaskFunction as TaskFunction
    from .workers.task_message import FollowUp as FollowUp
    from .workers.task_message import TaskMessage as TaskMessage
    from .workers.worker import Worker as Worker

    __version__: str
    """Version of the installed distribution, as pyproject.toml sets it."""

logging.getLogger("duelog").addHandler(logging.NullHandler())

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

__all__ = [name for names in ("__version__", *_HOMES.values()) for name in names.split()]


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
