"""TaskMessage: a message that a task is run for, and the transaction that acknowledges it."""

from __future__ import annotations

from duelog.store.message import ReceivedMessage

from ..connected.connected_store import ConnectedSubscription
from ..subscription import Subscription
from ..transactions import Ack, Transaction

_FIELDS = ReceivedMessage.__mro__[1].__slots__  # type: ignore[attr-defined]  # not declared to type checkers


class TaskMessage(ReceivedMessage):
    """A received message, as a worker gives it to the function or coroutine of a task."""

    __slots__ = ("_consumer",)

    _consumer: Subscription

    @classmethod
    def of(cls, message: ReceivedMessage, consumer: Subscription) -> TaskMessage:
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
