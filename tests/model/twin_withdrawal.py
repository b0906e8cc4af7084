"""Cancelling and rescheduling said plainly: a message is looked for, taken off a list, and put on another."""

from collections.abc import Sequence
from typing import NamedTuple

from duelog import MessageId, Outcome

from .twin import Twin
from .twin_topic import TwinLog, TwinMessage, TwinTopic


class Moved(NamedTuple):
    """Effect of a request to reschedule: (row, message) of entries for partitions, and of those for the main log."""

    appended: list[tuple[int, TwinMessage]]
    direct: list[tuple[int, TwinMessage]]


def _find(twin: Twin, topic: TwinTopic, message_id: MessageId) -> tuple[TwinLog, TwinMessage] | None:
    for log in twin.logs(topic):
        for message in log.messages:
            if message.message_id == message_id and not message.unadmitted:
                return log, message
    return None


def outcome(twin: Twin, topic: TwinTopic, message_id: MessageId) -> Outcome:
    """The answer to cancelling a message, if nothing is done about it."""
    size = topic.sizes().get(message_id.ledger_id)
    if size is not None:
        return Outcome.FIRED if message_id.entry_id < size else Outcome.UNKNOWN
    found = _find(twin, topic, message_id)
    if found is None:
        return Outcome.UNKNOWN
    log, message = found
    if message.cancelled:
        return Outcome.ALREADY_CANCELLED
    return Outcome.CANCELLED if message in log.pending else Outcome.FIRED


def cancel(twin: Twin, topic: TwinTopic, message_ids: Sequence[MessageId]) -> list[Outcome]:
    """Take messages back, one after the other."""
    outcomes = []
    for message_id in message_ids:
        outcomes.append(outcome(twin, topic, message_id))
        if outcomes[-1] is Outcome.CANCELLED:
            found = _find(twin, topic, message_id)
            assert found is not None
            log, message = found
            message.cancelled = True
            log.pending.remove(message)
    return outcomes


def reschedule(twin: Twin, topic: TwinTopic, message_ids: Sequence[MessageId], due_ms: int) -> Moved:
    """Give messages another due time.

    Each for which it is not too late gets one entry. Entries come in the order of the logs, then of entries.
    """
    now_ms = twin.now_ms
    ledgers = list(dict.fromkeys(message_id.ledger_id for message_id in message_ids))
    there = [row for row, message_id in enumerate(message_ids) if _find(twin, topic, message_id) is not None]
    there.sort(key=lambda row: (ledgers.index(message_ids[row].ledger_id), message_ids[row].entry_id))
    olds = {row: found[1] for row in there if (found := _find(twin, topic, message_ids[row])) is not None}
    outcomes = cancel(twin, topic, message_ids)
    moved = Moved([], [])
    for row in there:
        if outcomes[row] is not Outcome.CANCELLED:
            continue
        old = olds[row]
        new = TwinMessage(
            old.number,
            max(due_ms, now_ms),
            old.publish_ms,
            MessageId(-1, -1),
            addressee=old.addressee,
            retries=old.retries,
            ttl_ms=old.ttl_ms,
        )
        (moved.appended if due_ms > now_ms else moved.direct).append((row, new))
    return moved
