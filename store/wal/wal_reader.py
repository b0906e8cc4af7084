"""Reading the write-ahead log: all of it when a store is opened, or on and on beside the process that writes it."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DamagedStore
from ..files.directory import make_directory
from ..files.system_calls import sync_data
from ..files.system_errors import explained
from .segment import (
    Group,
    SegmentContent,
    SegmentFollower,
    file_name,
    numbers_in,
    place_of,
    read_segment,
    write_segment,
)

DIRECTORY = "wal"
"""Name of the directory of segments, in the store's directory."""


class WalContent(NamedTuple):
    """The content of a write-ahead log.

    groups: in the order in which they were written; some may be applied. last: the number of the last segment, whether
    it is used or not; 0: there is none. tail: where the last one ends, None where the log has not been begun.
    oldest: the number of the first that is needed, whether it holds groups or not. unflushed: by segment, the bytes of
    groups that may not be on disk.
    """

    groups: list[Group]
    last: int
    tail: SegmentContent | None
    oldest: int
    unflushed: dict[int, range]

    @property
    def position(self) -> int:
        """The place of the last group, or, where there is none, before that of the next."""
        number, sequence = (self.last + 1, 0) if self.tail is None else (self.last, len(self.tail.groups))
        return place_of(number, sequence) - 1


def read_wal(path: Path, store_id: bytes, oldest: int | None) -> WalContent:
    """Read the log of the store in `path` from the segment `oldest` on (catalog.WAL). O(bytes).

    Raises DamagedStore where a segment or a group that was flushed is missing, FormatMismatch.
    """
    directory = path / DIRECTORY
    if oldest is None:
        for number in numbers_in(directory):
            if read_segment(directory, number, store_id).groups:
                reason = "holds messages, and the main environment does not say that the log was begun"
                raise DamagedStore(directory / file_name(number), reason)
        last = max(numbers_in(directory), default=0)
        return WalContent([], last, None, last + 1, {})
    groups: list[Group] = []
    unflushed: dict[int, range] = {}
    number = oldest
    while True:
        try:
            content = read_segment(directory, number, store_id)
        except FileNotFoundError as error:
            raise DamagedStore(directory / file_name(number), "is missing: what it holds was acknowledged") from error
        groups += content.groups
        unflushed[number] = range(content.unflushed, content.end)
        if not content.ended:
            break
        number += 1
    following = number + 1
    later = read_segment(directory, following, store_id) if (directory / file_name(following)).exists() else None
    if later is not None and (later.groups or later.ended):
        raise DamagedStore(
            directory / file_name(number),
            f"its end, from byte {content.end} on, cannot be read, and {following} follows",
        )
    return WalContent(groups, number, content, oldest, unflushed)


def flush_wal(path: Path, content: WalContent) -> None:
    """Flush the segments that were read: the writes of a killed process may not be on disk, and are built upon now.

    Groups that none behind them says to be flushed are written again: a page that the disk once refused looks clean in
    the page cache, and a flush passes it over. Raises OSError.
    """
    for number, unflushed in content.unflushed.items():
        with (path / DIRECTORY / file_name(number)).open("r+b", buffering=0) as file:
            groups = os.pread(file.fileno(), len(unflushed), unflushed.start)
            if os.pwrite(file.fileno(), groups, unflushed.start) != len(groups):
                raise OSError(errno.EIO, "a write was cut short", file.name)
            sync_data(file.fileno())


def write_wal(path: Path, store_id: bytes, groups: Sequence[Group], oldest: int) -> list[Path]:
    """Make the log of a copy of a store in `path`, with `groups` from the segment `oldest` on; its files.

    Raises OSError.
    """
    directory = path / DIRECTORY
    make_directory(directory)
    last = max([oldest, *(group.number for group in groups)])
    return [
        write_segment(
            directory, number, store_id, [group for group in groups if group.number == number], ended=number < last
        )
        for number in range(oldest, last + 1)
    ]


def read_beside(path: Path, store_id: bytes, oldest: Callable[[], int | None]) -> WalContent:
    """Read the log beside the process that writes it; `oldest` reads the record of the oldest segment.

    What was read while it was being written looks like damage, at another place each time: damage is what is found
    twice. Raises as `read_wal`.
    """
    seen: tuple[int | None, str] | None = None
    while True:
        first = oldest()
        try:
            with explained(path / DIRECTORY):
                return read_wal(path, store_id, first)
        except DamagedStore as error:
            if seen == (first, str(error)):
                raise
            seen = first, str(error)


class WalFollower:
    """The write-ahead log of the store in `path`, read on while it is written. For one thread at a time."""

    def __init__(self, path: Path, store_id: bytes) -> None:
        self._directory = path / DIRECTORY
        self._store_id = store_id
        self._segments: dict[int, SegmentFollower] = {}

    def follow(self) -> list[Group]:
        """All groups of the segments that are there now, in order: those that are not applied, and perhaps more.

        What is missing of those was applied before the call began, or written after it: nothing is between them.
        """
        numbers = numbers_in(self._directory)
        for number in set(self._segments) - set(numbers):
            del self._segments[number]
        for number in numbers:
            self._follow(number)
        later = False
        for number in sorted(self._segments, reverse=True):
            if later and not self._segments[number].ended:
                self._follow(number)  # it came to its end after it was read, and before the next one was
            later = later or (number in self._segments and bool(self._segments[number].groups))
        return [group for number in sorted(self._segments) for group in self._segments[number].groups]

    def _follow(self, number: int) -> None:
        follower = self._segments.get(number)
        if follower is None:
            follower = self._segments[number] = SegmentFollower(self._directory, number, self._store_id)
        try:
            follower.follow()
        except FileNotFoundError:  # applied meanwhile
            del self._segments[number]
