"""Workload W: payloads of 1 KiB, due times uniform over the seven days from the next midnight on."""

import random

import numpy as np
import numpy.typing as npt

DAY_MS = 86_400_000
PAYLOAD_BYTES = 1_024
BATCH = 1_000

START_MS = 1_790_035_200_000
"""2026-09-22T00:00:00Z: the first of the seven days."""

NOW_MS = START_MS - 3_600_000
"""The clock while messages are scheduled: an hour before."""

END_MS = START_MS + 7 * DAY_MS
AFTER_MS = END_MS + 3_600_000
"""The clock when everything is due."""

SEED = 26


def payloads(count: int, size: int = PAYLOAD_BYTES) -> list[bytes]:
    """`count` payloads that no compression shrinks; a cycle of 1,000 distinct ones."""
    source = random.Random(SEED)
    cycle = [source.randbytes(size) for _ in range(min(count, 1_000))]
    return [cycle[at % len(cycle)] for at in range(count)]


def dues(count: int, start_ms: int = START_MS, limit_ms: int = END_MS) -> npt.NDArray[np.int64]:
    """`count` due times uniform in [start_ms, limit_ms)."""
    return np.random.default_rng(SEED).integers(start_ms, limit_ms, count, dtype=np.int64)
