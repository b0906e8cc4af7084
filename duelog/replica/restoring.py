"""Restoring a store from its copy, as it was at a moment.

The newest manifest at or before the moment gives files and the groups that were not applied in them: together what a
crash at its instant would have left. They are put into a directory, and recovered as after a crash. The groups behind
that, up to the moment, follow in slices, each the log that is recovered next, at the places that its groups had. So
there is one way from a log to a store, that of opening; no segment is written, as nothing of it is built upon before
all is there.

Where the log alone does not say it: the directory of a partition whose deletion has ended goes; a generation that was
adopted is not in the copy, the one before has all that it has; and a slice ends before a partition closes, as recovery
passes over what is of a closed one.

The store is built in DIR.restoring and moved to DIR at the end: a restore that was killed left nothing at DIR.
"""

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from duelog.engine import open_engine
from duelog.opening import MARK, Identity, LogRows, recover, refuse_standby, write_identity
from duelog.partitions.partition import partition_path
from duelog.sending.wal_segments import Checkpoint
from duelog.store.clock import SystemClock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionRecord, PartitionState
from duelog.store.config import MIB, StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.errors import ForkFound, InvalidArgument, ReplicaDamaged, ReplicaRefused, ReplicaUnreachable
from duelog.store.files.directory import make_directory, move, remove_tree
from duelog.store.files.system_errors import explained, require_space
from duelog.store.log import catalog
from duelog.store.wal.environment_rows import EnvironmentRows, rows_by_environment
from duelog.store.wal.segment import MAIN, Group, Row, RowKind, place_of
from duelog.store.wal.wal_reader import DIRECTORY, write_wal

from .bucket import MANIFESTS, Bucket, log_name
from .file_download import put_file
from .identity import claim, copied_identity
from .log_object import LogObject, unpack_groups, unpack_head
from .manifest import MAIN_START, Manifest, read_manifest
from .remote_days import choose, files_by_day, leave_away, size_of
from .takeover import renew_ids

_SLICE_BYTES = 64 * MIB
_Read = bytes | None
"""A log object as it was read; None: it is not there."""

_PARTITIONS = fmt.prefix(fmt.Table.PARTITION)


class GapFound(ReplicaRefused):
    """Groups were never shipped, and the manifest behind them is not there, or not yet."""


class Restored(NamedTuple):
    """The result of a restore. place: it has the groups up to this one; 0: none. time_ms: it was written by then.

    manifest_ms: when the files were taken. groups: how many were applied. passed_over: what was damaged of newer
    manifests. away_bytes: of the files, those of days that are in the new prefix alone.
    """

    path: Path
    place: int
    time_ms: int
    manifest_ms: int
    groups: int
    file_bytes: int
    log_bytes: int
    passed_over: tuple[str, ...]
    away_bytes: int = 0


