"""Where a partition log in memory is between its loading and its end, and what is on its way from it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Int64s, UInt32s


class LogState(Enum):
    """Where a log is between its loading and its end."""

    LOADING = "loading"
    """What comes in is kept aside; the index belongs to the thread that loads it. Nothing fires."""
    LOADED = "loaded"
    """It may fire."""
    FIRING = "firing"
    """A batch was taken, and is neither confirmed nor rolled back."""
    TORN = "torn"
    """A change has begun; where it did not come to its end, the log stays so, and is to be loaded anew."""
    CLOSED = "closed"
    """Its partition was unloaded, or its topic deleted: nothing of it fires any more."""


class Taken(NamedTuple):
    """A batch on its way into the main log, in firing order, and what is to be recorded with it."""

    entries: UInt32s
    dues: Int64s
    late: int
    """How many of the first entries were late."""
    frontier: FrontierRecord
    """The new frontier; its last marker is filled in by the append of the markers."""
    before: FrontierRecord
