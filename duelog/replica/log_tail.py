"""Reading the write-ahead log on from a place, beside the thread that writes it; and keeping what is not read yet.

A segment that is applied would be used again. One that has groups to be shipped is put aside in wal/ as NUMBER.kept
until the tail has passed it (`KeptLog`), where recovery and readers do not look. Body files have a second name in
wal/bodies/: one that goes with its ledger or its partition stays there until the groups that name it are passed. The
last groups that were appended are in memory, but not the bodies that they name: those are mapped as they are shipped.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from duelog.partitions.partition import environment_path
from duelog.store.config import MIB
from duelog.store.env.body_file import DIRECTORY as BODIES
from duelog.store.env.body_file import BodyMaps, BodyReader, body_files
from duelog.store.files.directory import make_directory, remove_tree, sync_directory
from duelog.store.wal.segment import RawGroup, SegmentReader, file_name, place_of
from duelog.store.wal.wal_reader import DIRECTORY


class LogLost(Exception):
    """The log cannot be read on from a place: what follows it is gone."""


_NONE = 1 << 62
"""In place of the segment that is needed: none is."""

_USED_AGAIN = 2
"""Segments that stay, once they are shipped, for the log to use again."""


def _kept_name(number: int) -> str:
    return f"{number:012d}.kept"


class KeptLog:
    """Segments of a store that are applied, and not shipped, and body files that unshipped groups name. Thread-safe.

    Which there are is known in memory: what is put aside amid a checkpoint needs no descriptor.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        """`path`: of the store. All segments are needed until `passed` says which are not."""
        self._directory = path / DIRECTORY
        self._most_bytes = most_bytes
        self._needed = 0
        self._aside = {int(file.stem): file.stat().st_size for file in self._directory.glob("*.kept")}
        """Bytes of the segments that are put aside, by number."""
        self._links = set(body_files(self._directory).values())
        """Second names of body files."""
        self._removed: dict[Path, int] = {}
        """Body files that are there for the copy alone, and a place behind all groups that name them."""
        self._lock = threading.Lock()
        self.lost = False
        """True once segments were given up since they took more than `most_bytes`."""

    def keep(self, numbers: Iterable[int]) -> list[int]:
        """Put aside those of applied segments that are needed; the others, which may be used again.

        A call that was broken off may be made again; a power cut may take renames back: opening does them again.
        """
        numbers = list(numbers)
        with self._lock:
            free = [number for number in numbers if number < self._needed]
            kept = [number for number in numbers if number >= self._needed]
            for number in self._passed():
                with suppress(FileNotFoundError):
                    os.rename(self._directory / _kept_name(number), self._directory / file_name(number))
                del self._aside[number]
                free.append(number)
            for number in kept:
                aside = self._directory / _kept_name(number)
                with suppress(FileNotFoundError):
                    os.rename(self._directory / file_name(number), aside)
                with suppress(FileNotFoundError):  # the call that was broken off has given it up
                    self._aside[number] = aside.stat().st_size
            if self.bytes > self._most_bytes:
                self.lost = True
                self._remove_all()
            return free

    def keep_bodies(self, path: Path) -> None:
        """Have a body file stay when its name goes, until `passed_bodies` removes it.

        Another file that has the second name was left by a crash, and opening removed its first: no group names it.
        Where a file system has one name for each file a removal before a group is shipped leaves a gap in the copy.
        """
        link = self._directory / BODIES / path.name
        with self._lock, suppress(OSError):
            if self._needed < _NONE and not (link.exists() and link.samefile(path)):
                make_directory(link.parent)
                link.unlink(missing_ok=True)
                os.link(path, link)
                self._links.add(link)
                sync_directory(link.parent)

    def passed_bodies(self, shipped: int, written: Callable[[], int]) -> None:
        """Remove body files that have no other name, and whose groups lie before the place `shipped`.

        written: tells the place of the next group.
        """
        with self._lock:
            alone = self._bodies_alone()
            end = written()  # after the look: no group behind it names them
            self._removed = {path: self._removed.get(path, end) for path in alone}
            for path, place in self._removed.items():
                if place <= shipped:
                    path.unlink(missing_ok=True)
                    self._links.discard(path)

    def _bodies_alone(self) -> dict[Path, int]:
        """The body files that are kept for the copy alone, with their bytes."""
        alone = {}
        for path in list(self._links):
            with suppress(FileNotFoundError):
                status = path.stat()
                if status.st_nlink == 1:
                    alone[path] = status.st_size
        return alone

    @property
    def bytes(self) -> int:
        """Bytes of the segments put aside, and of body files that have no other name."""
        return sum([*self._aside.values(), *self._bodies_alone().values()])

    def passed(self, needed: int) -> None:
        """Remove those before the segment `needed`, but for the last two: they are used again."""
        with self._lock:
            self.lost = False
            if needed > self._needed:
                self._needed = needed
                for number in self._passed()[:-_USED_AGAIN]:
                    (self._directory / _kept_name(number)).unlink(missing_ok=True)
                    del self._aside[number]

    def give_up(self) -> None:
        """Remove all, and keep none any more."""
        with self._lock:
            self._needed = _NONE
            self._remove_all()
            remove_tree(self._directory / BODIES)
            self._links.clear()

    def _passed(self) -> list[int]:
        """The segments that are put aside and not needed any more, ascending."""
        return sorted(number for number in self._aside if number < self._needed)

    def _remove_all(self) -> None:
        for number in self._aside:
            (self._directory / _kept_name(number)).unlink(missing_ok=True)
        self._aside.clear()
        for path in self._bodies_alone():
            path.unlink(missing_ok=True)
            self._links.discard(path)


