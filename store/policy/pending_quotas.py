"""Quotas of pending messages: a send that would have more of a topic pending than its policies allow is refused whole.

A bound of how many messages are pending is kept for each topic that has a quota and is sent to: what is sent is added
before it is written. What fires or is cancelled only marks the bound as too high; it is counted again when a send does
not fit any more, with no send under way. So a refusal is always by a fresh count, and what is counted at most once for
each time that something fired: O(partitions), each opened if it is not. Nothing of this is stored: after a restart the
first send counts. A message that was to take the place of another (a rescheduling, `replace`) when the process died, or
the main environment was full, never fires, and counts until its partition closes.

Producers are refused. A retry, a dead letter that is requeued and an occurrence of a schedule are not, and count.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..env.reader_gate import ReaderGate
from ..errors import QuotaExceeded
from ..listener import StoreListener
from ..names import TopicName
from .policies import EffectivePolicies


class Wanted(NamedTuple):
    """Messages that are to be pending, of one topic."""

    topic_id: int
    topic: TopicName
    messages: int


class PendingQuotas(StoreListener):
    """The quotas of one open store. Thread-safe."""

    def __init__(
        self,
        effective: Callable[[TopicName], EffectivePolicies],
        version: Callable[[], int],
        count: Callable[[int], tuple[int, int]],
        *,
        by_time: bool,
    ) -> None:
        """`effective` gives what is in force, `version` another number after each change of that.

        count: how many messages of a topic, by its id, are pending, and how many of these get fewer as time passes,
        without an event; never fewer than there are. by_time: what is sent may be such.
        """
        self._effective = effective
        self._version = version
        self._count = count
        self._by_time = by_time
        self._gate = ReaderGate()
        """Sends under a quota are inside; counting is alone."""
        self._lock = threading.Lock()
        self._seen = -1
        self._most: dict[int, int] = {}
        """Upper bounds of pending messages by topic id; a topic that is not in it is not counted."""
        self._fewer: set[int] = set()
        """Topics whose bound may be too high by now."""
        self._counted_last: int | None = None
        """The topic that is being counted, which may have no bound yet."""
        self._admissions = 0

    @contextmanager
    def sending(self, wanted: Sequence[Wanted], *, refused: bool = True) -> Iterator[None]:
        """Send messages within the block. Raises QuotaExceeded, with none of them counted; never unless `refused`."""
        while True:
            with self._gate.reading():
                short = self._take(wanted, refused=refused)
                if short is None:
                    try:
                        yield
                    except BaseException:  # some may be stored, or none
                        self._forget(wanted)
                        raise
                    return
            self._recount(short)

    def check(self, wanted: Wanted) -> None:
        with self.sending([wanted]):
            pass
        self._forget([wanted])

    def _take(self, wanted: Sequence[Wanted], *, refused: bool) -> Wanted | None:
        """Add messages to the bounds of their topics, or say which topic has no place for its own."""
        with self._lock:
            if self._seen != self._version():
                self._seen = self._version()
                self._most.clear()
            for topic in wanted if refused else ():
                limit = self._effective(topic.topic).max_pending
                if limit and topic.messages and self._most.get(topic.topic_id, limit) + topic.messages > limit:
                    return topic
            for topic_id, _, count in wanted:
                if topic_id in self._most:
                    self._most[topic_id] += count
        return None

    def _recount(self, wanted: Wanted) -> None:
        """Count what is pending of a topic if that may be less than is known. Raises QuotaExceeded: it is too much."""
        with self._gate.alone():
            pending = self._most.get(wanted.topic_id)
            if pending is None or self._by_time or wanted.topic_id in self._fewer:
                pending = self._counted(wanted.topic_id)
            effective = self._effective(wanted.topic)
            if effective.max_pending and pending + wanted.messages > effective.max_pending:
                limit, set_at = effective.max_pending, effective.set_at["max_pending"]
                raise QuotaExceeded(str(wanted.topic), wanted.messages, pending, limit, set_at)

    def _counted(self, topic_id: int) -> int:
        """Count the pending messages of a topic; the count is the bound from now on."""
        self._counted_last = topic_id
        while True:
            self._fewer.discard(topic_id)
            before = self._admissions
            pending, by_time = self._count(topic_id)
            with self._lock:
                if before == self._admissions:
                    self._most[topic_id] = pending
                    if by_time:
                        self._fewer.add(topic_id)
                    return pending

    def _forget(self, wanted: Sequence[Wanted]) -> None:
        with self._lock:
            for topic in wanted:
                self._most.pop(topic.topic_id, None)

    # -- what happens --------------------------------------------------------------------------------

    def fired(self, topic_id: int, dues: npt.NDArray[np.int64], now_ms: int) -> None:
        if topic_id in self._most or topic_id == self._counted_last:
            self._fewer.add(topic_id)

    def cancelled(self, topic: TopicName, count: int) -> None:
        self._fewer.update(list(self._most))
        if self._counted_last is not None:
            self._fewer.add(self._counted_last)

    def admitted(self, topic_id: int, count: int) -> None:
        with self._lock:
            self._admissions += 1
            if topic_id in self._most:
                self._most[topic_id] += count
                self._fewer.add(topic_id)  # they may have taken the place of others
