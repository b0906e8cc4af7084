"""The write-ahead log of a store: segments, one of which is appended to while the one before is applied.

    wal/000000000007.wal      one that is applied may be renamed to a higher number and used again

The number of the oldest segment that is needed stands in the main environment (catalog.WAL): it and those after it must
be there. No record: the log has not been begun, and nothing was lost with it.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..env.body_file import DIRECTORY as BODIES
from ..errors import BrokenInvariant, DamagedStore, FormatMismatch
from ..files.directory import make_directory, move, remove_tree
from ..files.failpoints import reach
from .segment import EMPTY_BYTES, GroupContent, RawGroup, Segment, capacity_of, empty_segment, file_name, numbers_in
from .wal_reader import DIRECTORY, WalContent

Keep = Callable[[list[int]], list[int]]


class WriteAheadLog:
    """The log of a store open for writing. For one thread at a time, but `flush`."""

    def __init__(self, path: Path, store_id: bytes, found: WalContent, keep: Keep | None = None) -> None:
        """`path` is the store's directory, `found` the content of its log when it was opened; groups go behind that.

        keep: of segments that are applied, puts aside those that are still needed, and returns the others. None: none
        is, nor what was put aside before.
        """
        self._keep: Keep = keep or list
        self._directory = path / DIRECTORY
        self._store_id = store_id
        self._flushing = threading.Lock()
        """Held while the active segment is flushed by any thread, or replaced and closed."""
        self._next_number = found.last + 1
        self.active: Segment | None = None
        """The segment that is appended to; None before the first."""
        if found.tail is not None:
            sequence, at = len(found.tail.groups), found.tail.end
            self.active = Segment(self._directory, found.last, store_id, 0, at=at, sequence=sequence)
        for unmade in self._directory.glob("*.tmp"):  # a crash left it
            unmade.unlink()
        if keep is None:
            for kept in self._directory.glob("*.kept"):
                kept.unlink()
            remove_tree(self._directory / BODIES)
        numbers = numbers_in(self._directory)
        self._spare = self._keep([number for number in numbers if number < found.oldest])
        self._ended = [number for number in numbers if found.oldest <= number < found.last]
        """The segments that are needed before the active one."""

    def fits(self, size: int) -> bool:
        """True where a group of `size` bytes (`GroupContent.size`) can be appended to the active segment."""
        return self.active is not None and self.active.fits(size)

    def append(self, rows: GroupContent, *, flush: bool) -> RawGroup:
        """Append a group (`Segment.append`), and return it. REQUIRES: it fits."""
        if self.active is None:
            raise BrokenInvariant("no segment has been begun")
        return self.active.append(rows, flush=flush)

    def flush(self) -> None:
        """Wait until every group is on disk. Raises OSError. Any thread may call it."""
        with self._flushing:  # a segment that is followed by another is on disk
            active = self.active
            if active is not None and not active.is_flushed:
                active.flush()

    def prepare_segment(self, size: int, group: int) -> Segment:
        """Prepare the next segment, of `size` bytes or as many as one group of `group` bytes needs. Raises OSError.

        It is for `begin_segment`, or to be closed; another call prepares the same again.
        """
        size = max(size, group + size - capacity_of(size))
        self._prepare(self._next_number, size)
        prepared = self._directory / file_name(self._next_number)
        with suppress(DamagedStore, FormatMismatch):
            segment = Segment(self._directory, self._next_number, self._store_id, size)
            if segment.size == prepared.stat().st_size:
                return segment
            segment.close()
        prepared.unlink()  # it was applied, and is damaged since: nothing in it counts
        return Segment(self._directory, self._next_number, self._store_id, size)

    def begin_segment(self, following: Segment) -> int | None:
        """Go on in the prepared segment; returns the number of the one before, whose groups are all on disk then.

        Raises OSError; the log is of no use then.
        """
        before = self.active
        try:
            reach("wal.prepared")
            if before is not None and not before.ended:  # else a call before was interrupted behind this
                before.end(flush=True)
        except BaseException:
            following.close()
            raise
        with self._flushing:
            if before is not None and before.number not in self._ended:  # first: `leave_empty` is not to remove it
                self._ended.append(before.number)
            self.active, self._next_number = following, following.number + 1
            if before is None:
                return None
            before.close()
        reach("wal.ended")
        return before.number

    def _prepare(self, number: int, size: int) -> None:
        """Make a spare segment of about the size the one of `number`; other spares are removed."""
        make_directory(self._directory)
        prepared = self._directory / file_name(number)
        if prepared.exists():  # and not begun
            if prepared.stat().st_size >= size:
                return
            prepared.unlink()
        while self._spare:
            spare = self._directory / file_name(self._spare[-1])
            with suppress(FileNotFoundError):
                if size <= spare.stat().st_size <= 2 * size:
                    move(spare, self._directory / file_name(number))
                    self._spare.pop()
                    return
                spare.unlink()
            self._spare.pop()

    def release(self, number: int) -> None:
        """Free a segment and those before it, which are applied by the record too: their files may be used again."""
        self._spare += self._keep([ended for ended in self._ended if ended <= number])
        self._ended = [ended for ended in self._ended if ended > number]

    def leave_empty(self) -> None:
        """Leave one segment of the least size at a clean close; nothing is appended any more. Raises OSError.

        REQUIRES: everything is applied and on disk, and the record names the active segment or one before it. A segment
        that has a group is left to the next opening.

        The order is for a crash in between, and for readers beside. The record came first: a segment before the one
        that it names is never looked for, whether its removal reached the disk or not. The segment that it names has
        to be there, so it is not removed: an empty one takes its place by one rename, and neither holds a group. Its
        number is not used again, so places in the log go on from it.
        """
        active = self.active
        if active is None or self._ended or not active.is_empty:
            return
        for number in numbers_in(self._directory):
            if number != active.number:  # before it: applied; after it: prepared, and not begun
                (self._directory / file_name(number)).unlink(missing_ok=True)
        self._spare = []
        reach("wal.removed")
        if active.size > EMPTY_BYTES:
            empty_segment(self._directory, active.number, self._store_id)
        reach("wal.emptied")

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        with self._flushing:
            if self.active is not None:
                self.active.close()
