"""How long permits were waited for: quantiles of the last minutes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

QUANTILES = (0.5, 0.95, 0.99, 1.0)

WINDOW_S = 600.0
_MOST = 4_096


class WaitTimes:
    """Of one semaphore; milliseconds."""

    def __init__(self, time: Callable[[], float]) -> None:
        """time: seconds, never going back."""
        self._time = time
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self.count = 0
        self.sum_ms = 0.0

    def add(self, waited_ms: float) -> None:
        """A permit was granted, or did not come in time."""
        self.count += 1
        self.sum_ms += waited_ms
        self._recent.append((self._time(), waited_ms))

    def quantiles(self) -> Mapping[float, float]:
        """By quantile, of the last 4,096 waits that ended in the last ten minutes; NaN: there is none."""
        oldest = self._time() - WINDOW_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        found = sorted(waited for _, waited in self._recent)
        if not found:
            return dict.fromkeys(QUANTILES, math.nan)
        return {each: found[math.ceil(each * len(found)) - 1] for each in QUANTILES}
