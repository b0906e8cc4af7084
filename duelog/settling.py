"""What happens to messages between the log and the handler: not for this subscription, dead, or postponed."""

from __future__ import annotations

import numpy as np

from duelog.store.body import EncodedBatch, encode_one
from duelog.store.message import Message, ReceivedMessage
from duelog.store.names import TopicName
from duelog.store.position import MessageId

from .engine import Engine
from .topic_state import TopicState


def dead_letter_name(engine: Engine, topic: TopicState, subscription: str) -> TopicName:
    """The policy `dead_letter_topic`, or `<topic>-<subscription>-DLQ` beside the topic."""
    chosen = engine.policies.effective(topic.name, subscription).dead_letter_topic
    if chosen:
        return TopicName.parse(chosen)
    return topic.name._replace(local_name=f"{topic.name.local_name}-{subscription}-DLQ")


def bury(engine: Engine, topic: TopicState, subscription: str, messages: list[ReceivedMessage]) -> None:
    """Append messages to the dead-letter topic, durably, with properties that say where they came from.

    The caller acknowledges them afterwards: a crash in between buries them again.
    """
    now_ms = engine.clock.now_ms()
    target = engine.topics.get_or_create(dead_letter_name(engine, topic, subscription), now_ms)
    bodies = []
    for message in messages:
        origin = {"REAL_TOPIC": message.topic, "ORIGIN_MESSAGE_ID": str(message.message_id)}
        letter = Message(message.payload, key=message.key, properties={**message.properties, **origin})
        bodies.append(encode_one(letter, now_ms, 2**30)[1])
    engine.sender.send(target, _batch(np.full(len(bodies), now_ms, dtype=np.int64), bodies, now_ms), now_ms)


def postpone(engine: Engine, topic: TopicState, subscription: str, message: ReceivedMessage, due_ms: int) -> MessageId:
    """Send a message anew as a delayed message that only this subscription gets; its id, once it is durable."""
    now_ms = engine.clock.now_ms()
    extra = {"addressee": subscription, "retries": message.retries + message.redelivery_count + 1}
    anew = Message(message.payload, key=message.key, properties=message.properties)
    body = encode_one(anew, now_ms, 2**30, extra)[1]
    return engine.sender.send(topic, _batch(np.array([due_ms], dtype=np.int64), [body], now_ms), now_ms)[0]


def _batch(dues: np.ndarray[tuple[int], np.dtype[np.int64]], bodies: list[bytes], now_ms: int) -> EncodedBatch:
    return EncodedBatch(dues, dues > now_ms, bodies)
