"""How late the event loop is: a timer asks for a call, and what passes beyond is counted.

What makes it late is work of the loop's own thread, or another thread that has the interpreter.
"""

from __future__ import annotations

from ..protocol.loop_calls import Loop, Timer
from .latencies import Durations

_EVERY_S = 0.25


class LoopLag:
    """Of the event loop's thread."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._timer: Timer | None = None
        self._longest_s = 0.0
        self._before_s = 0.0
        self.durations = Durations()

    @property
    def longest_s(self) -> float:
        """The longest in this period and the one before."""
        return max(self._longest_s, self._before_s)

    def turn(self) -> None:
        """A period is over."""
        self._before_s, self._longest_s = self._longest_s, 0.0

    def start(self) -> None:
        """Begin to look."""
        self._timer = self._loop.call_later(_EVERY_S, self._look, self._loop.time() + _EVERY_S)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, expected: float) -> None:
        lag = max(self._loop.time() - expected, 0.0)
        self.durations.add(lag)
        self._longest_s = max(self._longest_s, lag)
        self.start()
