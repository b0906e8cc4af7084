"""The end of a copy's log, where one opening of a store puts objects, one in flight, and holds its lease by them.

A number belongs to whoever creates it. An object that got no answer is read back: it is there, or it is put again, the
same bytes. Another's bytes under the number are a fence (a higher epoch: Deposed), a put of another opening of this
directory (`PutBefore`), or a fork.

A put that ends later than the lease after the success before it counts after a look only, since its number may have
been taken, read, and pruned meanwhile. The lease counts from the first try of what was stored: a standby may have seen
that one.

Who puts what, and when, is not known here: a store that is open ships its log (`shipping.py`), and one that is being
made, or opened, by a standby that has put a fence has nothing but heartbeats (`following.py`).
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duelog.store.errors import Deposed, ForkFound, ReplicaDamaged, ReplicaUnreachable

from .bucket import AlreadyThere, Bucket, log_name
from .log_object import HEARTBEAT, LogObject, Owner, Parts, crc_of, find_object, unpack
from .manifest import Manifest, read_manifest

_log = logging.getLogger("duelog.replica")

BEATS = 3
"""Objects that are put in a lease, at the least."""

_LEADS = 0.8
"""The part of a lease, after its last success, in which a leader goes on."""

_LOOK_MS = 60_000
"""Without a lease: a put that ends so long after the success before it counts after a look only."""


class PutBefore(Exception):
    """The number was taken by a put of another opening of this directory, which came late."""


class LogWriter:
    """Puts objects at the end of a log. For one thread at a time, but `leads`.

    owner: who puts them. epoch: in which it leads. owners: the openings of this directory, this one's too. pending: the
    object that is put next, or again; its bytes never change. succeeded_s, looked_s: when the last object that is
    stored was first tried, and the end of the log last looked for, by `elapsed`.
    """

    def __init__(
        self, path: Path, store_id: bytes, bucket: Bucket, owner: Owner, epoch: int, elapsed: Callable[[], float]
    ) -> None:
        """`path`: of the store. elapsed: a clock in seconds that never goes back, also while the machine sleeps."""
        self._path = path
        self._store_id = store_id
        self._bucket = bucket
        self.owner = owner
        self.owners: tuple[str, ...] = ()
        self.epoch = epoch
        self.elapsed = elapsed
        self.seq = self.end = self._crc = 0
        self.pending: tuple[LogObject, Parts] | None = None
        self.succeeded_s = self.looked_s = 0.0
        self._tried: LogObject | None = None
        self._tried_s = 0.0
        """The last object that was tried, and is not known to be stored, and when first."""
        self._tries = 0
        """How often it was tried in vain."""

    def go_on_after(self, last: LogObject) -> None:
        """Put the next object behind one that was read."""
        self.seq, self.end, self._crc, self.epoch = last.seq, last.end, last.crc, last.epoch

    def packed(self, time_ms: int, **fields: Any) -> tuple[LogObject, Parts]:
        """The next object of the log, with its bytes."""
        made = LogObject(
            self._store_id,
            self.epoch,
            self.seq + 1,
            self.end,
            fields.pop("end", self.end),
            time_ms,
            self._crc,
            str(self.owner),
            **fields,
        )
        return made, made.pack()

    # -- the lease ---------------------------------------------------------------------------------

    @property
    def lease_ms(self) -> int:
        """0: there is no lease."""
        return self.owner.lease_ms

    @property
    def leads(self) -> bool:
        """False where the lease may have passed."""
        return not self.lease_ms or self.elapsed() <= self.succeeded_s + _LEADS * self.lease_ms / 1000

    @property
    def beat_at_s(self) -> float:
        """When the lease is to be renewed, by `elapsed`."""
        return self.succeeded_s + self.lease_ms / BEATS / 1000

    def heartbeat(self, time_ms: int) -> tuple[LogObject, Parts]:
        """The object that is pending: a heartbeat, where nothing was."""
        if self.pending is None:
            self.pending = self.packed(time_ms, kind=HEARTBEAT)
        return self.pending

    def refuse_deposed(self, epoch: int, what: str) -> None:
        """Raise Deposed for what was made in a higher epoch."""
        if epoch > self.epoch:
            raise Deposed(
                self._bucket.url,
                f"{what} is of epoch {epoch}, this store led in epoch {self.epoch}: another machine has taken over. "
                "`duelog serve --standby` sets aside what was not shipped, and follows",
            )

    # -- putting -----------------------------------------------------------------------------------

    def put(self, made: LogObject, content: Parts) -> bool:
        """Have an object be stored, or raise with it pending; False: it was stored, and its answer lost.

        Raises ReplicaUnreachable: try again. Deposed, ForkFound, PutBefore, ReplicaDamaged.
        """
        is_answered = True
        if self._tried is not made:
            self._tried, self._tried_s, self._tries = made, self.elapsed(), 0
        try:
            self._bucket.append(made.seq, content, self._tries)
        except AlreadyThere:
            if not self._read_back(made, content):  # S3 says so (409) where another creation was under way, and failed
                raise ReplicaUnreachable(
                    self._bucket.url, f"{log_name(made.seq)} was refused, and is not there"
                ) from None
        except ReplicaUnreachable:
            self._tries += 1
            if not self._read_back(made, content):
                raise
            is_answered = False
        before_s = max(self.succeeded_s, self.looked_s)
        if self.elapsed() > before_s + (self.lease_ms or _LOOK_MS) / 1000:
            self._look(made.seq)
        self.succeeded_s = self._tried_s
        self.seq, self.end, self._crc, self.pending = made.seq, made.end, crc_of(content[0]), None
        self._tried = None  # it has the maps of its bodies, and they their files
        return is_answered

    def _read_back(self, made: LogObject, content: Parts) -> bool:
        """Return whether an object in doubt is stored. Raises as `put`."""
        stored = self._bucket.read(made.seq)
        if stored is None:
            return False
        if stored == b"".join(content):
            return True
        other, _ = unpack(self._bucket.url, log_name(made.seq), stored)
        self.refuse_deposed(other.epoch, log_name(made.seq))
        if other.maker.opening in self.owners and other.maker.opening != self.owner.opening:
            raise PutBefore
        raise ForkFound(
            self._bucket.url,
            f"{log_name(made.seq)} was created by another writer: this store is open as {self._path} and elsewhere",
        )

    def _look(self, seq: int) -> None:
        """See that no other has led since. Raises Deposed, ReplicaUnreachable."""
        numbers = self._bucket.span(seq)
        found = find_object(self._bucket, numbers[-1]) if numbers else None
        if found is not None:
            self.refuse_deposed(found.epoch, log_name(found.seq))
        newest = newest_manifest(self._bucket)
        if newest is not None:
            self.refuse_deposed(newest.epoch, f"the manifest at {newest.seq}")


def newest_manifest(bucket: Bucket) -> Manifest | None:
    """The newest manifest that is whole; None: there is none. Raises ReplicaUnreachable."""
    for seq in reversed(bucket.manifests()):
        try:
            return read_manifest(bucket, seq)
        except ReplicaDamaged as error:
            _log.error("%s", error)
    return None
