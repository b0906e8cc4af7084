"""Making the manifests of an open store: the files of an instant are copied into the bucket.

A file is copied to the disk first, compacted, then uploaded; one at a time. One that the newest manifest has is not.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from duelog.backup import PointInTime, describe
from duelog.engine import Engine, begin_tiers
from duelog.partitions.away import Away
from duelog.partitions.relocation import Ends
from duelog.store.clock import ManualClock
from duelog.store.config import MIB
from duelog.store.env.body_file import body_file
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from duelog.store.env.memtable import applied_position
from duelog.store.errors import BrokenInvariant, ClosedError, StoreFull
from duelog.store.files.directory import make_directory
from duelog.store.files.system_errors import require_space
from duelog.store.log.ledger import named_bodies
from duelog.store.wal.segment import place_of

from .bucket import FILES, Bucket
from .compacted import take_compacted
from .manifest import MAIN_START, Content, Manifest, ReplicaFile
from .pruning import made_by, prune
from .shipping import Draft, Shipping
from .takeover import renew_ids
from .tiers import pieces_of

_log = logging.getLogger("duelog.replica")

_KEPT_BYTES = 64 * MIB
"""Bytes of the disk that a copy leaves to sends."""


def begin_shipping(engine: Engine, shipping: Shipping) -> None:
    """Have a store that is being opened ship its log from now on.

    Raises ReplicaRefused, ReplicaUnreachable, NotReplicated.
    """
    begin_tiers(engine)
    manifests = ManifestFiles(engine, shipping, shipping.bucket)
    if engine.wal_writer is None:
        raise BrokenInvariant("a store that is read alone ships its log")
    shipping.begin(engine.wal_writer.segments, manifests, background=not isinstance(engine.clock.wrapped, ManualClock))
    if shipping.is_new_line:
        renew_ids(engine)
        shipping.wait_for(engine.writer().segments.next_place())  # else the next leader would pass over the same
        shipping.renewed()


class ManifestFiles:
    """Makes the manifests of an open store. For one thread at a time."""

    def __init__(self, engine: Engine, shipping: Shipping, bucket: Bucket) -> None:
        self._engine = engine
        self._shipping = shipping
        self._bucket = bucket

    def draft(self, before: Manifest | None) -> Draft | None:
        """Find an instant, and copy the files that `before` does not have; None: the store closes.

        Fetches what was compacted elsewhere first, for the upkeep to adopt.

        Raises ReplicaUnreachable, StoreBusy, StoreFull, DamagedStore.
        """
        engine = self._engine
        try:
            take_compacted(self._bucket, engine.storage.path, _KEPT_BYTES)
        except StoreFull as error:
            _log.warning("%s: what was compacted elsewhere is not taken for now: %s", engine.storage.path, error)
        known: dict[Content, ReplicaFile] = {}
        if before is not None and before.epoch == self._shipping.epoch:  # a standby has generations of its own
            known = {each.content: each for each in before.files}
        scratch = Path(tempfile.mkdtemp(prefix="replica-", dir=engine.storage.path / "staging"))
        try:
            held = engine.upkeep.maintenance.deletions_held()
            with engine.storage.partitions.copying, held, closing(PointInTime(engine)) as point:
                files, ends = [], dict[Content, Ends]()
                for start_ms, generation, environment, read, away in _environments(engine.storage.main, point):
                    if self._shipping.closing:
                        return None
                    applied, after = applied_position(read.raw), None
                    if away is not None:
                        files += pieces_of(start_ms, generation, away)
                        after = away.applied
                    if applied != after:
                        file = ReplicaFile(start_ms, generation, applied, "", 0, 0, after=after)
                        files.append(known.get(file.content) or self._copy(scratch, file, environment, read))
                        if start_ms != MAIN_START:
                            ends[file.content] = Ends.of(read.raw, environment.name)
                    for ledger_id, size in named_bodies(read.raw, environment.name, environment.path).items():
                        if self._shipping.closing:
                            return None
                        kind, path = 0 if start_ms == MAIN_START else generation, body_file(environment.path, ledger_id)
                        bodies = ReplicaFile(start_ms, kind, size, "", size, 0, ledger_id)
                        files.append(known.get(bodies.content) or self._copy_bodies(scratch, bodies, path))
                if engine.tiers is not None:
                    engine.tiers.drafted(ends)
                return self._drafted(point, tuple(files))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _drafted(self, point: PointInTime, files: tuple[ReplicaFile, ...]) -> Draft:
        storage, oldest = self._engine.storage, point.oldest_segment
        groups = [group for group in point.wal if oldest is not None and group.number >= oldest]
        next_place = groups[-1].position + 1 if groups else place_of(oldest or 0, 0)
        span_ms = storage.config.partition_ms
        epoch = self._shipping.epoch
        manifest = Manifest(storage.store_id, span_ms, 0, 0, oldest, next_place, point.taken_ms, files, epoch)
        return Draft(manifest, needs_groups=bool(groups))

    def _copy(self, scratch: Path, file: ReplicaFile, environment: Environment, read: HeldRead) -> ReplicaFile:
        target = scratch / "copy"
        require_space(scratch, environment.file_bytes() + _KEPT_BYTES, "to copy a file for the replica")
        make_directory(target)
        environment.copy(target, read)
        file = self._put(file, target / "data.mdb")
        shutil.rmtree(target)
        return file

    def _copy_bodies(self, scratch: Path, file: ReplicaFile, path: Path) -> ReplicaFile:
        """Put of a body file what the instant names: it is appended to meanwhile."""
        require_space(scratch, file.size + _KEPT_BYTES, "to copy a file for the replica")
        target = scratch / path.name
        shutil.copyfile(path, target)
        with target.open("r+b") as copied:
            copied.truncate(file.size)
        put = self._put(file, target)
        target.unlink()
        return put

    def _put(self, file: ReplicaFile, path: Path) -> ReplicaFile:
        """Put what is at `path` into the bucket; `file` with its name, size and checksum."""
        size, crc = describe(path)
        label = f"{'main' if file.start_ms == MAIN_START else file.start_ms}-{file.generation}"
        label = label if file.ledger is None else f"{label}-{file.ledger}"
        name = f"{FILES}/{label}-{max(file.applied, 0)}-{crc:08x}{made_by(self._shipping.epoch)}"
        self._bucket.put(name, path)
        return file._replace(name=name, size=size, crc=crc)

    def prune(self, newest: Manifest, now_ms: int) -> None:
        """Remove what no restore within the retention needs. Raises ReplicaUnreachable, ClosedError, ClockJumped."""
        self._engine.upkeep.maintenance.read_clock()  # by one that has jumped all but the newest would go
        config = self._engine.storage.config
        bucket = self._bucket.for_lease(None).checked(self._refuse_closing)
        prune(bucket, now_ms, config.replica_retention_ms, making=newest.epoch)

    def _refuse_closing(self) -> None:
        if self._shipping.closing:
            raise ClosedError(f"store {self._engine.storage.path}")


def _environments(
    main: Environment, point: PointInTime
) -> Iterator[tuple[int, int, Environment, HeldRead, Away | None]]:
    """(start, generation, environment, its view, where the rows before are) of each environment of the instant.

    Each is held until the next.
    """
    yield MAIN_START, point.oldest_segment or 0, main, point.main, None  # it has that number, which no group changes
    point.main.release()
    for partition, environment, read, away in point.partitions():
        generation = int(environment.path.name[1:]) if away is None else partition.generation
        yield partition.start_ms, generation, environment, read, away
