"""Tiers: far days, and days that are over, lie in the copy alone, and are fetched before they are read.

A day goes (partitions/away.py) once the newest manifest has a file of it, and that file, read back or fetched since the
store was opened, is whole: from then on it is the only one. What was appended since is in the rest. Every later
manifest names the file as long as the day is away, so pruning keeps it. Days go until the store takes no more than
`max_local_bytes`: first those that have closed, the last of them first, since subscriptions read from the oldest on;
then far ones, the farthest first. What was appended to an away day goes as a further object. A day that has begun, or
is about to, stays, and so does one in which a subscription with consumers is reading (`Partition.readers`).

A day comes `preload_ms`, and a second for each 50 MB, before it begins: at once, whatever there is. Others come once
there is room for them: where a call reads messages of one, and where a subscription gets to it, which asks for it, and
goes on once it is there: no lock is held meanwhile. Where it cannot be fetched its messages are late, and nothing is
lost: it is tried again as any part of the upkeep.

In a store with a thread of its own another does the work, so that firing never waits for the bucket.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb

from duelog.markers.firing.loaded import LoadedPartitions
from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.partitions.away import Away, Piece
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import Storage
from duelog.partitions.relocation import Ends, applied_rows, come_back, give_back, join
from duelog.partitions.timespan import directory_name
from duelog.store.clock import Clock
from duelog.store.codec.checksum import crc32
from duelog.store.codec.format import PartitionState
from duelog.store.config import MIB
from duelog.store.env.memtable import applied_position
from duelog.store.errors import ClosedError, CorruptEntry, DamagedStore, ReplicaDamaged
from duelog.store.files.directory import discard_tree, size_bytes, sync_directory
from duelog.store.files.system_errors import explained, require_space
from duelog.store.log.ledger import named_bodies

from .bucket import Bucket
from .file_download import put_file
from .manifest import Content, ReplicaFile
from .shipping import Shipping

_log = logging.getLogger("duelog.replica")

_BYTES_A_MS = 50_000
"""The rate at which a day is taken to be fetched."""

LOOK_MS = 10_000
"""Between two looks how much the store takes."""

LEAST_BYTES = MIB // 4
"""A rest that takes less is not given back."""

MANIFEST_MS = 300_000
"""Between two manifests that are made so that days can go."""

_NEVER = 1 << 62

_KEPT_BYTES = 64 * MIB
"""Bytes of the disk that a fetch leaves to sends."""


def begins_to_come_ms(start_ms: int, size: int, preload_ms: int) -> int:
    """When a day of `size` bytes is fetched, to be here `preload_ms` before it begins."""
    return start_ms - preload_ms - size // _BYTES_A_MS


def pieces_of(start_ms: int, generation: int, away: Away) -> list[ReplicaFile]:
    """The files of a manifest that has an away partition, without its rest."""
    before: int | None = None
    files = []
    for name, size, crc, applied, ledger in away.pieces:
        after = before if ledger is None else None
        files.append(ReplicaFile(start_ms, generation, applied, name, size, crc, ledger, after))
        before = applied if ledger is None else before
    return files


def fetch_pieces(
    bucket: Bucket,
    start_ms: int,
    generation: int,
    away: Away,
    directory: Path,
    told: Callable[[int], object] = lambda size: None,
) -> None:
    """Put the rows of an away partition, without its rest, into a directory that is not there yet.

    Raises ReplicaDamaged, ReplicaUnreachable, DamagedStore, StoreFull.
    """
    for file in pieces_of(start_ms, generation, away):
        put_file(bucket, file, directory, told)


def _bucket_of(away: Away, shipping: Shipping | None) -> Bucket:
    return shipping.bucket if shipping is not None and shipping.bucket.url == away.url else Bucket(away.url)


def fetch_whole(
    shipping: Shipping | None, partition: Partition, away: Away, rest: lmdb.Transaction, directory: Path
) -> None:
    """Put all rows of an away partition into a directory of a backup, with those of its rest. Raises as that does."""
    fetch_pieces(_bucket_of(away, shipping), partition.start_ms, partition.generation, away, directory)
    join(rest, partition.name, directory)
    (directory / "lock.mdb").unlink()
    sync_directory(directory)


class Tiers:
    """Gives days of an open store back, and fetches them. Thread-safe."""

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        shipping: Shipping | None,
        loaded: LoadedPartitions,
        wake: Callable[[], None],
        *,
        background: bool,
    ) -> None:
        """shipping: None: the store gives none back. wake: has the upkeep look what there is to do."""
        self._storage, self._clock, self._shipping, self._loaded = storage, clock, shipping, loaded
        self._path, self._config, self._partitions = storage.path, storage.config, storage.partitions
        self._suspensions: Suspensions = loaded.suspensions
        self._upkeep_wake = wake
        self._partitions.fetch = self.fetch
        self._moving = threading.Lock()
        """Held while a day goes or comes."""
        self._ends: dict[Content, Ends] = {}
        """Where logs end in the files of the newest manifest, and of one that is being made."""
        self._whole: set[str] = set()
        """Objects of the newest manifest that this opening has read, and found whole."""
        self._look_ms = 0
        """When it is looked next how much the store takes."""
        self.fetched = self.given_back = self.failures = 0
        """Since the store was opened."""
        self._wake = threading.Condition()
        self._wanted: list[Partition] = []
        self._looks = False
        self._outcomes: list[tuple[Part, Exception | None]] = []
        """Outcomes of the thread's work, which the upkeep has still to hear of."""
        self._closing = False
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="duelog-tiers", daemon=True)
            self._thread.start()

    # -- the upkeep --------------------------------------------------------------------------------

    def run(self, now_ms: int) -> None:
        """Fetch what begins soon, and give back what is too much; a thread does, where there is one."""
        with self._wake:
            outcomes, self._outcomes = self._outcomes, []
        for part, error in outcomes:
            self._note(part, error, now_ms)
        due = [each for each in self._away() if self._comes_ms(each) <= now_ms]
        self._suspensions.keep("fetch", {each.start_ms for each in due}.__contains__)
        due = [each for each in due if not self._waits(each, now_ms)]
        due.sort(key=lambda each: each.state is not PartitionState.OPEN)  # what would fire late comes first
        if self._thread is None:
            for partition in due:
                self._note(*self._outcome(partition), now_ms)
        looks = self._config.max_local_bytes is not None and self._look_ms <= now_ms and not self._waits(None, now_ms)
        if looks:
            self._look_ms = now_ms + LOOK_MS
        if self._thread is not None:
            with self._wake:
                self._wanted, self._looks = due, self._looks or looks
                self._wake.notify_all()
        elif looks:
            self._note(*self._outcome(None), now_ms)

    def next_ms(self, now_ms: int) -> int | None:
        """When there is more to do; None: it is not known."""
        dues = [
            self._suspensions.not_before(_part(each), self._comes_ms(each))
            for each in self._away()
            if self._thread is None or self._comes_ms(each) > now_ms
        ]
        if self._config.max_local_bytes is not None:
            dues.append(self._suspensions.not_before(_part(None), self._look_ms))
        return min((each for each in dues if each is not None), default=None)

    def _away(self) -> list[Partition]:
        found = map(self._partitions.get, sorted(self._partitions.away))
        return [each for each in found if each is not None and each.state is not PartitionState.DELETING]

    def _comes_ms(self, partition: Partition) -> int:
        """When a partition is fetched: never where it is here; at once where it is read, or nothing is to be away."""
        if partition.away is None:
            return _NEVER
        if partition.readers or (self._shipping is not None and self._config.max_local_bytes is None):
            return 0
        if partition.state is not PartitionState.OPEN:
            return _NEVER
        return begins_to_come_ms(partition.start_ms, partition.away.size, self._config.preload_ms)

    def _waits(self, partition: Partition | None, now_ms: int) -> bool:
        return self._suspensions.is_suspended(_part(partition), now_ms)

    def _note(self, part: Part, error: Exception | None, now_ms: int) -> None:
        if error is None:
            self._suspensions.succeeded(part, now_ms)
            return
        if self._suspensions.is_fatal(error):
            raise error
        self.failures += 1
        self._suspensions.note(part, error, now_ms, pauses=True)

    def _outcome(self, partition: Partition | None) -> tuple[Part, Exception | None]:
        """Fetch a partition, or give back what is too much; the error, if it fails."""
        try:
            if partition is None:
                self.make_room()
            elif partition.state is PartitionState.OPEN:
                with self._moving:
                    self._fetch(partition)
                self._look_ms = 0  # what is too much goes afterwards
                self._upkeep_wake()
            else:
                self.fetch(partition)
        except Exception as error:
            if partition is not None and not self._partitions.registered(partition):
                return _part(partition), None  # it was deleted meanwhile
            return _part(partition), error
        return _part(partition), None

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._wanted or self._looks)
                if self._closing:
                    return
                wanted, looks = self._wanted[:1], self._looks and not self._wanted
                self._wanted = self._wanted[1:]
                self._looks = self._looks and not looks
            for partition in [*wanted, *([None] if looks else [])]:
                outcome = self._outcome(partition)
                with self._wake:
                    self._outcomes.append(outcome)
            self._upkeep_wake()

    def close(self) -> None:
        """End the thread; what is being fetched is broken off. A second call does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- a day comes -------------------------------------------------------------------------------

    def fetch(self, partition: Partition) -> None:
        """Have a partition be whole on this machine, once there is room for it. Waits for the bucket.

        Raises ReplicaUnreachable, ReplicaDamaged, StoreFull, StoreFailed, ClosedError.
        """
        with self._moving:
            if partition.away is not None:
                with suppress(ReplicaDamaged):  # of another day, which stays then
                    self._make_room(partition.away.size, beside=partition)
                self._fetch(partition)

    def _fetch(self, partition: Partition) -> None:
        away, start_ms = partition.away, partition.start_ms
        if away is None or not self._partitions.registered(partition):
            return
        staged = self._path / "staging" / f"fetch-{directory_name(start_ms)}-{uuid.uuid4().hex[:8]}"
        with explained(self._path):
            require_space(self._path, 2 * away.size + _KEPT_BYTES, "to fetch a day")
            try:
                bucket = _bucket_of(away, self._shipping)
                fetch_pieces(bucket, start_ms, partition.generation, away, staged, self._told)
                self._whole.update(piece.name for piece in away.pieces)
                come_back(self._path, self._partitions, partition, away, staged)
            finally:
                discard_tree(staged)
        self.fetched += 1
        for come in list(partition.readers.values()):
            come()
        self._upkeep_wake()

    def _told(self, size: int) -> None:
        if self._closing:
            raise ClosedError(f"store {self._path}")

    # -- days go -----------------------------------------------------------------------------------

    def local_bytes(self) -> int:
        """Bytes on disk of the main environment and of the partitions."""
        return size_bytes(self._path / "main") + size_bytes(self._path / "partitions")

    def make_room(self) -> None:
        """Give days back until the store takes no more than `max_local_bytes`, as far as there are any.

        Raises ReplicaDamaged for one whose object is not whole, once others have gone; ReplicaUnreachable, StoreFull,
        StoreFailed.
        """
        with self._moving:
            stale = self._make_room(0)
        shipping = self._shipping
        newest = None if shipping is None else shipping.manifest
        if stale and shipping and newest and newest.taken_ms + MANIFEST_MS <= self._clock.now_ms():
            shipping.make_manifest()

    def _make_room(self, needed: int, beside: Partition | None = None) -> bool:
        """Return whether a new manifest would have more that may go. Raises as `make_room`."""
        most, shipping = self._config.max_local_bytes, self._shipping
        if most is None or shipping is None or not shipping.leads or self.local_bytes() + needed <= most:
            return False
        going = [each for each in self._partitions if each is not beside and self._may_go(each)]
        # whole ones first, of them those that are over, and the last of each kind
        going.sort(key=lambda each: (each.away is not None, each.state is PartitionState.OPEN, -each.start_ms))
        stale, damaged = False, None
        for partition in going:
            if self._is_called:
                return False
            try:
                where = self._where(partition, shipping)
                if isinstance(where, bool):
                    stale |= where
                elif self._give_back(partition, *where, shipping.bucket) and self.local_bytes() + needed <= most:
                    return False
            except ReplicaDamaged as error:  # others may go
                damaged = damaged or error
            except DamagedStore:
                if self._partitions.registered(partition):
                    raise  # it was not deleted meanwhile
        if damaged is not None:
            raise damaged
        return stale

    @property
    def _is_called(self) -> bool:
        """True where giving back is to end: the store closes, or a day is to come that would fire late."""
        return self._closing or any(each.state is PartitionState.OPEN for each in self._wanted)

    def _may_go(self, partition: Partition) -> bool:
        size = size_bytes(partition.path)
        if partition.away is not None:
            if size < LEAST_BYTES:
                return False
            size += partition.away.size
        comes_ms = begins_to_come_ms(partition.start_ms, size, 2 * self._config.preload_ms)
        is_over = partition.state is PartitionState.CLOSED and not partition.readers
        is_far = partition.state is PartitionState.OPEN and comes_ms > self._clock.now_ms()
        return (is_far or is_over) and not partition.vacant and partition.start_ms not in self._loaded.logs

    def drafted(self, ends: dict[Content, Ends]) -> None:
        """Hear where the logs of partitions end in the files of a manifest that is being made."""
        newest = None if self._shipping is None else self._shipping.manifest
        put = () if newest is None else newest.files
        self._ends = {file.content: self._ends[file.content] for file in put if file.content in self._ends} | ends
        self._whole &= {file.name for file in put}

    def _where(self, partition: Partition, shipping: Shipping) -> tuple[int, Away, Ends] | bool:
        """Where rows of a generation of a partition are by the newest manifest, and up to what ends.

        In place of that: True where another manifest may have them; False where nothing is new since it went.
        """
        manifest, generation = shipping.manifest, partition.generation
        if manifest is None or manifest.epoch != shipping.epoch:  # of other places
            return True
        files = [each for each in manifest.files if each.start_ms == partition.start_ms]
        with self._partitions.lease(partition, partial=True), applied_rows(partition.environment) as raw:
            away, environment = partition.away, partition.environment
            bodies = named_bodies(raw, environment.name, environment.path)
            before = None if away is None else away.applied
            if before == applied_position(raw):
                return False
            of_rows = [each for each in files if each.ledger is None and each.after == before]
            if not of_rows or of_rows[0].generation != generation:
                return True
            ends = self._ends.get(of_rows[0].content)
            if ends is None and of_rows[0].applied == applied_position(raw):
                ends = Ends.of(raw, partition.name)
        at = {each.ledger: each for each in files if each.ledger is not None}
        named = [at[ledger_id] for ledger_id in bodies if ledger_id in at]
        if ends is None or len(named) < len(bodies):
            return True
        pieces = [Piece(each.name, each.size, each.crc, each.applied, each.ledger) for each in (*named, of_rows[0])]
        return generation, Away(shipping.bucket.url, (*(() if away is None else away.pieces), *pieces)), ends

    def _give_back(self, partition: Partition, generation: int, away: Away, ends: Ends, bucket: Bucket) -> bool:
        known = () if partition.away is None else partition.away.pieces
        if not all(self._is_whole(bucket, piece) for piece in away.pieces if piece not in known):
            return False
        try:
            if not give_back(self._path, self._partitions, partition, generation, away, ends):
                return False
        except (CorruptEntry, DamagedStore) as error:  # a day whose logs cannot be read stays where it is
            if not self._partitions.registered(partition):
                raise
            _log.error("%s: %s is not given back: %s", self._path, partition.name, error)
            return False
        self.given_back += 1
        if partition.readers:  # since it was chosen
            self._upkeep_wake()
        return True

    def _is_whole(self, bucket: Bucket, piece: Piece) -> bool:
        """Read an object back, but one that was read: the files here are about to go. False: something has come up.

        Raises ReplicaDamaged, ReplicaUnreachable.
        """
        pieces = bucket.download(piece.name)
        if pieces is None:
            raise ReplicaDamaged(bucket.url, piece.name, "is missing")
        if piece.name in self._whole:  # and it can be had now
            return True
        size = crc = 0
        for content in pieces:
            size, crc = size + len(content), crc32(content, crc)
            if self._is_called:
                return False
        if (size, crc) != (piece.size, piece.crc):
            raise ReplicaDamaged(bucket.url, piece.name, "does not match the manifest's checksum")
        self._whole.add(piece.name)
        return True


def _part(partition: Partition | None) -> Part:
    return Part("give back") if partition is None else Part("fetch", start_ms=partition.start_ms)
