"""A standby: it follows the log of a leader, applies it to a store of its own, and takes over when the lease passes.

The store is made beside its place, in DIR.standby, as a restore makes one: the newest manifest, then the log, object by
object. The lease has passed when no object has come for as long as the leader's last one says, by this machine's clock;
a leader that resigns is not waited for. Then the standby creates a fence under the next number, in the next epoch. Of
several only one can, and what is before the fence is all that the leader ever had in the copy: who could not create it,
the leader too, finds it under the number. The new leader looks once more whether others have led since, as its put may
have been late, moves the store to its place, and opens it.

That may take longer than the lease. So from its fence on it puts heartbeats (`Standby.beat`), by another thread than
the one that makes and opens the store, until the store ships its log. The two are openings of one directory: where both
put an object at once the store goes on behind the heartbeat, and where it was first the heartbeats end.

A directory that was the leader's, and meets a higher epoch, is set aside first (`set_aside.py`).
"""

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from duelog.delayed_store import DelayedStore
from duelog.opening import MARK, staged_of
from duelog.store.clock import SystemClock
from duelog.store.errors import (
    Deposed,
    DuelogError,
    ForkFound,
    InvalidArgument,
    ReplicaDamaged,
    ReplicaRefused,
    ReplicaUnreachable,
    StoreUnavailable,
)
from duelog.store.files.directory import move
from duelog.store.files.system_calls import since_boot_s
from duelog.store.files.system_errors import explained, out_of_space
from duelog.store.limited_log import LimitedLog
from duelog.store.wal.segment import place_of

from .bucket import AlreadyThere, Bucket, log_name
from .identity import Shipped, read_shipped, store_object
from .log_object import FENCE, RESIGNED, LogObject, Owner, find_object, read_object
from .log_writer import LogWriter, PutBefore
from .manifest import read_manifest
from .restoring import Place, ReplicaLog, Restoring, take_place
from .set_aside import set_aside

_log = logging.getLogger("duelog.replica")


def serve_at(store: DelayedStore, address: str) -> None:
    """Have the objects of a store's log say where clients find it."""
    if store._engine.shipping is not None:
        store._engine.shipping.serve_at(address)


def failure_of(store: DelayedStore) -> DuelogError | None:
    """Why a store that leads does no more, which shipped for the last time; Deposed: another does. None: it leads."""
    shipping, failed = store._engine.shipping, store._engine.storage.main.failed
    if failed is not None and isinstance(failed.__cause__, Deposed):
        return failed.__cause__
    return shipping.error if shipping is not None and shipping.ended and shipping.error is not None else failed


def last_object(bucket: Bucket) -> LogObject | None:
    """The last object of a log; None: it has none. Raises ReplicaDamaged, ReplicaUnreachable."""
    numbers = bucket.span(max(bucket.manifests(), default=0))
    return find_object(bucket, numbers[-1]) if numbers else None


