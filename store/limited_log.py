"""A logger that a loop does not flood: each text a few times in a period, then a count of those left out."""

import logging
import threading
import time
from collections.abc import Callable


class LimitedLog:
    """Logs each text at most `most` times in a period. Thread-safe; one for each open store, as texts name no store."""

    def __init__(
        self,
        logger: logging.Logger,
        most: int = 10,
        period_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._most = most
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._periods: dict[str, tuple[float, int]] = {}
        """The beginning of the period, and the lines logged or left out in it, by text."""

    def log(self, level: int, text: str, *values: object, error: BaseException | None = None) -> None:
        """Log `text` filled with `values`, unless it was logged too often; `error`: with its traceback."""
        if not self._logger.isEnabledFor(level):
            return
        with self._lock:
            now_s = self._clock()
            began_s, count = self._periods.get(text, (now_s, 0))
            left_out = 0
            if now_s - began_s >= self._period_s:
                left_out, began_s, count = max(count - self._most, 0), now_s, 0
            self._periods[text] = began_s, count + 1
        if count >= self._most:
            return
        if left_out:
            text, values = f"{text} (%d like it were not logged)", (*values, left_out)
        self._logger.log(level, text, *values, exc_info=error)
