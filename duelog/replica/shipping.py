"""Shipping: the write-ahead log of an open store goes to its copy as it is written, one log object at a time.

Order in the bucket. Log objects have dense numbers and are created if absent, one in flight (`log_writer.py`).
Another's bytes under the number are a fork: this store ships no more. So what is in the log is decided by who creates a
number, and by nothing else.

Order on the disk. A group is shipped once it is flushed, so that a power cut takes nothing back that the copy has; a
segment is used again once it is shipped (`KeptLog`), as far as `replica_keep_bytes` allows. Where the log cannot
be read on, it goes on from the oldest segment that is needed, and the gap stays: a manifest begins behind it.

Who leads. An object of a higher epoch under the next number is a fence: another machine leads, and this store fails.
With a lease (`lease_ms`) a heartbeat is put where nothing else is, and the store refuses work from 0.8 of the lease on
after its last success; a standby waits for all of it. So no clocks have to agree: an object comes before the fence, or
was never created. A directory that was copied waits for the lease of the one it is a copy of, once: that one may lead.

Otherwise what happens to the copy never stops the store. Failures are logged, counted, and tried again; a refusal ends
shipping. Who is told of a change once it is in the copy waits here (`wait_for`), and many wait for one put.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from duelog.sending.wal_segments import WalSegments
from duelog.store.clock import Clock
from duelog.store.config import GIB, StoreConfig
from duelog.store.errors import (
    ClosedError,
    DamagedStore,
    Deposed,
    DuelogError,
    ForkFound,
    NotLeader,
    NotReplicated,
    ReplicaRefused,
)
from duelog.store.files.system_calls import since_boot_s
from duelog.store.files.system_errors import explained
from duelog.store.limited_log import LimitedLog
from duelog.store.wal.segment import RawGroup, place_of
from duelog.store.wal.wal_reader import DIRECTORY

from .bucket import Bucket, log_name, manifest_name
from .identity import Shipped, claim, inode_of, read_shipped
from .log_object import RESIGNED, LogObject, Owner, Parts, find_object, read_object
from .log_tail import KeptLog, LogLost, LogTail
from .log_writer import BEATS, LogWriter, PutBefore, newest_manifest
from .manifest import Manifest

_log = logging.getLogger("duelog.replica")

MANIFEST_MS = 3_600_000
"""A manifest is made so long after the one before, where anything was shipped since."""

MANIFEST_BYTES = GIB
"""It is made sooner once so much was shipped."""

_RETRY_MS = 1_000
_LONGEST_RETRY_MS = 30_000
_DRAIN_S = 10.0
"""How long a close waits for the copy; what is not shipped then is shipped after the next opening."""

ENTRIES = 1 << 18
"""Most entries of one log that clients of a store with a lease are told of before they are shipped."""

_ENTRY_BYTES = 24
"""Least bytes of an entry in a group."""

_GATHER = 0.25
"""The part of a put's time for which the next one waits at most, for those that the put told to come again."""

_ALL = 1 << 64
"""Above every place."""

_LATE_OPENINGS = 64
"""Openings after the one that shipped last, of which a put may still come."""

_SHIPPED_KEPT = 10_000
"""Log objects whose ends are remembered, to tell where a manifest begins."""


class Draft(NamedTuple):
    """Files that lie in the bucket, of a manifest that is put once the log has all before `next_place`."""

    manifest: Manifest
    needs_groups: bool
    """True where the log has groups that a restore from it applies."""


class ManifestSource(Protocol):
    """Makes manifests of an open store."""

    def draft(self, before: Manifest | None) -> Draft | None:
        """Copy what `before` does not have; None: broken off since the store closes."""
        ...

    def prune(self, newest: Manifest, now_ms: int) -> None:
        """Remove what no restore needs any more, or break off since the store closes."""
        ...


@dataclass(slots=True)
class ShippingFigures:
    """Counts of an open store's shipping. seconds: of puts that were stored."""

    puts: int = 0
    failures: int = 0
    bytes: int = 0
    manifests: int = 0
    seconds: float = 0.0


