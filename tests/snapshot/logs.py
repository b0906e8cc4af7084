"""A partition environment with made-up logs: due times in a list, snapshots of any instant, nothing of the engine."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.window import Dues, Ids
from duelog.snapshot.restore import Restored, restore_steps
from duelog.snapshot.writer import Cut
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.env.environment import Environment
from tests.conftest import present

START_MS = 1_790_000_000_000 - 1_790_000_000_000 % 60_000
BUCKET_MS = 100
LEDGER = 7


def new_environment(path: Path) -> Environment:
    """An empty environment that does not wait for the disk."""
    return Environment(path, name="partition", durability="none", map_bytes=1 << 26, create=True)


class Log:
    """Due times by entry id, and where firing has come to."""

    def __init__(self, dues: Sequence[int], ledger_id: int = LEDGER) -> None:
        self.dues = list(dues)
        self.frontier = FrontierRecord.start(ledger_id)

    @property
    def tail(self) -> int:
        return len(self.dues)

    def due_of(self, ids: Ids) -> Dues:
        """Due times of entries."""
        return np.array([self.dues[entry_id] for entry_id in ids.tolist()], dtype=np.int64)

    def keys(self) -> list[tuple[int, int]]:
        """(due time, entry id) of the entries, in firing order."""
        return sorted((due_ms, entry_id) for entry_id, due_ms in enumerate(self.dues))

    def fire(self, count: int) -> None:
        """Fire so many of what is left, with everything seen."""
        left = self.pending()
        due_ms, entry_id = left[count - 1]
        self.frontier = self.frontier._replace(due_ms=due_ms, entry_id=entry_id, absorbed_end=self.tail)

    def pending(self) -> list[tuple[int, int]]:
        """The entries left to fire, in order."""
        passed = (self.frontier.due_ms, self.frontier.entry_id)
        return [key for key in self.keys() if key[1] >= self.frontier.absorbed_end or key > passed]

    def cut(self) -> Cut:
        """A copy of the index as it is now; nothing is late in it."""
        index = DelayIndex(self.due_of, start_ms=START_MS, bucket_ms=BUCKET_MS)
        left = self.pending()
        if left:
            index.add(
                np.array([entry_id for _, entry_id in left], dtype=np.uint32),
                np.array([due_ms for due_ms, _ in left], dtype=np.int64),
            )
        cutting = index.cut(self.tail)
        cutting.arrange()
        return Cut(START_MS, BUCKET_MS, self.tail, self.frontier, cutting.more(1 << 32))

    def restore(
        self, environment: Environment, passed_over: list[str] | None = None, *, bucket_ms: int = BUCKET_MS
    ) -> Restored | None:
        """Restore from the snapshots there are, as a start does."""
        reasons: list[str] = [] if passed_over is None else passed_over
        steps = restore_steps(
            environment,
            self.frontier,
            self.tail,
            self.due_of,
            start_ms=START_MS,
            bucket_ms=bucket_ms,
            refused=lambda snapshot_id, reason: reasons.append(f"{snapshot_id}: {reason}"),
        )
        while True:
            try:
                next(steps)
            except StopIteration as done:
                restored: Restored | None = done.value
                return restored

    def restored(self, environment: Environment) -> Restored:
        """Restore from the snapshots there are, one of which can be used."""
        return present(self.restore(environment))


def drained(restored: Restored) -> list[tuple[int, int]]:
    """(due time, entry id) of everything in a restored index, in firing order."""
    ids, dues = restored.pending.take(START_MS + (1 << 32), 1 << 32)
    return list(zip(dues.tolist(), ids.tolist(), strict=True))


def scattered(count: int, *, seed: int = 1, span_ms: int = 2_000) -> list[int]:
    """Due times all over the first seconds of the partition."""
    dues: list[int] = np.random.default_rng(seed).integers(START_MS, START_MS + span_ms, count).tolist()
    return dues
