"""Sends to several topics at once, as one atomic group of the write-ahead log.

Messages of all topics are encoded, routed and packed as one batch: nothing is done topic by topic that can be done for
all. Nothing is written before all of a call is checked. The public face is `DelayedStore.send_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from duelog.store.codec.body import encode_batch
from duelog.store.message import Message
from duelog.store.names import TopicName
from duelog.store.position import MessageIds

from ..topics.topic_list import Topics
from .delay_policies import DelayPolicies
from .sender import Sender


class StoreSender:
    """Sends to the topics of a store, which come into being with their first messages. Thread-safe."""

    def __init__(
        self,
        topics: Topics,
        policies: DelayPolicies,
        sender: Sender,
        writing_at: Callable[[], int],
        max_message_bytes: int,
    ) -> None:
        """`writing_at`: as of `TopicSender`."""
        self._topics = topics
        self._policies = policies
        self._sender = sender
        self._writing_at = writing_at
        self._max_bytes = max_message_bytes

    def send(
        self, names: Sequence[TopicName], owners: Sequence[int], messages: Sequence[Message], *, allow_past: bool
    ) -> MessageIds:
        """As `DelayedStore.send_batch`. owners: whose each message is, as a place in `names`, which are all different.

        Every name is one of an owner.
        """
        now_ms = self._writing_at()
        batch = encode_batch(messages, now_ms, self._max_bytes, allow_past=allow_past)
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        column = np.array(owners, dtype=np.intp)
        self._policies.apply_each(names, column, batch, now_ms)
        self._sender.refuse_too_large(batch, column)
        topics = self._topics.get_or_create_all(names, now_ms)
        return self._sender.send_all(topics, column, batch, now_ms)