class ShippingState(NamedTuple):
    """Where shipping stands. lag_ms: how long the oldest group that is not shipped has waited; 0: none does.

    error: why shipping fails or has ended; None: it does not. ended: it is refused, and not tried again. seq: the last
    log object. place: groups before it are shipped. manifest_ms: when the newest manifest was taken; None: there is
    none. kept_bytes: of the log on disk, kept for the copy alone. epoch: in which it leads. leads: False where the
    lease may have passed, so that it refuses work, or another leads.
    """

    url: str
    lag_ms: int
    lag_bytes: int
    lag_groups: int
    error: str | None
    ended: bool
    seq: int
    place: int
    manifest_ms: int | None
    kept_bytes: int
    puts: int
    failures: int
    bytes: int
    manifests: int
    put_seconds: float
    epoch: int
    leads: bool


class Shipping:
    """Ships the log of one open store. Thread-safe; one thread ships at a time."""

    def __init__(self, path: Path, store_id: bytes, config: StoreConfig, clock: Clock, bucket: Bucket) -> None:
        """`path` is the store's directory. Nothing is asked of the bucket yet. Raises ReplicaRefused."""
        self._path = path
        self._store_id = store_id
        self._partition_ms = config.partition_ms
        self._ship_ms = config.ship_ms
        self._ship_bytes = config.ship_bytes
        self._clock = clock
        self.bucket = self._bucket = bucket
        shipped = read_shipped(path, bucket.url)  # refuses one that cannot be read, before anything is begun
        self.is_new_line = shipped is not None and shipped.new_line
        """True until the ids of a store that was taken over are set apart from those given out before."""
        self._shipped = Shipped(bucket.url) if shipped is None else shipped
        self.kept = KeptLog(path, config.replica_keep_bytes)
        self.figures = ShippingFigures()
        self.error: DuelogError | None = None
        self.ended = False
        """True once shipping was refused, or the store is closed."""
        self._log = LimitedLog(_log)

        owner, epoch = Owner(uuid.uuid4().hex, config.lease_ms or 0), 1 if shipped is None else shipped.epoch
        self.writer = LogWriter(path, store_id, bucket, owner, epoch, since_boot_s)
        self._address_is_new = False
        """True until an object says where clients find this store."""
        self._timeout_s = config.replicated_timeout_ms / 1000
        self._source: WalSegments | None = None
        self._manifests: ManifestSource | None = None
        self._working = threading.Lock()
        """Held by the thread that ships."""
        self._tail: LogTail | None = None
        self._marks: deque[tuple[int, int]] = deque()
        """(time, place): every group before the place was written by then; those that are not shipped."""
        self._ends: deque[tuple[int, int]] = deque(maxlen=_SHIPPED_KEPT)
        """(number, end) of log objects that this opening has shipped."""
        self.manifest: Manifest | None = None
        """The newest."""
        self._manifest_bytes = 0
        """Bytes shipped since it was taken."""
        self._draft: Draft | None = None
        self._drafting: threading.Thread | None = None
        self._draft_error: Exception | None = None
        """Why the last draft was not made."""
        self._draft_at_s = 0.0
        """Before that no manifest is tried again, by `elapsed`."""
        self._manifest_s = 0.0
        """When the newest was put, or met, by `elapsed`."""
        self._begins_anew = False
        """True from a gap of the log to the next manifest."""
        self._gap_end = 0
        """The place behind the last gap of the log."""

        self._wake = threading.Condition()
        self._waiting_bytes = self._waiting_groups = 0
        self._appended_bytes = self._taken_bytes = 0
        """Bytes of groups that were appended since the store was opened, and of those of them that are shipped."""
        self._begin_place = 0
        self._reached = self._wanted = 0
        """All before the first place is in the copy; who waits for the copy wants all before the second."""
        self._waiting: list[tuple[int, threading.Lock]] = []
        """Who waits for the copy: until what place, and a lock that is released then."""
        self._crowd = 0
        """How many waited when the last put was stored, those included that it told."""
        self._gather_until_s = 0.0
        """Until then the next put waits for them to come again, by time.monotonic."""
        self._since_ms: int | None = None
        """When the first group came that is not shipped."""
        self._is_idle = False
        """True while the thread waits until a group comes: one that has just shipped looks again after `ship_ms`."""
        self._closing = self._draining = self._stopping = False
        """Set one after the other: no manifest is made; all is shipped; the thread ends."""
        self._drained = False
        """True once everything was in the copy when the log ended."""
        self.has_resigned = False
        """True once the copy says that this leader has given its lease up."""
        self._thread: threading.Thread | None = None

    # -- the life of an opening --------------------------------------------------------------------

    def begin(self, source: WalSegments, manifests: ManifestSource, *, background: bool) -> None:
        """Ship from now on, by a thread if `background`; else `step` does. Raises ReplicaRefused."""
        self._source, self._manifests = source, manifests
        self._begin_place = source.next_place()
        with self._working:
            try:
                if self.writer.lease_ms:
                    self._ship_all()
                else:
                    self._attach()
            except ReplicaRefused:
                self.ended = True
                raise
            except DuelogError as error:
                if self.writer.lease_ms:  # another may lead
                    self.ended = True
                    raise
                self._failed(error)  # without a lease the copy never keeps the store from being opened
        if background:
            self._thread = threading.Thread(target=self._run, name="duelog-replica", daemon=True)
            self._thread.start()

    def appended(self, group: RawGroup) -> None:
        """Hear of a group that was appended. For the leader of the WAL writer."""
        size, tail = group.size, self._tail
        if tail is not None:
            tail.heard(group)
        self._waiting_bytes += size
        self._waiting_groups += 1
        self._appended_bytes += size
        is_first = self._since_ms is None
        if is_first:
            self._since_ms = self._clock.now_ms()
        if (is_first and self._is_idle) or self._waiting_bytes >= self._ship_bytes > self._waiting_bytes - size:
            with self._wake:
                self._wake.notify_all()

    def wait_for(self, place: int) -> None:
        """Wait until every group before a place is in the copy. Raises NotReplicated: some are not, or not yet."""
        if self._thread is None:
            with suppress(DuelogError):
                self.step()
        told = threading.Lock()
        with self._wake:
            if self._reached >= place:
                return
            self._wanted = max(self._wanted, place)
            if self._thread is not None and not self.ended:
                told.acquire()
                self._waiting.append((place, told))
                if len(self._waiting) in (1, self._crowd):
                    self._wake.notify_all()
        told.acquire(timeout=self._timeout_s)
        if self._reached < place:
            with self._wake:
                self._waiting = [each for each in self._waiting if each[1] is not told]
            error = self.error
            reason = f"there is no answer after {self._timeout_s:g} s" if error is None else str(error)
            text = f"{reason}. It is stored here, and may come there yet"
            raise NotReplicated(self._bucket.url, text) from error

    def _tell(self, reached: int) -> None:
        """Wake who waits for no more than a place. REQUIRES: `_wake`."""
        waiting, self._waiting = self._waiting, []
        self._crowd = len(waiting)
        for place, told in waiting:
            if place <= reached:
                told.release()
            else:
                self._waiting.append((place, told))

    @property
    def is_far_behind(self) -> bool:
        """True where a standby could not tell, by passing over `ENTRIES` ids, what clients may have been told."""
        return self.writer.lease_ms > 0 and self._appended_bytes - self._taken_bytes > ENTRIES * _ENTRY_BYTES

    @property
    def leads(self) -> bool:
        """False where the lease may have passed."""
        return self.writer.leads

    @property
    def epoch(self) -> int:
        """In which this store leads."""
        return self.writer.epoch

    def check_leads(self) -> None:
        """Raise NotLeader where the lease may have passed."""
        if not self.leads:
            reason = "" if self.error is None else f": {self.error}"
            raise NotLeader(self._bucket.url, f"the lease was not renewed in time, so another may lead{reason}")

    def serve_at(self, address: str) -> None:
        """Have objects say from now on where clients find this store."""
        self.writer.owner = self.writer.owner._replace(address=address)
        with self._wake:
            self._address_is_new = True
            self._wake.notify_all()

    def renewed(self) -> None:
        """Note that the ids of this store are apart from those of the leaders before."""
        self._shipped = self._shipped._replace(new_line=False)
        self._shipped.write(self._path)
        self.is_new_line = False

    def drain(self) -> None:
        """Ship what there is, as nothing is appended any more; gives up after some seconds, or a failure."""
        if self._thread is None:
            with suppress(DuelogError):
                self.step()
            self._drained = self._is_shipped()
            return
        until = time.monotonic() + _DRAIN_S
        with self._wake:
            self._draining = True
            self._wake.notify_all()
            while not self._is_shipped() and not self.ended and self.error is None and time.monotonic() < until:
                self._wake.wait(0.05)
            self._drained = self._is_shipped()

    def stop_manifests(self) -> None:
        """Break off a manifest that is being made, or pruning, and wait: a draft holds the store's environments."""
        with self._wake:
            self._closing, drafting = True, self._drafting
        if drafting is not None:
            drafting.join()

    @property
    def closing(self) -> bool:
        """True once no manifest is made any more."""
        return self._closing

    def end(self) -> None:
        """End the thread. A second call does nothing."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self.writer.lease_ms and not self.ended and self._drained:
            with suppress(DuelogError, PutBefore):
                self._put(*self.writer.packed(self._clock.now_ms(), kind=RESIGNED))
                self.has_resigned = True
        with self._wake:
            self.ended = True
            self._tell(_ALL)
            self._wake.notify_all()
        if self._tail is not None:
            self._tail.close()

    def _is_shipped(self) -> bool:
        source, tail = self._source, self._tail
        return (
            source is not None
            and tail is not None
            and self.writer.pending is None
            and tail.place >= source.next_place()
        )

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        wait_ms: float | None
        while True:
            wait_ms, end = None, self.writer.end
            try:
                self.step()
                failures = 0
            except DuelogError:
                if self.ended:
                    return
                wait_ms = min(_RETRY_MS << min(failures, 8), _LONGEST_RETRY_MS)
                if self.writer.lease_ms:
                    wait_ms = min(wait_ms, self.writer.lease_ms / BEATS / 4)
                failures += 1
            except Exception as error:
                self._refused(ReplicaRefused(self._bucket.url, f"shipping has failed: {error!r}"), error)
                return
            with self._wake:
                self._wake.notify_all()
                if self._stopping:
                    return
                if wait_ms is not None:
                    self._wake.wait(wait_ms / 1000)
                    continue
                until = time.monotonic() + MANIFEST_MS / 1000
                if self.writer.lease_ms:
                    until = time.monotonic() + max(self._beat_at_s() - self.writer.elapsed(), 0)
                while not self._stopping and not self._draining and time.monotonic() < until:
                    if self._waiting_bytes >= self._ship_bytes or self._draft is not None:
                        break
                    if self._address_is_new:
                        break
                    if self._wanted > max(self._reached, 0 if self._tail is None else self._tail.place):
                        gather_s = self._gather_until_s - time.monotonic()
                        if len(self._waiting) >= self._crowd or gather_s <= 0:
                            break
                        self._wake.wait(gather_s)
                        continue
                    if not (self._closing or self._is_drafting) and self._manifest_is_due():
                        break
                    self._is_idle = (
                        self.writer.end == end
                    )  # before the look: a group that comes after it wakes this thread
                    if not self._is_idle or self._since_ms is not None:  # a clock that was set back waits no longer
                        due = time.monotonic() + self._ship_ms / 1000
                        until = min(until, due)
                    self._wake.wait(max(until - time.monotonic(), 0.001))
                self._is_idle = False
                if self._draining and self._is_shipped():
                    self._wake.wait_for(lambda: self._stopping)
                    return

    def step(self) -> None:
        """Ship all that is there, and begin, put and prune manifests if it is time.

        Raises ReplicaUnreachable, and ReplicaRefused, after which nothing is shipped any more.
        """
        with self._working:
            if self.ended or self._source is None:
                return
            try:
                with explained(self._path):
                    self._ship_all()
                    self._care_for_manifests()
            except ReplicaRefused as error:
                self._refused(error)
                raise
            except DuelogError as error:
                self._failed(error)
                raise
            if self.error is not None:
                _log.warning("%s: the log is shipped again", self._bucket.url)
            self.error = None

    def _ship_all(self) -> None:
        """Ship what there is, and renew the lease if it is time."""
        while True:
            try:
                if self._tail is None:
                    self._attach()
                self._ship()
                if self.writer.lease_ms and self.writer.elapsed() >= self._beat_at_s():
                    self._put(*self.writer.heartbeat(self._clock.now_ms()))
                return
            except PutBefore:
                self.writer.pending = None
                self._attach_again()
            except Exception:
                raise
            except BaseException:  # an interrupt: what was taken from the log may be in no object
                if self.writer.pending is None:
                    self._attach_again()
                raise

    def _attach_again(self) -> None:
        """Have the end of the log in the bucket be looked for once more, and the log be read on from there."""
        if self._tail is not None:
            self._tail.close()
        self._tail = None
        self._marks.clear()

    def _beat_at_s(self) -> float:
        return 0.0 if self._address_is_new else self.writer.beat_at_s

    def _failed(self, error: DuelogError) -> None:
        self.figures.failures += 1
        self.error = error
        self._log.log(logging.WARNING, "%s: nothing is shipped for now: %s", self._path, error)

    def _refused(self, error: DuelogError, cause: BaseException | None = None) -> None:
        self.figures.failures += 1
        self.error, self.ended = error, True
        _log.critical("%s: nothing is shipped any more: %s", self._path, error, exc_info=cause)
        if isinstance(error, Deposed):  # its log stays, for what was not shipped is to be set aside
            if self._source is not None:
                self._source.fail(error)
        else:
            self.kept.give_up()
        with self._wake:
            self._tell(_ALL)
            self._wake.notify_all()

    # -- where the log stands ----------------------------------------------------------------------

    def _attach(self) -> None:
        """Find the end of the log in the bucket, and begin there. Raises ReplicaRefused, ReplicaUnreachable."""
        source, bucket = self._the_source(), self._bucket
        self.writer.looked_s = self.writer.elapsed()
        shipped = self._shipped = claim(bucket, self._path, self._store_id, self._partition_ms)
        self._begins_anew |= shipped.gap
        self.manifest = self.manifest or newest_manifest(self._bucket)
        self._manifest_s = self.writer.elapsed()
        if self.manifest is not None:  # as old as it is by the clocks of machines, but not yet to come
            self._manifest_s -= min(max(self._clock.now_ms() - self.manifest.taken_ms, 0), MANIFEST_MS) / 1000
            self.writer.refuse_deposed(self.manifest.epoch, f"the manifest at {self.manifest.seq}")
        manifested = 0 if self.manifest is None else self.manifest.seq
        numbers = bucket.span(manifested)
        self.writer.seq = numbers[-1] if numbers else manifested
        start, owner = None, ""
        if numbers:
            ends = max(source.next_place(), place_of(source.oldest_segment(), 0))
            start, owner = self._go_on_after(numbers[-1], shipped, ends)
        before = shipped.owners[shipped.owners.index(owner) if owner else 0 :]
        owners = dict.fromkeys((*before[:1], *before[1:][-_LATE_OPENINGS:], self.writer.owner.opening))
        self.writer.owners = tuple(owners)
        self._shipped = shipped._replace(owners=self.writer.owners, inode=inode_of(self._path))
        self._shipped.write(self._path)
        try:
            if start is None:
                raise LogLost("nothing of it was shipped")
            self._tail = LogTail(self._path, self._store_id, start)
        except LogLost as lost:
            self._begin_anew(lost)
        else:
            self.kept.passed(start >> 32)
            self._is_reached()
        self._note_waiting()

    def _go_on_after(self, seq: int, shipped: Shipped, next_place: int) -> tuple[int, str]:
        """Look at the last object of the log; the place from which on this store's groups follow it, and its owner."""
        last = read_object(self._bucket, seq)
        if last.maker.opening not in shipped.owners:
            if shipped.owners:
                self.writer.refuse_deposed(last.epoch, log_name(seq))
            raise ForkFound(
                self._bucket.url,
                f"{log_name(seq)} was shipped from elsewhere: another directory is open as this store, or was. "
                "`duelog replica init` gives this one a new prefix",
            )
        if last.end > next_place:
            raise ForkFound(
                self._bucket.url,
                f"{log_name(seq)} has groups up to {last.end}, the log in {self._path} ends at {next_place}: this "
                "directory is older than its copy. Restore the copy, or give this one a new prefix",
            )
        if shipped.inode not in (0, inode_of(self._path)) and last.kind != RESIGNED:
            self._refuse_copy(last)
        self.writer.go_on_after(last)
        return last.end, last.maker.opening

    def _refuse_copy(self, last: LogObject) -> None:
        """Raise ForkFound in a copy of a directory that leads: wait for the lease to pass, and see whether it does."""
        lease_s = last.maker.lease_ms / 1000
        if lease_s:
            _log.warning("%s is a copy: for %g s it is seen whether the original leads", self._path, lease_s)
        until_s = self.writer.elapsed() + lease_s
        while self.writer.elapsed() < until_s:
            found = find_object(self._bucket, last.seq + 1)
            if found is not None:
                self.writer.refuse_deposed(found.epoch, log_name(found.seq))
                raise ForkFound(
                    self._bucket.url,
                    f"{log_name(found.seq)} was shipped from elsewhere: {self._path} is a copy, and the original leads "
                    f"at {found.maker.address or 'an address that is not known'}",
                )
            with self._wake:
                self._wake.wait(min(max(lease_s / 20, 0.05), 0.5))

    def _begin_anew(self, lost: LogLost) -> None:
        """Go on from the oldest segment that is there, and begin with a manifest."""
        source = self._the_source()
        if self.writer.seq:
            _log.warning("%s: the copy goes on with a new manifest: %s", self._path, lost)
        self._note_gap(is_there=True)  # before anything behind it is shipped
        oldest = source.oldest_segment()
        self.kept.passed(oldest)
        if self._tail is not None:
            self._tail.close()
        self._tail = LogTail(self._path, self._store_id, place_of(oldest, 0))
        self.writer.end = self._gap_end = place_of(oldest, 0)
        self._begins_anew, self._draft = True, None
        self._marks.clear()

    def _note_gap(self, *, is_there: bool) -> None:
        """Have the next opening know whether the copy needs a manifest behind a gap of the log."""
        if self._shipped.gap != is_there:
            shipped = self._shipped._replace(gap=is_there)
            shipped.write(self._path)
            self._shipped = shipped

    def _the_source(self) -> WalSegments:
        if self._source is None:
            raise ReplicaRefused(self._bucket.url, "shipping was not begun")
        return self._source

    # -- the log -----------------------------------------------------------------------------------

    def _ship(self) -> None:
        source, writer = self._the_source(), self.writer
        end = writer.end
        self._mark(source)
        while writer.pending is not None or (self._marks and not self._stopping):
            if writer.pending is None:
                writer.pending = self._next_object()
            if writer.pending is not None:
                self._put(*writer.pending)
            self._is_reached()  # also behind the end of a segment, for which there is no object
        if self._tail is not None and writer.pending is None and (writer.end == end or writer.end >> 32 != end >> 32):
            self.kept.passed_bodies(self._tail.place, source.next_place)  # now and then: it looks at each of them
        self._note_waiting()

    def _is_reached(self) -> None:
        """Tell who waits for the copy how far it has come.

        Behind a gap of the log, and at its beginning, nothing can be restored before there is a manifest.
        """
        tail, may_be_restored = self._tail, self.manifest is not None and not self._begins_anew
        if tail is not None and self.writer.pending is None and may_be_restored:
            with self._wake:
                self._reached = tail.place
                self._tell(self._reached)

    def _mark(self, source: WalSegments) -> None:
        """Note up to where the log is written by now."""
        now_ms, place = self._clock.now_ms(), source.next_place()
        last = self._marks[-1][1] if self._marks else self._tail.place if self._tail is not None else 0
        if place > last:
            source.flush()
            self._marks.append((now_ms, place))
            if len(self._marks) > _SHIPPED_KEPT:
                self._marks.popleft()

    def _next_object(self) -> tuple[LogObject, Parts] | None:
        """Make the next object of the log; None: there are no groups up to the first mark."""
        tail = self._tail
        if tail is None:
            return None
        time_ms, until = self._marks[0]
        try:
            if self.kept.lost:
                self._gap_end = 0
                raise LogLost("it took more than replica_keep_bytes while it could not be shipped")
            groups = tail.take(until, self._ship_bytes)
        except LogLost as lost:
            gap_end = self._gap_end
            self._begin_anew(lost)
            if self._gap_end == gap_end:  # the oldest segment cannot be read either
                raise DamagedStore(self._path / DIRECTORY, str(lost)) from lost
            self._mark(self._the_source())
            return None
        if tail.place >= until:
            self._marks.popleft()
        if not groups:
            return None
        return self.writer.packed(time_ms, end=groups[-1].position + 1, raw=groups)

    def _put(self, made: LogObject, content: Parts) -> None:
        """Have an object be stored, or raise as `LogWriter.put`."""
        begun = time.perf_counter()
        if not self.writer.put(made, content):
            self.figures.failures += 1
        took_s = time.perf_counter() - begun
        self._gather_until_s = time.monotonic() + took_s * _GATHER
        self._address_is_new = made.owner != str(self.writer.owner)
        self.figures.puts += 1
        size = sum(map(len, content))
        self.figures.bytes += size
        self.figures.seconds += took_s
        self._manifest_bytes += size
        if made.begin >= self._begin_place:
            self._taken_bytes += size - len(content[0])
        self._ends.append((made.seq, made.end))
        self.kept.passed(made.end >> 32)  # the last one shipped stays: the next opening goes on in it

    def _note_waiting(self) -> None:
        with self._wake:
            self._waiting_bytes = self._waiting_groups = 0
            self._since_ms = None  # before the look: a group that comes after it says so by itself
            if not self._is_shipped():
                self._since_ms = self._clock.now_ms()

    # -- manifests ---------------------------------------------------------------------------------

    def _care_for_manifests(self) -> None:
        self._put_draft()
        if self._closing or self._draft is not None or not self._manifest_is_due():
            return
        if self._thread is None:
            self._make_draft()
            self._ship()
            self._put_draft()
        elif not self._is_drafting:
            self._beside(self._make_draft)

    def _beside(self, work: Callable[[], None]) -> None:
        """Do a work on manifests in a thread of its own, where there are threads. REQUIRES: no other is under way."""
        if self._thread is None:
            work()
            return
        drafting = threading.Thread(target=work, name="duelog-manifest", daemon=True)
        with self._wake:  # `stop_manifests` finds it running, or it is not begun
            if not self._closing:
                drafting.start()
                self._drafting = drafting

    def _put_draft(self) -> None:
        """Put the manifest whose files are in the bucket, once the log that they rely on is, too."""
        draft = self._draft
        if draft is not None and self._is_before_gap(draft):
            draft = self._draft = None
        if draft is not None and self._tail is not None and self._tail.place >= draft.manifest.next_place:
            self._put_manifest(draft)

    def _is_before_gap(self, draft: Draft) -> bool:
        """Return whether a restore from a manifest would need groups that were never shipped."""
        manifest = draft.manifest
        if manifest.oldest is None:  # nothing was in the log
            return False
        return (place_of(manifest.oldest, 0) if draft.needs_groups else manifest.next_place) < self._gap_end

    def _manifest_is_due(self) -> bool:
        if self.writer.elapsed() < self._draft_at_s:
            return False
        if self.manifest is None or self._begins_anew or self._manifest_bytes >= MANIFEST_BYTES:
            return True
        age_ms = max(self._clock.now_ms() - self.manifest.taken_ms, 1000 * (self.writer.elapsed() - self._manifest_s))
        is_old = age_ms >= MANIFEST_MS  # by the store's clock, or though that went back
        return is_old and self.writer.seq > self.manifest.seq

    def make_manifest(self) -> None:
        """Have the next step make a manifest, whether it is time or not."""
        self._manifest_bytes = MANIFEST_BYTES
        self._draft_error, self._draft_at_s = None, 0.0

    def save_manifest(self) -> Manifest:
        """Make a manifest as of now, and return it once it is in the copy.

        Raises ReplicaUnreachable, ReplicaRefused, StoreBusy, StoreFull, ClosedError.
        """
        asked_ms = self._clock.now_ms()
        self.make_manifest()
        if self._thread is None:
            self.step()
        with self._wake:
            while self.manifest is None or self.manifest.taken_ms < asked_ms or self._manifest_bytes >= MANIFEST_BYTES:
                error = self._draft_error or self.error
                if error is not None:
                    raise error
                if self._closing or self._thread is None:
                    raise ClosedError(f"store {self._path}")
                if not self._is_drafting:
                    self._manifest_bytes = MANIFEST_BYTES  # one that was under way has been put meanwhile
                self._wake.notify_all()
                self._wake.wait(_RETRY_MS / 1000)
        return self.manifest

    @property
    def _is_drafting(self) -> bool:
        return self._drafting is not None and self._drafting.is_alive()

    def _make_draft(self) -> None:
        """Copy files for a manifest."""
        try:
            if self._manifests is not None:
                self._draft = self._manifests.draft(self.manifest)
        except Exception as error:
            self._draft_at_s = self.writer.elapsed() + _LONGEST_RETRY_MS / 1000
            self.figures.failures += 1
            self._draft_error = error
            self._log.log(logging.ERROR, "%s: no manifest is made for now: %s", self._path, error)
        with self._wake:
            self._wake.notify_all()

    def _put_manifest(self, draft: Draft) -> None:
        begins = place_of(draft.manifest.oldest or 0, 0) if draft.needs_groups else draft.manifest.next_place
        first = self._first_from(begins)  # some objects may have been put since the instant
        manifest = draft.manifest._replace(seq=self.writer.seq, first=first)
        self._bucket.put(manifest_name(self.writer.seq), manifest.pack())
        self.manifest, self._draft, self._begins_anew = manifest, None, False
        self._note_gap(is_there=False)
        self._manifest_bytes, self._manifest_s = 0, self.writer.elapsed()
        self.figures.manifests += 1
        self._is_reached()
        if self._drafting is not None:
            self._drafting.join()  # it has made the draft, and is about to end
        self._beside(self._prune)

    def _prune(self) -> None:
        """Remove what no restore needs. The listings may take longer than the lease, or than callers wait."""
        try:
            if self._manifests is not None and self.manifest is not None:
                self._manifests.prune(self.manifest, self._clock.now_ms())
        except Exception as error:  # it is done with the next manifest
            if not self._closing:
                self.figures.failures += 1
                self._log.log(logging.ERROR, "%s: nothing is pruned for now: %s", self._path, error)
        with self._wake:
            self._wake.notify_all()

    def _first_from(self, place: int) -> int:
        """The first log object that has groups from a place on; the next one where none has."""
        own = [seq for seq, end in self._ends if end > place]
        seq = own[0] if own else self.writer.seq + 1
        if self._ends and seq > self._ends[0][0]:
            return seq
        while seq > 1 and (before := find_object(self._bucket, seq - 1)) is not None and before.end > place:
            seq -= 1  # put by an opening before
        return seq

    # -- figures -----------------------------------------------------------------------------------

    def state(self) -> ShippingState:
        """Where shipping stands now."""
        figures, since_ms = self.figures, self._since_ms
        error = None if self.error is None else str(self.error)
        return ShippingState(
            self._bucket.url,
            0 if since_ms is None else max(self._clock.now_ms() - since_ms, 1),
            self._waiting_bytes,
            self._waiting_groups,
            error,
            error is not None and self.ended,
            self.writer.seq,
            self.writer.end,
            None if self.manifest is None else self.manifest.taken_ms,
            self.kept.bytes,
            figures.puts,
            figures.failures,
            figures.bytes,
            figures.manifests,
            figures.seconds,
            self.writer.epoch,
            self.leads and not isinstance(self.error, Deposed),
        )


def open_shipping(path: Path, store_id: bytes, config: StoreConfig, clock: Clock) -> Shipping:
    """Prepare the shipping of a store with `replica`. Raises InvalidArgument, ReplicaRefused."""
    return Shipping(path, store_id, config, clock, Bucket(config.replica or "").for_lease(config.lease_ms))
