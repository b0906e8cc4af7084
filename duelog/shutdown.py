"""The steps by which a store closes: each is taken, whatever became of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from duelog.store.files.process import here

if TYPE_CHECKING:
    from .engine import Engine
    from .opening import StoreLock

_ATTEMPTS = 3
"""How often a step is begun that does not come to its end."""


class Shutdown:
    """Steps in order, each of which may be taken again. What the first raises is a refusal: nothing is done then."""

    def __init__(self, steps: Sequence[Callable[[], None]]) -> None:
        self._steps = list(steps)
        self._taken: set[int] = set()

    def run(self) -> None:
        """Take the steps that were not taken yet; one that raises, or is interrupted, is begun anew.

        Raises the first error once all are done.
        """
        first: BaseException | None = None
        for number, step in enumerate(self._steps):
            for attempt in range(_ATTEMPTS):
                try:
                    if number not in self._taken:
                        step()
                    break
                except BaseException as error:
                    if not number and (isinstance(error, Exception) or attempt + 1 == _ATTEMPTS):
                        raise
                    first = first or error
            self._taken.add(number)
        if first is not None:
            raise first


def steps(engine: Engine, lock: StoreLock | None) -> list[Callable[[], None]]:
    """How an engine closes; `lock`: what it holds while it writes."""
    process = here.pid

    def stop() -> None:
        engine.maintenance.stopping = True
        if engine.metrics is not None:
            engine.metrics.close()
        if engine.scheduler is not None:
            engine.scheduler.stop()

    def persist() -> None:
        if not engine.read_only and engine.main.failed is None and here.pid == process:
            with engine.maintenance.lock:
                engine.flusher.flush()
                engine.quarantine.flush()
                engine.firing.loaded.save_all(engine.clock.now_ms())

    def end() -> None:
        engine.closed = True
        engine._wake_receivers()

    def unlock() -> None:
        if lock is not None:
            lock.release()

    parts = (engine.sender.close, engine.partitions.close, engine.main.close)
    return [engine.outbox.close, stop, persist, end, *parts, unlock]
