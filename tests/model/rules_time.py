"""Rules: the clock goes on, back and far forward, and ticks do what is due, on full disks too."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .drawing import FAR_MS, HANDING_OUT, INLINE_DELAYS, STORING, TAKING_BACK, only
from .driver import full_disk
from .machine import Machine


class TimeRules(Machine):
    """Whatever time does."""

    @rule(ms=st.integers(1, 10) | st.integers(1, 400))
    def forward(self, ms: int) -> None:
        self._forward(ms)

    @only(STORING, TAKING_BACK)
    @rule(partitions=st.integers(1, 6), offset_ms=st.integers(-1, 1))
    def forward_to_a_boundary(self, partitions: int, offset_ms: int) -> None:
        span_ms = self.config.partition_ms
        self._forward_to((self.twin.now_ms // span_ms + partitions) * span_ms + offset_ms)

    @precondition(lambda self: self.next_due_ms is not None)
    @rule()
    def forward_to_what_is_next(self) -> None:
        self._forward_to(self.next_due_ms or 0)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: not self.twin.lead_ms)
    @rule(ms=st.integers(1, 30) | st.integers(1, 1_000))
    def set_the_clock_back(self, ms: int) -> None:
        """Not where what fires early is not yet visible."""
        self._back(ms)

    @only(STORING)
    @rule()
    def stop_for_long(self) -> None:
        self._forward(FAR_MS)

    @rule()
    def tick(self) -> None:
        self._tick()

    @only(STORING)
    @rule(count=st.integers(1, 8))
    def tick_on_a_full_disk(self, count: int) -> None:
        """Whatever write of a tick fails, the next tick does the rest."""
        with full_disk(self.store._engine, count):
            self._tick_until_it_works()