@dataclass(slots=True)
class ReplicaLog:
    """The log objects behind a manifest, read one after another and checked against each other, up to a moment."""

    bucket: Bucket
    store_id: bytes
    manifest: Manifest
    at_ms: int | None = None
    group: int | None = None
    bytes: int = 0
    groups: int = 0
    place: int = 0
    time_ms: int = 0
    seq: int = 0
    """The number that is read next."""
    before: LogObject | None = None
    """The object before it, if that was read."""
    _read: int = -1

    def __post_init__(self) -> None:
        self.seq, self.time_ms = self.manifest.first, self.manifest.taken_ms
        self.place = max(self.manifest.next_place - 1, 0)

    def more(self, lists: bool = True) -> Iterator[Group]:
        """All groups from `seq` on that are there.

        lists: one that is missing before others is damage; False: it is the end, where no more than one has come.
        Raises ReplicaDamaged, ForkFound; GapFound where groups before the moment were never shipped.
        """
        manifest = self.manifest
        last = None if self.group is None else max(self.group, manifest.next_place - 1)
        for content in self._contents(lists):
            made, groups = self._object(self.seq, content)
            is_after = self.at_ms is not None and made.time_ms > self.at_ms
            for group in groups:  # one by one: the garbage collector would look at those that wait
                place = group.position
                of_files = place < manifest.next_place  # the files rely on it
                if not of_files and (is_after or (last is not None and place > last)):
                    return
                self.groups += 1
                self._read, self.time_ms = place, made.time_ms
                self.place = max(self.place, place)
                yield group
                if place == last:
                    return  # what follows need not be whole
            if last is not None and made.end > last:
                return
            self.seq += 1
        if self._read < manifest.next_place - 1 and manifest.first <= manifest.seq:
            reason = f"is missing: the files of {manifest.seq} rely on it"
            raise ReplicaDamaged(self.bucket.url, log_name(self.seq), reason)

    def _contents(self, lists: bool) -> Iterator[_Read]:
        for _ in range(0 if lists else 2):  # to read costs a fraction of a listing; what is more is read ahead
            if (content := self.bucket.read(self.seq)) is None:
                return
            yield content
        yield from self.bucket.read_each(self.seq, self.bucket.span(self.seq).stop)

    def _object(self, seq: int, content: _Read) -> tuple[LogObject, Iterator[Group]]:
        url, name = self.bucket.url, log_name(seq)
        if content is None:
            raise ReplicaDamaged(url, name, f"is missing{self._until()}")
        with self._telling_until(name):
            made = unpack_head(url, name, content)
        if made.store_id != self.store_id or made.seq != seq:
            raise ReplicaRefused(self.bucket.url, f"{name} is of another store, or of another number")
        if self.before is not None and made.prev_crc != self.before.crc:
            raise ForkFound(self.bucket.url, f"{name} does not follow the object before it: two writers{self._until()}")
        if self.before is not None:
            self._refuse_gap(self.before, made)
        self.before = made
        self.bytes += len(content)
        return made, self._verified(name, unpack_groups(url, name, content, self.store_id))

    def _verified(self, name: str, groups: Iterator[Group]) -> Iterator[Group]:
        with self._telling_until(name):
            yield from groups

    @contextmanager
    def _telling_until(self, name: str) -> Iterator[None]:
        """Have an error tell what can be restored."""
        try:
            yield
        except ReplicaDamaged as error:
            reason = error.reason.removeprefix(f"{name} ") + self._until()
            raise ReplicaDamaged(self.bucket.url, name, reason) from None

    def _refuse_gap(self, before: LogObject, made: LogObject) -> None:
        if made.begin != before.end:
            at = f"{datetime.fromtimestamp(made.time_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
            raise GapFound(
                self.bucket.url,
                f"groups before {log_name(made.seq)} ({at}) were never shipped, and no manifest behind them is "
                f"there{self._until()}",
            )

    def _until(self) -> str:
        if not self.place:
            return ""
        return f"; --group {self.place} restores what is before it"


