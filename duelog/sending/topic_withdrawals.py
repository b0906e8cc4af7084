"""Taking back messages of one topic that were sent and have not fired: cancelled, or given another due time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import numpy as np

from duelog.markers.pending_entries import Outcome
from duelog.markers.withdrawal import Withdrawals
from duelog.store.codec.body import EncodedBatch
from duelog.store.listener import StoreListener, call_supplied
from duelog.store.message import AnyId, Message, id_of, resolve_due_ms
from duelog.store.position import MessageId, Position

from ..topics.inline import InlineMessages
from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies

_STATES = {
    None: "scheduled",
    Outcome.ALREADY_CANCELLED: "cancelled",
    Outcome.FIRED: "fired",
    Outcome.UNKNOWN: "unknown",
}


class TopicWithdrawals:
    """As the methods of `Topic` of the same names say; `topic` is the one that the messages were sent to."""

    def __init__(
        self,
        withdrawals: Withdrawals,
        policies: DelayPolicies,
        inline: InlineMessages,
        has_keys: Callable[[TopicState], bool],
        listeners: Sequence[StoreListener],
    ) -> None:
        self._withdrawals = withdrawals
        self._policies = policies
        self._inline = inline
        self._has_keys = has_keys
        self._listeners = listeners

    def cancel(self, topic: TopicState, message_ids: Sequence[AnyId]) -> list[Outcome]:
        """What became of each."""
        outcomes = self._withdrawals.cancel(topic.log, _checked(message_ids), keyed=self._has_keys(topic))
        for listener in self._listeners:
            call_supplied(listener.cancelled, topic.name, outcomes.count(Outcome.CANCELLED))
        return outcomes

    def reschedule(
        self,
        topic: TopicState,
        message_ids: Sequence[AnyId],
        deliver_at: int | datetime | None,
        deliver_after: float | timedelta | None,
        now_ms: int,
        *,
        allow_past: bool,
    ) -> list[MessageId | None]:
        """Delay policies apply."""
        times = Message(b"", deliver_at=deliver_at, deliver_after=deliver_after)
        asked = resolve_due_ms(times, now_ms, allow_past=allow_past)
        due_ms = now_ms if asked is None else asked
        ids = _checked(message_ids)
        batch = EncodedBatch(np.full(len(ids), due_ms, dtype=np.int64), np.full(len(ids), due_ms > now_ms), [])
        self._policies.apply(topic.name, batch, now_ms)
        new_ids = self._reschedule(topic, ids, batch.dues.tolist())
        if batch.overridden is not None:
            self._policies.stored(topic.name, batch.overridden[[each is not None for each in new_ids]])
        return new_ids

    def fire_now(self, now_ms: int, topic: TopicState, message_id: AnyId) -> MessageId | None:
        """Delay policies do not apply."""
        return self._reschedule(topic, _checked([message_id]), [now_ms])[0]

    def _reschedule(self, topic: TopicState, ids: list[MessageId], dues: list[int]) -> list[MessageId | None]:
        new_ids = self._withdrawals.reschedule(topic.log, ids, dues)
        for listener in self._listeners:
            call_supplied(listener.rescheduled, topic.name, len(new_ids) - new_ids.count(None))
        return new_ids

    def position_of(self, topic: TopicState, message_id: AnyId) -> Position | None:
        """Where it is read in the main log."""
        (checked,) = _checked([message_id])
        entries = topic.log.entries_of(checked.ledger_id)
        if entries is not None:
            return checked if 0 <= checked.entry_id < entries else None
        return self._withdrawals.marker(topic.log, checked)

    def state(self, topic: TopicState, message_id: AnyId) -> str:
        """In a word."""
        (checked,) = _checked([message_id])
        outcome = self._withdrawals.states(topic.log, [checked])[0]
        return "scheduled" if self._inline.is_hidden(topic, checked) else _STATES[outcome]


def _checked(message_ids: Sequence[AnyId]) -> list[MessageId]:
    return [id_of(each) for each in message_ids]
