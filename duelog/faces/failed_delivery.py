"""A message whose delivery failed goes back into its topic, for a later time and for one subscription."""

from __future__ import annotations

import numpy as np

from duelog.store.codec.body import EncodedBatch, encode_one, occurrence_extra
from duelog.store.message import Message, ReceivedMessage
from duelog.store.position import MessageId

from ..sending.sender import Sender
from ..topics.topic_state import TopicState


def postpone(
    sender: Sender,
    topic: TopicState,
    subscription: str,
    message: ReceivedMessage,
    due_ms: int,
    now_ms: int,
    failed_ms: int | None,
    failure: str | None,
) -> MessageId:
    """Send a message anew as a delayed message that only this subscription gets; its id, once it is durable.

    failed_ms: when its first delivery failed; None: now. failure: why this one did; None: as the one before.
    """
    first_id, first_ms = message.first_try or (message.message_id, now_ms if failed_ms is None else failed_ms)
    extra: dict[str, object] = {
        "addressee": subscription,
        "retries": message.retries + message.redelivery_count + 1,
        "first": [*first_id, first_ms],
        **occurrence_extra(message.occurrence),
    }
    if failure is not None or message.failure is not None:
        extra["failure"] = message.failure if failure is None else failure
    if message.expires_ms is not None:
        extra["ttl"] = message.expires_ms - due_ms  # it expires when it would have, which may be before it is due
    anew = Message(message.payload, key=message.key, properties=message.properties)
    body = encode_one(anew, now_ms, 2**30, extra)[1]
    batch = _batch(np.array([due_ms], dtype=np.int64), [body], now_ms)
    return sender.send(topic, batch, now_ms, refused=False)[0]


def _batch(dues: np.ndarray[tuple[int], np.dtype[np.int64]], bodies: list[bytes], now_ms: int) -> EncodedBatch:
    return EncodedBatch(dues, dues > now_ms, bodies)