def restore(
    bucket: Bucket,
    target: Path,
    *,
    at_ms: int | None = None,
    group: int | None = None,
    progress: Callable[[int], None] | None = None,
    home: Bucket | None = None,
    max_local_bytes: int | None = None,
    now_ms: int | None = None,
) -> Restored:
    """Restore a store into `target`, absent or empty: as it was at a time, after a group, or as new as can be.

    progress: called with the bytes read so far. home: the prefix that the store ships to from now on, which is empty.
    max_local_bytes: of what takes more, far days and those that are over are in `home` alone. now_ms: the time by which
    they are; None: the system's. Raises InvalidArgument, ReplicaRefused, ReplicaDamaged, ReplicaUnreachable, ForkFound,
    StoreFull.
    """
    found = copied_identity(bucket)
    if max_local_bytes is not None and home is None:
        raise InvalidArgument("max_local_bytes", max_local_bytes, "needs `replica`, where the rest is then")
    if home is not None and home.url == bucket.url:
        raise InvalidArgument("replica", home.url, "expected a new prefix: to this one a second history would be added")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidArgument("DIR", str(target), "expected an empty directory, or none")
    refuse_standby("DIR", target)
    staged = target.with_name(target.name + ".restoring")
    passed_over: list[str] = []
    for seq in reversed(bucket.manifests()):
        try:
            manifest = read_manifest(bucket, seq)
            if (at_ms is not None and manifest.taken_ms > at_ms) or (
                group is not None and manifest.next_place > group + 1
            ):
                continue
            with explained(target), closing(take_place("DIR", target, staged, "is not of a restore")):
                try:
                    log = ReplicaLog(bucket, found[0], manifest, at_ms, group)
                    tier = None if home is None else Tier(home, max_local_bytes, now_ms or SystemClock().now_ms())
                    restored = Restoring(staged, log, found, progress, tier).run()
                    _set_apart(staged, found[1])
                    if target.exists():
                        target.rmdir()
                    move(staged, target)
                    (target / MARK).unlink()  # behind the move: what has no mark is not ours to remove
                except BaseException:
                    if staged.exists():
                        _clear(staged)
                        remove_tree(staged)
                    raise
        except ReplicaDamaged as error:
            if error.name.startswith("log/"):  # a manifest before needs it, too
                raise
            passed_over.append(str(error))
            continue
        return restored._replace(path=target, passed_over=tuple(passed_over))
    if passed_over:
        raise ReplicaDamaged(bucket.url, MANIFESTS, "has no manifest that is whole: " + "; ".join(passed_over))
    wanted = "" if at_ms is None and group is None else " at or before that moment"
    raise ReplicaRefused(bucket.url, f"has no manifest{wanted}: `duelog replica status` tells what can be restored")


