"""Rules: producers number what they send; batches break off, and what is not known to be stored is sent again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from duelog import Message, MessageId
from duelog.errors import DelayTooLong, QuotaExceeded, StoreFull

from .drawing import DUES, TAKING_BACK, TOPICS, Spec, only
from .driver import Once, SimulatedCrash, armed, copy_store
from .rules_restarts import RestartRules
from .rules_sending import no_room
from .twin_topic import TwinProducer, TwinTopic

FIRSTS = st.none() | st.integers(0, 12)


class ProducerRules(RestartRules):
    """Whatever numbered producers do. A number is stored or it is not, and the twin knows which are."""

    @only(TAKING_BACK)
    @rule(topic=TOPICS, name=st.sampled_from(("p", "q")), specs=st.lists(DUES, min_size=1, max_size=4), first=FIRSTS)
    def send_numbered(self, topic: str, name: str, specs: list[Spec], first: int | None) -> None:
        """A number that is stored is not stored again, whatever became of its message; any other is."""
        twin = self.twin.topic(topic)
        face, producer = self.store.topic(topic).producer(name), twin.producers.setdefault(name, TwinProducer())
        assert face.last_sequence_id == producer.last
        drawn, _ = self._drawn(topic, specs)
        first, start = producer.numbering(first)
        wanted, dues = self._wanted(topic, producer, start, drawn)
        if dues is None:
            with pytest.raises(DelayTooLong):
                face.send_batch(drawn, first_sequence_id=first)
            self._refused(topic, [drawn[row] for row in wanted])
            return
        if self._over_quota(topic, list(dues.values())):
            with pytest.raises(QuotaExceeded):
                face.send_batch(drawn, first_sequence_id=first)
            return
        ids = face.send_batch(drawn, first_sequence_id=first)
        stored = {row: message_id for row in wanted if (message_id := ids[row]) is not None}
        assert list(stored) == wanted, "what is not stored is stored, once"
        for row in set(range(len(ids))) - set(wanted):
            known = self.twin.by_id[producer.stored[start + row]]
            gone = not self.twin.is_stored(twin, known)
            assert ids[row] == known.message_id or (gone and ids[row] is None), "a number answers with its id"
        self._stored(twin, producer, start, drawn, dues, stored)

    def _wanted(
        self, topic: str, producer: TwinProducer, start: int, drawn: Sequence[Message]
    ) -> tuple[list[int], dict[int, int] | None]:
        """The rows of a batch that are not stored, and their due times by policies; None: those are refused."""
        rows = [row for row in range(len(drawn)) if start + row not in producer.stored]
        dues = self.twin.policies.dues(topic, self._asked_for([drawn[row] for row in rows]), self.twin.now_ms)
        return rows, None if dues is None else dict(zip(rows, dues, strict=True))

    @only(TAKING_BACK)
    @rule(
        topic=TOPICS,
        name=st.sampled_from(("p", "q")),
        specs=st.lists(DUES, min_size=2, max_size=5),
        first=FIRSTS,
        crashes=st.booleans(),
        again=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    )
    def break_a_numbered_batch(
        self, topic: str, name: str, specs: list[Spec], first: int | None, crashes: bool, again: list[int]
    ) -> None:
        """A batch finds no space, or the process dies before it is in the log; its numbers are sent again in others.

        again: of how many messages each batch is that is sent afterwards; single ones go on until all are sent.
        """
        twin = self.twin.topic(topic)
        face, producer = self.store.topic(topic).producer(name), twin.producers.setdefault(name, TwinProducer())
        drawn, _ = self._drawn(topic, specs)
        first, start = producer.numbering(first)
        _, dues = self._wanted(topic, producer, start, drawn)
        if not dues or self.twin.policies.value(topic, "max_pending"):
            return
        target = self._next_copy()

        def crash() -> None:
            copy_store(self.store.path, target)
            raise SimulatedCrash

        self._learn()
        with (
            armed("wal.before", Once(1, crash if crashes else lambda: no_room(self.store))),
            pytest.raises(SimulatedCrash if crashes else StoreFull),
        ):
            face.send_batch(drawn, first_sequence_id=first)
        for due_ms in dues.values():  # their partitions are there, and nothing in them
            if due_ms > self.twin.now_ms + self.config.inline_delay_ms:
                self.twin.add_partition(due_ms)
        if crashes:
            self._reopen_after_crash(target)
        self._send_again(topic, name, specs, start, again)

    def _send_again(self, topic: str, name: str, specs: Sequence[Spec], start: int, sizes: Sequence[int]) -> None:
        at = 0
        for size in (*sizes, *[1] * len(specs)):
            if at < len(specs):
                self.send_numbered(topic, name, list(specs[at : at + size]), start + at)
                at += size

    def _stored(
        self,
        topic: TwinTopic,
        producer: TwinProducer,
        start: int,
        drawn: Sequence[Message],
        dues: dict[int, int],
        ids: dict[int, MessageId],
    ) -> None:
        """Rows of a batch were stored under these ids."""
        rows = sorted(ids)
        twins = self._twins(
            topic.name,
            [drawn[row] for row in rows],
            [dues[row] for row in rows],
            [ids[row] for row in rows],
            self.twin.now_ms,
        )
        self._sent(topic, twins)
        producer.stored.update((start + row, ids[row]) for row in rows)
