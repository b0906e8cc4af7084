"""TaskMessage: a message that a task is run for, and the transaction that acknowledges it and sends what follows."""

import inspect
from typing import NamedTuple

from duelog.store.errors import InvalidArgument
from duelog.store.message import Message, ReceivedMessage

from ..connected.connected_store import ConnectedSubscription
from ..subscription import Subscription
from ..transactions import Ack, Transaction

_FIELDS = ReceivedMessage.__mro__[1].__slots__  # type: ignore[attr-defined]  # not declared to type checkers


class FollowUp(NamedTuple):
    """A message that a task returns, alone or in a list: it is sent in the transaction that acknowledges the task's.

    topic: its name. `TaskFunction.message` makes one that calls another task.
    """

    topic: str
    message: Message


class TaskMessage(ReceivedMessage):
    """A received message, as a worker gives it to the function or coroutine of a task."""

    __slots__ = ("_consumer",)

    _consumer: Subscription

    @classmethod
    def of(cls, message: ReceivedMessage, consumer: Subscription) -> "TaskMessage":
        """The message that a consumer has received."""
        found: TaskMessage = object.__new__(cls)
        for name in _FIELDS:
            if hasattr(message, name):
                setattr(found, name, getattr(message, name))
        found._consumer = consumer
        return found

    def transaction(self) -> Transaction:
        """Begin a transaction that acknowledges this message, beside what else it is given.

        Once it is stored the message is done, whatever becomes of the attempt.

            with message.transaction() as transaction:
                transaction.send("invoices", message.payload, deliver_after=86_400)

        """
        if isinstance(self._consumer, ConnectedSubscription):
            return self._consumer.acknowledging(self)
        return Transaction(self._consumer._engine, Ack(self, self._consumer))


def follow(message: TaskMessage, result: object) -> bool:
    """Acknowledge a message and send what its task has returned to be sent; False: that is nothing of the kind.

    Raises InvalidArgument, and as the transaction.
    """
    if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise InvalidArgument("result", result, "the task has not run: it only made this, and nobody goes through it")
    found = [result] if isinstance(result, FollowUp) else result
    if not isinstance(found, (list, tuple)) or not any(isinstance(each, FollowUp) for each in found):
        return False
    with message.transaction() as transaction:
        for each in found:
            if not isinstance(each, FollowUp):
                raise InvalidArgument("result", each, "expected a FollowUp, as the others")
            options = {name: getattr(each.message, name) for name in Message.__slots__ if name != "payload"}
            transaction.send(each.topic, each.message.payload, **options)
    return True
