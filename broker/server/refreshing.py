"""Files that are looked at from time to time while a broker or a proxy runs: certificates, the placement table."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger("duelog.broker")


async def keep_refreshing(
    look: Callable[[], bool], every_s: float, changed: Callable[[], object] = lambda: None
) -> None:
    """Call `look` in a worker again and again, and `changed` where it says so, until the task is cancelled.

    What either raises is logged, and the next look comes all the same.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            if await asyncio.to_thread(look):
                changed()
        except Exception:
            _log.exception("files that may have changed could not be looked at")