class Place:
    """The lock of a directory that is being made, until it is closed, or nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = close


def take_place(field: str, target: Path, staged: Path, stranger: str) -> Place:
    """Make the directory `staged`, in which a store is made beside its place; no other process does until this closes.

    What a killed process left there is removed. stranger: why it is not, where it has no mark. Raises InvalidArgument.
    """
    if staged.exists() and any(staged.iterdir()) and not (staged / MARK).exists():
        raise InvalidArgument(field, str(target), f"{staged} is in the way, and {stranger}")
    make_directory(staged)
    place = _locked(field, target, staged)
    _clear(staged)
    return place


def _clear(staged: Path) -> None:
    """Remove all but the mark, which says whose the rest is, should this process be killed."""
    for left in staged.iterdir():
        if left.is_dir():
            remove_tree(left)
        elif left.name != MARK:
            left.unlink()


def _locked(field: str, target: Path, staged: Path) -> Place:
    descriptor = os.open(staged / MARK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    place = Place(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        place.close()
        raise InvalidArgument(field, str(target), f"another process is making {staged}") from None
    return place


class Tier(NamedTuple):
    """The prefix of a store that is restored, the most bytes that are not in it alone, and what time it is."""

    home: Bucket
    max_local_bytes: int | None
    now_ms: int


class Restoring:
    """A store that is made from a manifest and the log behind it. For one thread.

    Where the disk is full `apply` and `go_on` raise StoreFull, and a later call goes on with what was read: rows that
    are applied already are passed over, as after a crash.
    """

    def __init__(
        self,
        path: Path,
        log: ReplicaLog,
        identity: tuple[bytes, int],
        progress: Callable[[int], None] | None = None,
        tier: Tier | None = None,
    ) -> None:
        """`path`: where it is made, by `take_place`. identity: as `store_object` gives it. tier: None: all is here."""
        self._path = path
        self._log = log
        self._bucket = log.bucket
        self._store_id, self._partition_ms = identity
        self._manifest = log.manifest
        self._progress = progress
        self._tier = tier
        self._days = files_by_day(self._manifest)
        self._away_bytes = 0
        self._number = 0
        self._read = 0
        self._config = StoreConfig(partition_ms=self._partition_ms, background=False, control=False)
        self._cut_off: ReplicaUnreachable | None = None
        """Why the log ended before its end."""
        self._closed: set[int] = set()
        """Partitions that a slice was cut for."""
        self._parts: deque[tuple[dict[int, EnvironmentRows], int]] = deque()
        """Rows that were read and are to be applied, each with the place of their last group."""
        self._groups: Iterator[Group] = iter(())
        """The groups behind them that were begun to be read."""

    @property
    def number(self) -> int:
        """The first segment that has nothing of what is applied."""
        return self._number

    def run(self) -> Restored:
        """Make it, up to the moment that the log is read to, and have it be a store whose log is empty."""
        self.begin()
        self.apply()
        self.finish(self._number)
        manifest, log = self._manifest, self._log
        size, away = size_of(manifest.files), self._away_bytes
        return Restored(self._path, log.place, log.time_ms, manifest.taken_ms, log.groups, size, log.bytes, (), away)

    def begin(self) -> None:
        """Fetch the files, for `apply` to apply the log as far as it goes."""
        manifest, path = self._manifest, self._path
        if manifest.store_id != self._store_id:
            raise ReplicaRefused(self._bucket.url, f"the manifest at {manifest.seq} is of another store")
        for name in ("partitions", "staging", "trash", DIRECTORY):
            make_directory(path / name)
        write_identity(path, Identity(self._store_id, self._partition_ms))
        if self._tier is not None:
            claim(self._tier.home, path, self._store_id, self._partition_ms)
        if self._tier is None or self._tier.max_local_bytes is None:
            require_space(path, size_of(manifest.files), "to restore")
        self._put_files()
        self._groups = self._recover_instant(self._log.more())

    def _put_files(self) -> None:
        """Fetch the files, and leave days away of what is too much."""
        path, tier, left = self._path, self._tier, set[int]()
        of_main = [file for file in self._manifest.files if file.start_ms == MAIN_START]
        for file in of_main:
            put_file(self._bucket, file, path / "main", self._has_read)
        if tier is not None and tier.max_local_bytes is not None:
            main = Environment(path / "main", name="main", read_only=True, lock=False)
            with closing(main), main.read() as raw:
                records = dict(catalog.partitions(raw))
            left = choose(self._days, records, tier.max_local_bytes - size_of(of_main), tier.now_ms)
            here = sum(size_of(files) for start_ms, files in self._days.items() if start_ms not in left)
            largest = max((size_of(self._days[start_ms]) for start_ms in left), default=0)
            require_space(path, here + 2 * largest, "to restore")
        for start_ms, files in self._days.items():
            home = None if tier is None or start_ms not in left else tier.home
            if home is not None and leave_away(self._bucket, home, files, path, self._has_read):
                self._away_bytes += size_of(files)
                continue
            for file in files:
                put_file(self._bucket, file, partition_path(path, start_ms, file.generation), self._has_read)

    def go_on(self, lists: bool) -> None:
        """Apply what has come to the log since. lists: as of `ReplicaLog.more`."""
        self.apply()
        self._groups = self._log.more(lists)
        self.apply()

    def apply(self) -> None:
        """Apply what is there, of what was begun to be read."""
        self._cut_off = None
        self._apply_parts()
        for rows in iter(lambda: rows_by_environment(self._slice(self._groups)), {}):
            begin = 0
            for limit in [*self._closings(rows), self._log.place + 1]:
                self._parts.append(
                    ({start_ms: each.between(begin, limit) for start_ms, each in rows.items()}, limit - 1)
                )
                begin = limit
            self._apply_parts()
            if self._progress is not None:
                self._progress(self._read + self._log.bytes)
        if self._cut_off is not None:
            raise self._cut_off

    def _apply_parts(self) -> None:
        while self._parts:
            rows, place = self._parts[0]
            self._adjust(rows)
            self._apply(rows, place)
            self._parts.popleft()

    def finish(self, number: int) -> None:
        """Leave an empty log that begins with the segment `number`, which is `self.number` at the least."""
        if number > self._number:  # main records where the log begins
            self._apply({}, place_of(number, 0) - 1)
        write_wal(self._path, self._store_id, [], number)

    def _has_read(self, size: int) -> None:
        self._read += size
        if self._progress is not None:
            self._progress(self._read)

    # -- groups ------------------------------------------------------------------------------------

    def _recover_instant(self, groups: Iterator[Group]) -> Iterator[Group]:
        """Have what the files lack of their instant be applied, as it lay in the log; the groups behind it."""
        manifest = self._manifest
        before: list[Group] = []
        for group in groups:
            if group.position >= manifest.next_place:
                groups = chain((group,), groups)
                break
            if manifest.oldest is not None and group.number >= manifest.oldest:
                before.append(group)
        position = before[-1].position if before else place_of(manifest.oldest or 1, 0) - 1
        self._parts.append((rows_by_environment(before), max(position, manifest.next_place - 1)))
        return groups

    def _slice(self, groups: Iterator[Group]) -> Iterator[Group]:
        """The groups that are applied together: none is kept once its rows are taken."""
        size = 0
        try:
            for group in groups:
                yield group
                size += len(group.content)
                if size >= _SLICE_BYTES:
                    return
        except ReplicaUnreachable as error:  # the log is read on behind what it has given
            self._cut_off = error

    def _closings(self, rows: dict[int, EnvironmentRows]) -> list[int]:
        """The places of groups that say for the first time of a partition that it is closed."""
        places = []
        for place, row in rows[MAIN].others if MAIN in rows else ():
            if (found := _partition_row(row)) is not None:
                start_ms, record = found
                if record.state is not PartitionState.OPEN and start_ms not in self._closed:
                    self._closed.add(start_ms)
                    places.append(place)
        return places

    def _adjust(self, rows: dict[int, EnvironmentRows]) -> None:
        """Have rows say the generations of partitions that the restore has, and the files of deleted ones go."""
        others = rows[MAIN].others if MAIN in rows else []
        for at, (place, row) in enumerate(others):
            if (found := _partition_row(row)) is not None:
                start_ms, record = found
                adjusted = record._replace(generation=self._generation(start_ms))
                others[at] = place, row._replace(value=adjusted.pack())
            elif row.kind == RowKind.DELETE and row.key.startswith(_PARTITIONS):
                self._remove(fmt.trailing_u64(row.key))

    def _remove(self, start_ms: int) -> None:
        """Remove the directory of a partition whose deletion has ended."""
        directory = partition_path(self._path, start_ms, 1).parent
        if directory.exists():
            remove_tree(directory)
        self._days.pop(start_ms, None)

    def _generation(self, start_ms: int) -> int:
        """The generation of a partition that the restore has, or will have."""
        return self._days[start_ms][0].generation if start_ms in self._days else 1

    def _apply(self, rows: dict[int, EnvironmentRows], place: int) -> None:
        """Recover the store, as after a crash, with the rows of groups up to a place as its log, and apply them."""
        with ExitStack() as undo:
            log = LogRows(dict(rows), place)
            storage = recover(self._path, self._config, SystemClock(), undo, read_only=False, log=log).storage
            Checkpoint(storage.main, storage.partitions, place >> 32, lambda: None).finish()
        self._number = (place >> 32) + 1


def _set_apart(path: Path, partition_ms: int) -> None:
    """Have a store give out none of the ids that were given out behind the moment that it was restored to."""
    config = StoreConfig(partition_ms=partition_ms, background=False, control=False)
    engine = open_engine(path, config, SystemClock(), read_only=False, records_defaults=False)
    try:
        renew_ids(engine)
    finally:
        engine.close()


def _partition_row(row: Row) -> tuple[int, PartitionRecord] | None:
    if row.kind == RowKind.RECORD and row.key.startswith(_PARTITIONS):
        return fmt.trailing_u64(row.key), PartitionRecord.unpack(bytes(row.value))
    return None
