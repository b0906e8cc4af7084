"""CONSUMER_STATS."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ..protocol.commands import ConsumerStats, ConsumerStatsResponse
from ..protocol.failures import server_error
from .consumer_record import Consumer

_TYPES = ("Exclusive", "Shared", "Failover", "Key_Shared")


def unknown(command: ConsumerStats, error: Exception) -> ConsumerStatsResponse:
    """There is no such consumer."""
    return ConsumerStatsResponse(command.request_id, error=server_error(error), message=str(error))


def of_consumer(command: ConsumerStats, consumer: Consumer, backlog: int, now_s: float) -> ConsumerStatsResponse:
    """Rates are averages since it was opened."""
    age_s = max(now_s - consumer.opened_at, 0.001)
    since = datetime.now(UTC) - timedelta(seconds=age_s)
    return ConsumerStatsResponse(
        command.request_id,
        rate_out=consumer.messages_out / age_s,
        throughput_out=consumer.bytes_out / age_s,
        rate_redeliver=consumer.redelivered / age_s,
        consumer_name=consumer.name,
        available_permits=max(consumer.permits, 0),
        unacked_messages=consumer.unacked,
        blocked=consumer.blocked,
        address=consumer.peer.address,
        connected_since=since.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        type=_TYPES[consumer.type],
        rate_expired=0.0,
        backlog=backlog,
        ack_rate=consumer.acked / age_s,
    )
