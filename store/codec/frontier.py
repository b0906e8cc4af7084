"""The frontier of a partition log: the progress of its firing, which tells the entries that have fired.

The one place that compares entries with a frontier. Also what a due time is where an entry has none to compare:
HELD and UNREADABLE_DUE lie before every frontier, so callers leave such entries out.
"""

import struct
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ..position import Position
from .format import unpack_fields

HELD = -1
"""Due time of a conditional entry that was not admitted: it never fires."""

UNREADABLE_DUE = -1
"""Due time of an entry whose run cannot be read."""

NOTHING_FIRED = (-1, -1)
"""C of a log of which nothing has fired: before the (due_ms, entry_id) of every entry."""

Entries = npt.NDArray[np.integer[Any]]
Dues = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_FRONTIER = struct.Struct(">QqqIQQIB")


def at_or_before(entries: Entries, dues: Dues, due_ms: int, entry_id: int) -> Mask:
    """Mask the entries that are at or before C = (`due_ms`, `entry_id`)."""
    mask: Mask = dues < due_ms
    mask |= (dues == due_ms) & (entries.astype(np.int64) <= entry_id)
    return mask


class FrontierRecord(NamedTuple):
    """The progress of firing of one partition log: docs/design.md, "The frontier".

    Entries with id below `absorbed_end` (T) whose (due_ms, entry_id) is at or before (`due_ms`, `entry_id`) (C)
    have fired, and no others. `fired` counts them. The last marker is the newest one in the main log
    ((0, 0) and `fired` 0: none yet). `released` says that the topic has given the partition up.
    """

    ledger_id: int
    due_ms: int
    entry_id: int
    absorbed_end: int
    fired: int
    marker_ledger: int
    marker_entry: int
    released: int

    @classmethod
    def start(cls, ledger_id: int) -> Self:
        return cls(ledger_id, *NOTHING_FIRED, 0, 0, 0, 0, 0)

    def passes(self, entries: Entries, dues: Dues) -> Mask:
        """Mask the entries at or before C: those below T have fired, those from T on are late."""
        return at_or_before(entries, dues, self.due_ms, self.entry_id)

    def has_fired(self, entries: Entries, dues: Dues) -> Mask:
        """Mask the entries that have fired, cancelled ones among them; no other entry has."""
        below: Mask = entries < self.absorbed_end
        below &= self.passes(entries, dues)
        return below

    @property
    def last_marker(self) -> Position | None:
        return Position(self.marker_ledger, self.marker_entry) if self.fired else None

    def pack(self) -> bytes:
        return _FRONTIER.pack(*self)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        return cls(*unpack_fields(_FRONTIER, fields, "frontier record"))
