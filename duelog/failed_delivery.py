"""Where a message goes whose delivery failed: to the dead-letter topic, or back into its topic for a later time."""

from __future__ import annotations

import hashlib

import numpy as np

from duelog.store.codec.body import EncodedBatch, encode_one
from duelog.store.message import Message, ReceivedMessage
from duelog.store.names import MAX_TOPIC_BYTES, TopicName
from duelog.store.position import MessageId

from .engine import Engine
from .topics.topic_state import TopicState


def dead_letter_name(engine: Engine, topic: TopicState, subscription: str) -> TopicName:
    """The policy `dead_letter_topic`, or `<topic>-<subscription>-DLQ` beside the topic.

    A name that would be too long ends in a digest of it instead, cut before that.
    """
    chosen = engine.policies.effective(topic.name, subscription).dead_letter_topic
    if chosen:
        return TopicName.parse(chosen)
    local = f"{topic.name.local_name}-{subscription}-DLQ"
    name = topic.name._replace(local_name=local)
    over = len(str(name).encode()) - MAX_TOPIC_BYTES
    if over <= 0:
        return name
    end = f"-{hashlib.sha256(local.encode()).hexdigest()[:32]}-DLQ"
    kept = local.encode()[: -over - len(end)].decode(errors="ignore")
    return topic.name._replace(local_name=kept + end)


def postpone(
    engine: Engine, topic: TopicState, subscription: str, message: ReceivedMessage, due_ms: int, failed_ms: int | None
) -> MessageId:
    """Send a message anew as a delayed message that only this subscription gets; its id, once it is durable.

    failed_ms: when its first delivery failed; None: now.
    """
    now_ms = engine.clock.now_ms()
    first_id, first_ms = message.first_try or (message.message_id, now_ms if failed_ms is None else failed_ms)
    extra = {
        "addressee": subscription,
        "retries": message.retries + message.redelivery_count + 1,
        "first": [*first_id, first_ms],
    }
    anew = Message(message.payload, key=message.key, properties=message.properties)
    body = encode_one(anew, now_ms, 2**30, extra)[1]
    return engine.sender.send(topic, _batch(np.array([due_ms], dtype=np.int64), [body], now_ms), now_ms)[0]


def _batch(dues: np.ndarray[tuple[int], np.dtype[np.int64]], bodies: list[bytes], now_ms: int) -> EncodedBatch:
    return EncodedBatch(dues, dues > now_ms, bodies)
