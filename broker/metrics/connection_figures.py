"""What connections tell /metrics."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class ConnectionFigures(NamedTuple):
    """What a connection tells."""

    queued_bytes: int
    pending_requests: int
    paused: Collection[str]
    """Why it is not read."""


class ConnectionCounts(NamedTuple):
    """Connections since the start."""

    admitted: int
    refused: int
    closed: int
