"""Named points on every line that writes, where a test can kill the process or raise.

A point costs one dict lookup while none is armed. `DUELOG_FAILPOINT=name[:count]` in the environment
kills the process (SIGKILL) the count-th time it reaches that point, so that a child process can be
told where to die; in-process tests use `arm`.
"""

import os
import signal
from collections.abc import Callable

from ..errors import InvalidArgument

_armed: dict[str, Callable[[], None]] = {}

POINTS = (
    "commit.before",  # records are in the transaction, nothing is on disk
    "commit.after",  # on disk, no caller told yet
    "bodies.written",  # bodies of large runs are written to a file and not flushed, nothing names them
    "wal.before",  # messages have ids, the WAL does not have them
    "wal.after",  # the WAL has them on disk, no caller told yet
    "wal.prepared",  # the next segment is there, the last one goes on
    "wal.ended",  # the last segment has its end, its checkpoint is not begun
    "wal.part",  # of a segment one more partition is applied
    "wal.applied",  # all partitions are, the record still names the segment
    "wal.released",  # the record names the next one
    "wal.removed",  # at a clean close: all segments but the last are gone
    "wal.emptied",  # an empty one has taken its place
    "directory.staged",  # a directory is complete in staging/
    "directory.renamed",  # it has its final name
    "fire.before",  # due messages are chosen, no marker is written
    "fire.after",  # markers and frontier are committed, the index does not know
    "close.before",  # a partition has nothing left to fire
    "close.after",  # it is recorded as closed
    "trim.recorded",  # ledgers are trimmed, their runs are still there
    "trim.part",  # some of their runs are removed
    "delete.recorded",  # a partition's deletion is recorded, its directory is in place
    "delete.moved",  # its directory lies in trash/
    "delete.removed",  # its directory is gone, the record is still there
    "acks.before",  # acknowledgements are to be persisted
    "snapshot.part",  # a part of a snapshot is written
    "snapshot.meta",  # its metadata is written, the one before is still there
    "compact.copied",  # a new generation is complete in staging/
    "compact.published",  # it has its final name, the catalog names the old one
    "compact.adopted",  # the catalog names the new one, the old one is still there
    "away.staged",  # of a day that is given back: its rest is complete in staging/
    "away.beside",  # it lies beside the files of the day
    "away.gone",  # the files are in trash/
    "away.joined",  # of a day that is fetched: it is whole in staging/
    "away.back",  # it has its name, the rest lies beside it
)


def reach(name: str) -> None:
    """Called by the engine where `name` is; does nothing unless armed."""
    if _armed:
        action = _armed.get(name)
        if action is not None:
            action()


def arm(name: str, action: Callable[[], None]) -> None:
    """Run `action` whenever the point is reached. Raises InvalidArgument for a name not in POINTS."""
    if name not in POINTS:
        raise InvalidArgument("failpoint", name, "not one of POINTS")
    _armed[name] = action


def disarm() -> None:
    """Disarm every point."""
    _armed.clear()


def _arm_from_environment() -> None:
    setting = os.environ.get("DUELOG_FAILPOINT")
    if not setting:
        return
    name, _, count = setting.partition(":")
    remaining = int(count or 1)

    def die() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    arm(name, die)


_arm_from_environment()