_HEARD_BYTES = 16 * MIB
"""Most bytes of groups that are kept in memory, so that they need not be read back."""


Readers = Callable[[Path], BodyReader]
"""By the directory that has body files, what reads them."""


def _reader(directory: Path) -> BodyReader:
    return BodyReader(BodyMaps(str(directory)))


class LogTail:
    """Reads the groups of a store's log from a place on. For one thread at a time, but `heard`."""

    def __init__(self, path: Path, store_id: bytes, place: int) -> None:
        """Begin at `place` (`place_of`), which need not be written yet. Raises LogLost, OSError."""
        self._path = path
        self._directory = path / DIRECTORY
        self._store_id = store_id
        self._reader: SegmentReader | None = None
        self._end = 0
        """The byte of the segment at which the group before `place` ends."""
        self._lock = threading.Lock()
        self._heard: deque[RawGroup] = deque()
        """Groups that follow each other, the last that were appended; those before `place` are of no use."""
        self._heard_bytes = 0
        self._number, self._sequence = place >> 32, 0
        try:
            while self.place < place:
                self._passed(self._from_disk())
            if self.place != place:
                raise LogLost(f"segment {place >> 32} of the log ends before group {place & 0xFFFFFFFF}")
        except BaseException:
            self.close()
            raise

    @property
    def place(self) -> int:
        """The place of the next group."""
        return place_of(self._number, self._sequence)

    def heard(self, group: RawGroup) -> None:
        """Keep a group, just appended, until it is taken or others want the space. For the leader."""
        with self._lock:
            self._heard_bytes += len(group.content)
            self._heard.append(group)
            if self._heard_bytes > _HEARD_BYTES:
                self._heard.clear()
                self._heard_bytes = 0

    def _from_memory(self, until: int, most_bytes: int) -> list[RawGroup]:
        """The next groups that are in memory, as `take` has them."""
        groups: list[RawGroup] = []
        place = self.place
        with self._lock:
            while self._heard and self._heard[0].position <= place < until and most_bytes > 0:
                group = self._heard.popleft()
                self._heard_bytes -= len(group.content)
                if group.position == place:
                    groups.append(group)
                    place += 1
                    most_bytes -= group.size
        return groups

    @property
    def _names(self) -> tuple[str, ...]:
        name = file_name(self._number)
        return name, _kept_name(self._number), name  # it may be put aside between the looks

    def _open(self) -> SegmentReader:
        """The reader of the segment, at `place`. Raises LogLost."""
        for name in self._names if self._reader is None else ():
            with suppress(FileNotFoundError):
                self._reader = SegmentReader(self._directory / name, self._number, self._store_id)
                break
        if self._reader is None:
            raise LogLost(f"segment {self._number} of the log is gone")
        self._reader.go_to(self._sequence, self._end)
        return self._reader

    def _from_disk(self) -> RawGroup:
        reader = self._open()
        group = reader.read()
        if group is None:
            reader.look_again()
            group = reader.read()
        if group is None or group.position != self.place or not group.is_intact(self._store_id):
            raise LogLost(f"group {reader.sequence} of segment {self._number} of the log cannot be read")
        return group

    def _with_bodies(self, group: RawGroup, readers: Readers) -> RawGroup:
        """A group with the bodies that it names, mapped: in memory of this process they would be cold, and its own.

        Raises LogLost.
        """
        found = []
        for start_ms, ledger_id, at, length in group.bodies_apart():
            bodies = readers(self._directory)(ledger_id, at, length)
            if len(bodies) < length:  # a file without a second name is in its place alone
                bodies = readers(environment_path(self._path, start_ms))(ledger_id, at, length)
            if len(bodies) < length:
                raise LogLost(f"bodies that group {group.position} of the log names are gone")
            found.append(bodies)
        return group._replace(bodies=found, apart=())

    def take(self, until: int, most_bytes: int) -> list[RawGroup]:
        """Read groups with rows before the place `until`, at most about `most_bytes`, one at least if there is any.

        REQUIRES: everything before `until` is in the log. Raises LogLost, OSError, ResourceShortage, NoPermission,
        StoreUnavailable, for the group at `place`: what was read before it is not lost.
        """
        groups: list[RawGroup] = []
        size, readers = 0, cache(_reader)  # a map is a descriptor, and serves all groups that name its file
        while self.place < until and size < most_bytes:
            try:
                heard = self._from_memory(until, most_bytes - size)
                for group in heard or [self._with_bodies(self._from_disk(), readers)]:
                    whole = self._with_bodies(group, readers) if group.apart else group
                    self._passed(group)
                    if group.row_count:
                        groups.append(whole)
                        size += group.size
            except Exception:
                if not groups:
                    raise
                break  # what was read is passed; the next call meets the error again
        return groups

    def rest(self) -> Iterator[RawGroup]:
        """The groups with rows from `place` to the end of a log that nobody writes. Raises LogLost: some are gone."""
        while True:
            try:
                group = self._from_disk()
            except LogLost as lost:
                self.close()
                self._number, self._sequence = self._number + 1, 0
                try:
                    self._from_disk()
                except LogLost:
                    return
                raise lost from None  # the log goes on behind what cannot be read
            self._passed(group)
            if group.row_count:
                yield self._with_bodies(group, _reader)

    def _passed(self, group: RawGroup) -> None:
        if group.row_count:
            self._sequence, self._end = self._sequence + 1, group.at + len(group.content)
        else:  # the log goes on in the next segment
            self.close()
            self._number, self._sequence = self._number + 1, 0

    def close(self) -> None:
        """Close the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
