"""Rules: the store is closed and opened again, or copied as a crash would leave it, with other settings at times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .drawing import CONFIGS, HANDING_OUT, STORING, TAKING_BACK, only
from .driver import Once, SimulatedCrash, armed, copy_store
from .machine import Machine
from .rules_sending import APPLYING, CLEANUP, FIRING


class RestartRules(Machine):
    """Whatever ends a process."""

    @only(STORING)
    @precondition(lambda self: self.consumers)
    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.twin.flush()

    @precondition(lambda self: self.messages)
    @rule(other=st.none() | CONFIGS)
    def reopen(self, other: dict[str, Any] | None) -> None:
        """Closed and opened; now and then with other settings, of which those of what is kept change nothing."""
        path = self.store.path
        self.store.close()
        self.twin.flush()
        if other is not None:
            other["partition_ms"] = self.config.partition_ms
            self.config = self.twin.config = dataclasses.replace(self.config, **other)
            self.ever_inline |= self.config.inline_delay_ms > 0
        self._open(path)

    @only(STORING, TAKING_BACK, HANDING_OUT)
    @precondition(lambda self: self.messages)
    @rule()
    def crash(self) -> None:
        target = self._next_copy()
        copy_store(self.store.path, target)
        self._reopen_after_crash(target)

    @only(STORING, TAKING_BACK)
    @rule(point=st.sampled_from((*FIRING, *CLEANUP)), count=st.integers(1, 3))
    def crash_in_a_tick(self, point: str, count: int) -> None:
        self._crash_in(self.store.tick, point, count)

    @only(STORING, TAKING_BACK)
    @rule(point=st.sampled_from(APPLYING), count=st.integers(1, 3))
    def crash_in_a_checkpoint(self, point: str, count: int) -> None:
        """All of the write-ahead log is being applied."""
        assert self.store._engine.sending.wal_writer is not None
        self._crash_in(self.store._engine.sending.wal_writer.apply_all, point, count)

    def _crash_in(self, call: Callable[[], object], point: str, count: int) -> None:
        target = self._next_copy()

        def crash() -> None:
            copy_store(self.store.path, target)
            raise SimulatedCrash

        try:
            with armed(point, Once(count, crash)):
                call()
        except SimulatedCrash:
            pass
        else:
            copy_store(self.store.path, target)
        self._reopen_after_crash(target)

    def _reopen_after_crash(self, target: Path) -> None:
        self._learn()
        self.store.close()
        for topic in self.twin.topics.values():
            for sub in topic.subscriptions.values():
                sub.crash()
        self._open(target)
        self.twin.release({partition.start_ms for partition in self.store._engine.storage.partitions})
        self._adopt_acks()

    def _next_copy(self) -> Path:
        self.copies += 1
        return self.directory / str(self.copies)

    def _adopt_acks(self) -> None:
        """After a crash: what was surely on disk is acknowledged, and of the rest nothing that was not acknowledged."""
        for topic in self.twin.topics.values():
            state = self._state(topic)
            for name, sub in topic.subscriptions.items():
                found = set()
                mark, acked = sub.flushed
                for place in range(topic.first, len(topic.main)):
                    there = state.subscriptions[name].acks.is_acked(topic.position(place))
                    assert there or not (place < mark or place in acked), "an acknowledgement was lost"
                    assert sub.is_acked(place) or not there, "acknowledged by no call"
                    if there:
                        found.add(place)
                sub.restore(topic.first, found)