class Standby:
    """Follows one copy until it leads. For one thread, but `beat`."""

    def __init__(
        self,
        path: Path,
        bucket: Bucket,
        *,
        lease_ms: int,
        address: str = "",
        elapsed: Callable[[], float] = since_boot_s,
    ) -> None:
        """`path`: of the store once it leads. `lease_ms`, `address`: told by the fence, of the leader to be.

        `elapsed`: a clock in seconds that never goes back, and goes on while the machine sleeps.
        """
        self._path = path
        self._staged = staged_of(path)
        self._bucket = bucket
        self._owner = Owner(uuid.uuid4().hex, lease_ms, address)
        self._elapsed = elapsed
        self._identity: tuple[bytes, int] | None = None
        self._log: ReplicaLog | None = None
        self._restoring: Restoring | None = None
        self._place: Place | None = None
        """Locks the directory that is made."""
        self._hole: tuple[DuelogError, list[int], int, int] | None = None
        """Why the log cannot be read on: the error, the manifests there are, a number, the hash of what is there."""
        self._seen = -1
        self._seen_s = elapsed()
        """Up to what number the log was read when that had last changed, and when it was."""
        self._fenced_s = 0.0
        """When a fence was last tried."""
        self._writer: LogWriter | None = None
        """Holds the lease while the store that leads is made and opened."""
        self._log_of_beats = LimitedLog(_log)

    @property
    def lease_ms(self) -> int:
        """The lease that this machine will hold."""
        return self._owner.lease_ms

    @property
    def leader(self) -> Owner | None:
        """The maker of the last object that was seen; None: none was."""
        before = None if self._log is None else self._log.before
        return None if before is None else before.maker

    @property
    def epoch(self) -> int:
        """The epoch of the last object that was seen; 0: none was."""
        before = None if self._log is None else self._log.before
        return 0 if before is None else before.epoch

    def begin(self) -> bool:
        """See what the directory is; True: the store in it leads, or may try: open it. Else `step` follows.

        One that led, and does no more, is set aside. Raises ReplicaUnreachable, ReplicaRefused, InvalidArgument,
        StoreFull.
        """
        with self._explained():
            return self._begin(self._path, self._bucket)

    def _begin(self, path: Path, bucket: Bucket) -> bool:
        if (path / "STORE").exists():
            shipped, last = read_shipped(path, bucket.url), last_object(bucket)
            if shipped is None or not shipped.owners or last is None or last.maker.opening in shipped.owners:
                return True  # it has not shipped yet, or ships on: what opens it says if it may not
            if last.epoch <= shipped.epoch:
                raise ForkFound(bucket.url, f"{path} and another directory have shipped in epoch {last.epoch}")
            set_aside(path, bucket, shipped.epoch)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidArgument("STORE", str(path), "expected a store, an empty directory, or none")
        self._forget()
        return False

    def _forget(self) -> None:
        self._log = self._restoring = self._writer = None
        if self._place is not None:
            self._place.close()
        self._place = take_place("STORE", self._path, self._staged, "no standby's")

    def resigned_at(self) -> int | None:
        """The number at which the leader has resigned; None: the last object says otherwise. Raises as `begin`."""
        last = last_object(self._bucket)
        return last.seq if last is not None and last.kind == RESIGNED else None

    def is_followed(self, seq: int) -> bool:
        """Return whether anything came to the log after a number."""
        return self._bucket.read(seq + 1) is not None

    def step(self) -> bool:
        """Apply what is new; True once this directory leads: open it.

        Raises ReplicaUnreachable: nothing is known. ReplicaRefused, ReplicaDamaged: the copy cannot be restored.
        StoreFull: a later call goes on once there is space.
        """
        with self._explained():
            last = self._read_on(lists=False)
            if last is not None and self._has_passed(last):
                last = self._read_on(lists=True)  # what is missing is not the end
                if last is not None and self._has_passed(last):
                    self._put_fence(last)
                    last = self._read_on(lists=True)
            if last is None or last.maker.opening != self._owner.opening:
                return False
            try:
                return self._lead(last)
            except BaseException:
                self._writer = None  # another standby may do it
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise as `explained`, and StoreFull for what LMDB calls an error of the disk where there is no space.

        Nothing is in doubt then: what was being applied is recovered as after a crash.
        """
        try:
            with explained(self._path):
                yield
        except StoreUnavailable as error:
            full = out_of_space(self._path.parent, error)
            if full is None:
                raise
            raise full from error

    def beat(self) -> None:
        """Renew the lease if it is time, while `step` makes the store that leads, or it is being opened.

        Any one thread may call it, also where there is nothing to renew.
        """
        writer = self._writer
        if writer is None or self._elapsed() < writer.beat_at_s:
            return
        try:
            writer.put(*writer.heartbeat(SystemClock().now_ms()))
        except ReplicaUnreachable as error:
            self._log_of_beats.log(logging.WARNING, "%s: the lease is not renewed for now: %s", self._path, error)
        except (PutBefore, ForkFound):  # the store that was opened ships its log
            self._writer = None
        except DuelogError as error:  # which opening it finds, too
            self._writer = None
            _log.warning("%s: the lease is not renewed any more: %s", self._path, error)

    def opened(self) -> None:
        """Put no more heartbeats: the store holds the lease by itself, or it cannot be opened, and others may lead."""
        self._writer = None

    def _read_on(self, lists: bool) -> LogObject | None:
        """Apply what is new; the last object, None where there is none yet. lists: as of `ReplicaLog.more`."""
        try:
            if self._restoring is not None:
                self._restoring.go_on(lists)
        except (ReplicaDamaged, ReplicaRefused) as error:  # a newer manifest may make up for it
            _log.warning("%s: the copy is restored once more: %s", self._path, error)
            self._restoring = None
        if self._restoring is None:
            self._restore()
        log = self._log
        if log is None:
            return None
        if log.before is None and log.seq > 1:  # nothing lies behind the files: the object before says who leads
            log.before = read_object(self._bucket, log.seq - 1)._replace(raw=())
        if log.seq != self._seen:  # also where a call before has read it, and raised
            self._seen, self._seen_s = log.seq, self._elapsed()
        return log.before

    def _has_passed(self, last: LogObject) -> bool:
        """True where the lease of the leader has passed, or is given up."""
        lease_s = last.maker.lease_ms / 1000
        return last.kind == RESIGNED or (lease_s > 0 and self._elapsed() > self._seen_s + lease_s)

    def _restore(self) -> None:
        """Begin with the newest manifest that is whole. Where there is none, a later call tries again."""
        if self._identity is None:
            self._identity = store_object(self._bucket)
        if self._identity is None:
            return
        manifests = self._bucket.manifests()
        if self._hole is not None:
            error, seen, number, content = self._hole
            if manifests == seen and hash(self._bucket.read(number)) == content:
                raise error  # all files would be fetched for the same answer
        self._hole = None
        for seq in reversed(manifests):
            self._forget()
            log = None
            try:
                manifest = read_manifest(self._bucket, seq)
                log = ReplicaLog(self._bucket, self._identity[0], manifest)
                restoring = Restoring(self._staged, log, self._identity)
                restoring.begin()
                self._log, self._restoring = log, restoring  # which goes on where the disk is full
                restoring.apply()
            except (ReplicaDamaged, ReplicaRefused) as error:
                self._log = self._restoring = None
                if isinstance(error, ReplicaDamaged) and not error.name.startswith("log/"):
                    _log.error("%s", error)
                    continue
                if log is not None:
                    self._hole = error, manifests, log.seq, hash(self._bucket.read(log.seq))
                raise
            return

    # -- taking over -------------------------------------------------------------------------------

    def _put_fence(self, last: LogObject) -> None:
        """Create a fence, unless another object is under its number. Who reads on finds which it is."""
        number = 0 if self._restoring is None else self._restoring.number
        fence = LogObject(
            last.store_id,
            last.epoch + 1,
            last.seq + 1,
            last.end,
            place_of(max(last.end >> 32, number) + 1, 0),  # places go on ascending
            SystemClock().now_ms(),
            last.crc,
            str(self._owner),
            kind=FENCE,
        )
        self._fenced_s = self._elapsed()
        with suppress(AlreadyThere):
            self._bucket.append(fence.seq, fence.pack())

    def _lead(self, last: LogObject) -> bool:
        """Put the store in its place; False where others have led behind the fence, or lead by now: it follows on.

        last: the fence of this opening, or a heartbeat behind it.
        """
        manifests = self._bucket.manifests()
        if self._restoring is None or (manifests and manifests[-1] >= last.seq):
            self._restoring = None
            _log.warning("%s: %s came too late: another leads by now", self._path, log_name(last.seq))
            return False
        writer = LogWriter(self._path, last.store_id, self._bucket, self._owner, last.epoch, self._elapsed)
        writer.go_on_after(last)
        writer.succeeded_s = self._fenced_s
        self._writer = writer
        self._restoring.finish(last.end >> 32)
        Shipped(self._bucket.url, (self._owner.opening,), last.epoch, new_line=True).write(self._staged)
        if self._writer is not writer:
            self._restoring = None
            return False
        with suppress(FileNotFoundError):
            self._path.rmdir()
        move(self._staged, self._path)
        (self._path / MARK).unlink()  # behind the move: what has no mark is not ours to remove
        _log.warning("%s leads in epoch %d", self._path, last.epoch)
        return True
