"""Recovery: the lock, the identity and the remains of a crash, before a store is put to use.

Afterwards the disk is as after a clean close: half-done deletions and half-made partitions are gone, and every message
that was in the write-ahead log is in its partition.

Replay puts the unapplied rows of the write-ahead log into the memtables, and sending goes on behind them.

A row whose group the environment has applied (memtable.APPLIED_KEY) is passed over. The runs that are left follow the
applied ones without a gap; else entries were lost, and the store is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from duelog.cleanup.sweep import sweep
from duelog.delivery.delivery_log import recount
from duelog.partitions.followed_set import FollowedPartitionSet
from duelog.partitions.partition_set import PartitionSet, Storage
from duelog.store.clock import Clock, StoreClock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState
from duelog.store.codec.run import RunLimits
from duelog.store.config import StoreConfig
from duelog.store.env.claims import Claims
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable, Reads, applied_position
from duelog.store.errors import CorruptEntry, DamagedStore
from duelog.store.files.directory import make_directory
from duelog.store.files.system_errors import explained
from duelog.store.listener import Listeners
from duelog.store.log import catalog
from duelog.store.log.ledger import last_applied_run
from duelog.store.wal.environment_rows import EnvironmentRows, LedgerRows, rows_by_environment
from duelog.store.wal.followed_wal import FollowedWal
from duelog.store.wal.segment import MAIN, Group
from duelog.store.wal.wal_reader import DIRECTORY, WalContent, flush_wal, read_wal
from duelog.store.wal.write_batch import add_row

from .opening import (
    StoreLock,
    create,
    open_main,
    read_identity,
    refuse_foreign,
    refuse_lost_entries,
)


@dataclass(frozen=True, slots=True)
class Recovered:
    """An opened store, and the state that only opening knows.

    lock: held while this process writes; None: read-only. clock: never behind what has fired.
    wal: the content of the write-ahead log; its unapplied rows are in the memtables. memtable: that of the main
    environment.
    """

    storage: Storage
    lock: StoreLock | None
    clock: StoreClock
    memtable: Memtable
    claims: Claims
    run_limits: RunLimits
    wal: WalContent


def recover(path: Path, config: StoreConfig, clock: Clock, undo: ExitStack, *, read_only: bool) -> Recovered:
    """Open or make the store in `path`, and finish what a crash interrupted; `undo` closes it again.

    Read-only, nothing is changed: another process may be writing. Raises the errors of DelayedStore.open, and
    CorruptRecord.
    """
    refuse_foreign(path)
    lock = None
    if not read_only:
        make_directory(path)
        lock = StoreLock(path)
        undo.callback(lock.release)
        lock.take()
    is_new = not read_only and not (path / "STORE").exists()
    identity = create(path, config) if is_new else read_identity(path, config)
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
        wal = replay_wal(path, identity.store_id, main, memtable, partitions)
        refuse_lost_entries(main, partitions)
    mark = main.get(fmt.counter_key(catalog.CLOCK))  # the log may hold it
    store_clock = StoreClock(clock, 0 if mark is None else fmt.unpack_u64(mark))
    if not read_only:
        recount(path, identity.store_id, main, store_clock.now_ms())
    storage = Storage(path, identity.store_id, config, read_only, main, partitions, listeners)
    return Recovered(storage, lock, store_clock, memtable, claims, limits, wal)


def replay_wal(
    path: Path, store_id: bytes, main: Environment, memtable: Memtable, partitions: PartitionSet
) -> WalContent:
    """Put the rows that a crash left into the memtables, and return the content of the log.

    Raises DamagedStore where a segment, a group or entries before it are missing; FormatMismatch.
    """
    content = read_wal(path, store_id, catalog.oldest_segment(main))
    with explained(path):
        flush_wal(path, content)
    fill_memtables(path, content.groups, main, memtable, partitions)
    return content


def fill_memtables(
    path: Path, groups: Iterable[Group], main: Environment, memtable: Memtable, partitions: PartitionSet
) -> None:
    """Put the rows of groups that are not applied into the memtables of a store that nothing reads yet.

    What is of a partition that has closed, or is gone, was applied. Raises DamagedStore.
    """
    for start_ms, rows in rows_by_environment(groups).items():
        if start_ms == MAIN:
            with main.read() as raw:
                _fill(path, main.name, raw, memtable, rows)
            continue
        partition = partitions.get(start_ms)
        if partition is not None and partition.state is PartitionState.OPEN:
            with partitions.glance(partition) as raw:
                _fill(path, partition.name, raw, partition.memtable, rows)


def _fill(path: Path, name: str, raw: Reads, memtable: Memtable, rows: EnvironmentRows) -> None:
    """`raw` reads what is applied of an environment."""
    unapplied = rows.after(applied_position(raw))
    if not unapplied:
        return
    for _, row in unapplied.others:
        add_row(memtable, row)
    for ledger in unapplied.ledgers():
        _refuse_gap(path, name, raw, ledger)
        memtable.view.runs[ledger.ledger_id] = ledger.rows
    memtable.position = unapplied.last


def _refuse_gap(path: Path, name: str, raw: Reads, ledger: LedgerRows) -> None:
    """Raise DamagedStore where the unapplied runs of a ledger do not follow its applied runs."""
    ledger_id = ledger.ledger_id
    try:
        run = last_applied_run(raw, name, ledger_id)
    except CorruptEntry as error:
        raise DamagedStore(
            path / DIRECTORY,
            f"holds entry {ledger.firsts[0]} of ledger {ledger_id} in {name}, whose last run, from entry "
            f"{error.entry_id} on, cannot be read",
        ) from error
    gap = ledger.gap(0 if run is None else run.limit)
    if gap is not None:
        raise DamagedStore(
            path / DIRECTORY,
            f"holds entry {gap[0]} of ledger {ledger_id} in {name}, which ends at entry {gap[1]}: entries were lost",
        )
