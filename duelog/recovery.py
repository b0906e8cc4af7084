"""What opening does before a store is put to use: the lock, the identity, and what a crash left behind.

Afterwards the disk is as after a clean close: half-done deletions and half-made partitions are gone, and every message
that was in the write-ahead log is in its partition.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from duelog.attempts.delivery_log import recount
from duelog.cleanup.older_replay import replay_older_wal
from duelog.cleanup.sweep import sweep
from duelog.partitions.followed_set import FollowedPartitionSet
from duelog.partitions.partition_set import PartitionSet
from duelog.store.clock import Clock, StoreClock
from duelog.store.codec import format as fmt
from duelog.store.codec.run import RunLimits
from duelog.store.config import StoreConfig
from duelog.store.env.claims import Claims
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable
from duelog.store.files.directory import make_directory
from duelog.store.listener import Listeners
from duelog.store.log import catalog
from duelog.store.wal.followed_wal import FollowedWal
from duelog.store.wal.segment import MAIN
from duelog.store.wal.wal_reader import WalContent

from .opening import (
    Identity,
    StoreLock,
    create,
    open_main,
    raise_version,
    read_identity,
    refuse_foreign,
    refuse_lost_entries,
)
from .sending.wal_replay import replay_wal


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found in a store's directory, and is open.

    lock: held while this process writes; None: read-only. clock: never behind what has fired.
    wal: what the write-ahead log holds, in the memtables where it is not applied; `memtable` is that of `main`.
    listeners: those of `main` and `partitions`.
    """

    path: Path
    identity: Identity
    lock: StoreLock | None
    main: Environment
    memtable: Memtable
    partitions: PartitionSet
    claims: Claims
    clock: StoreClock
    run_limits: RunLimits
    wal: WalContent
    listeners: Listeners

    @property
    def read_only(self) -> bool:
        return self.lock is None


def recover(path: Path, config: StoreConfig, clock: Clock, undo: ExitStack, *, read_only: bool) -> Recovered:
    """Open the store in `path`, or make one, and bring it to where a crash cannot be told; `undo` closes it again.

    Read-only, nothing is changed: another process may be writing. Raises the errors of DelayedStore.open, and
    CorruptRecord.
    """
    refuse_foreign(path)
    lock = None
    if not read_only:
        make_directory(path)
        lock = StoreLock(path)
        undo.callback(lock.release)
    is_new = not read_only and not (path / "STORE").exists()
    identity = create(path, config) if is_new else read_identity(path, config)
    if not read_only:
        raise_version(path, identity)
    listeners: Listeners = []
    claims, limits = Claims(), RunLimits(config.run_entries, config.run_bytes)
    memtable = Memtable(claims, limits)
    followed = FollowedWal(path, identity.store_id) if read_only else None
    follow = None if followed is None else followed.of(MAIN)
    main = open_main(path, config, identity, listeners, memtable, follow, read_only=read_only)
    undo.callback(main.close)
    partitions = (
        PartitionSet(path, main, config, identity.store_id, claims, listeners=listeners)
        if followed is None
        else FollowedPartitionSet(path, main, config, identity.store_id, followed)
    )
    undo.callback(partitions.close)
    partitions.load()  # before anything is swept: what it refuses is left as it is
    wal = WalContent([], 0, None, 1, {})
    if not read_only:
        sweep(path, main)
        replay_older_wal(path, identity.store_id, partitions, limits)
        wal = replay_wal(path, identity.store_id, main, memtable, partitions)
        refuse_lost_entries(main, partitions)
    mark = main.get(fmt.counter_key(catalog.CLOCK))  # the log may hold it
    store_clock = StoreClock(clock, 0 if mark is None else fmt.unpack_u64(mark))
    if not read_only:
        recount(path, identity.store_id, main, store_clock.now_ms())
    return Recovered(path, identity, lock, main, memtable, partitions, claims, store_clock, limits, wal, listeners)
