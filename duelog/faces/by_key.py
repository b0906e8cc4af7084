"""What a topic has for those who know a message by its deduplication key."""

from __future__ import annotations

from collections.abc import Iterator

from duelog.store.message import ScheduledMessage

from ..engine import Engine
from ..topics.topic_state import TopicState


class TopicByKey:
    """Messages found and cancelled by the `dedup_key` that they were sent with; a part of Topic."""

    _engine: Engine

    def _existing(self) -> TopicState:
        """The topic's state. Raises UnknownTopic."""
        raise NotImplementedError

    def cancel_key(self, key: str) -> bool:
        """Cancel the pending message of a deduplication key. True: it is never delivered, and the key is free.

        False: there is none; it has fired, was cancelled, or never was. Durable when it returns. One look and one
        commit, however many messages are pending. Raises UnknownTopic, InvalidArgument, StoreFull, StoreFailed.
        """
        self._engine.check_writable()
        return self._engine.sending.keyed.cancel(self._existing(), key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The deduplication keys of pending messages that begin with `prefix`, in the order of their bytes.

        What is sent or cancelled meanwhile may be seen or not. Raises UnknownTopic, InvalidArgument.
        """
        return self._engine.sending.keyed.keys(self._existing(), prefix)

    def find(self, key: str) -> ScheduledMessage | None:
        """The pending message of a deduplication key; None: there is none. Also read-only, and no scan.

        A message that has fired is not pending, also where its key still holds (`dedup_for`). Raises UnknownTopic,
        InvalidArgument, CorruptEntry.
        """
        return self._engine.sending.keyed.find(self._existing(), key)
