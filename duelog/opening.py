"""Making a store, opening one, and the lock that keeps a second writer out.

A new store is complete once its STORE file is there, which is written last: a directory without it holds
nothing that was acknowledged, and is made again if it holds nothing else either.

Recovery: afterwards the disk is as after a clean close: half-done deletions and half-made partitions are gone, and
every message that was in the write-ahead log is in its partition. Replay puts the unapplied rows of the log into the
memtables, and sending goes on behind them. A row whose group the environment has applied (memtable.APPLIED_KEY) is
passed over. The runs that are left follow the applied ones without a gap; else entries were lost, and the store is
refused.
"""

import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from duelog.cleanup.sweep import sweep
from duelog.delivery.delivery_log import recount
from duelog.partitions.followed_set import FollowedPartitionSet
from duelog.partitions.partition_set import PartitionSet, Storage
from duelog.store.clock import Clock, StoreClock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionInfo, PartitionState
from duelog.store.codec.run import RunLimits
from duelog.store.codec.sealed_json import pack_json, unpack_json
from duelog.store.config import StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Follow, Memtable, Publication, Reads, applied_position, refuse_ahead
from duelog.store.env.transaction import Transaction
from duelog.store.errors import (
    AlreadyOpen,
    ClosedError,
    CorruptEntry,
    DamagedStore,
    FormatMismatch,
    InvalidArgument,
    StoreLocked,
)
from duelog.store.files import pages
from duelog.store.files.directory import make_directory, move, remove_tree, write_file
from duelog.store.files.process import here
from duelog.store.files.system_errors import explained
from duelog.store.listener import Listeners, StoreListener
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail, last_applied_run
from duelog.store.policy import policy_records
from duelog.store.policy.policies import of_config
from duelog.store.wal.environment_rows import EnvironmentRows, LedgerRows, rows_by_environment
from duelog.store.wal.followed_wal import FollowedWal
from duelog.store.wal.segment import MAIN
from duelog.store.wal.wal_reader import DIRECTORY, WalContent, flush_wal, read_wal
from duelog.store.wal.write_batch import add_row, registered_by

STORE_VERSION = 2
"""Version of a store as a whole; a store of another version is refused."""

MARK = "RESTORING"
"""File in a directory that is being made, locked meanwhile by the process that makes it (flock)."""

_NAMED_WITHIN_S = 1.0
"""How long a process that has taken LOCK may take to say in it that it has."""

_ADDRESS = re.compile(r"/(?:https?|duelog(?:\+ssl)?|pulsar|s3|gs|az|file):/")
"""In an absolute path, which has one slash of the two."""

_OWN_NAMES = {"CONTROL", "LOCK", "STORE.tmp", "attempts", "main", "partitions", "staging", "trash", "wal"}


class Identity(NamedTuple):
    """The content of the STORE file: written once, checked at every open."""

    store_id: bytes
    partition_ms: int


class _Held:
    """The locks that are held by this process, or by the one that it was forked from, by number, device and inode.

    They are kept open here: the lock of a store that a program forgot to close goes with the process, not before.
    """

    lock = threading.Lock()
    files: ClassVar[dict[tuple[int, int, int], FileIO]] = {}


class _Holder(NamedTuple):
    """A process that has LOCK: its number, when it began (ticks since the host did), and its parent's number."""

    pid: int
    began: int
    parent: int
    host: str

    @classmethod
    def here(cls) -> Self:
        return cls(os.getpid(), _began(os.getpid()), os.getppid(), socket.gethostname())


def _began(pid: int) -> int:
    """When a process began, which no other of its number did; 0: it is not there, or not to be seen from here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _locked(path: Path, said: bytes) -> StoreLocked:
    """The error that names the process that LOCK names, unless that is gone: the one that has it is about to say so."""
    try:
        holder = _Holder(**json.loads(said))
    except (ValueError, TypeError):
        return StoreLocked(path)
    if holder.host != socket.gethostname():
        return StoreLocked(path, holder.pid, holder.host, f"process {holder.pid} on host {holder.host}")
    if holder.began != _began(holder.pid):
        return StoreLocked(path)
    command, shown = _command(holder.pid), f"process {holder.pid}"
    if holder.parent == os.getppid() and _is_worker():
        shown += (
            ", a worker of this same program: one process opens a store, so run one worker "
            "(gunicorn -w 1 --threads 16, uvicorn --workers 1), or `duelog serve` for several (docs/recipes.md)"
        )
    elif command:
        shown += f" ({command})"
    return StoreLocked(path, holder.pid, holder.host, shown)


def _command(pid: int) -> str:
    """The command line of a process, in one line; "": it cannot be seen."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(words)[:200])


def _is_worker() -> bool:
    """Return whether this process is one of several workers of one program, by multiprocessing or a fork.

    A fork has the command of its parent, or a title that begins alike: "gunicorn: worker", "gunicorn: master".
    """
    from multiprocessing import parent_process  # noqa: PLC0415 - only where a store is refused

    titles = {_command(pid).partition(": ")[0] for pid in (os.getpid(), os.getppid())}
    return parent_process() is not None or len(titles) == 1


class StoreLock:
    """The exclusive lock on LOCK, held while a process writes. flock: LMDB's own locks are fcntl's.

    The file says who holds it, as that process knows itself, since flock does not, and /proc/locks knows no process of
    another container.
    """

    def __init__(self, path: Path) -> None:
        """Prepare the lock of a store in `path`; `take` takes it, so that whoever is interrupted can give it back."""
        self._path = path
        self._held = os.fdopen(os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)
        status = os.fstat(self._held.fileno())
        self._file = here.pid, status.st_dev, status.st_ino

    def take(self) -> None:
        """Take it. Raises StoreLocked, AlreadyOpen where this process holds it, whatever the path to it."""
        holder = json.dumps(_Holder.here()._asdict()).encode() + b"\n"
        with _Held.lock:
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._refusal() from None
            _Held.files[self._file] = self._held
        with suppress(OSError):  # a full disk keeps no store from being opened
            os.write(self._held.fileno(), holder)
            os.ftruncate(self._held.fileno(), len(holder))

    def _refusal(self) -> StoreLocked:
        """Why it cannot be taken. A process that has just taken it is about to say that it has."""
        with self._held as held:
            if self._file in _Held.files:
                return AlreadyOpen(self._path)
            until = time.monotonic() + _NAMED_WITHIN_S
            error = _locked(self._path, held.read())
            while error.pid is None and time.monotonic() < until:
                time.sleep(0.01)
                held.seek(0)
                error = _locked(self._path, held.read())
            return error

    def release(self) -> None:
        """Give it back; a second call, also after one that was interrupted, does what is left."""
        if not self._held.closed:
            with _Held.lock:
                _Held.files.pop(self._file, None)
                self._held.close()


def refuse_foreign(path: Path) -> None:
    """Raise FormatMismatch for a path that is no directory, or a directory that is no store and not empty.

    So it does for an address that was meant for another call, where no directory is of that name.
    """
    if path.exists() and not path.is_dir():
        raise FormatMismatch(path, "path", "a file", "a directory")
    if _ADDRESS.search(str(path)) and not path.exists():
        expected = "a directory; duelog.connect takes duelog://host:port, duelog restore the URL of a copy"
        raise FormatMismatch(path, "path", "an address", expected)
    if not path.exists() or (path / "STORE").exists():
        return
    strangers = sorted(child.name for child in path.iterdir() if child.name not in _OWN_NAMES)
    if strangers or any((path / "partitions").glob("*")) or _has_been_used(path / "main"):
        raise FormatMismatch(path, "STORE", None, "a STORE file, or an empty directory")


def staged_of(path: Path) -> Path:
    """The directory in which a standby makes the store that it will have in `path` once it leads."""
    return path.with_name(path.name + ".standby")


def refuse_standby(field: str, path: Path) -> None:
    """Raise InvalidArgument where a standby is to have its store once it leads: another store would be in its way."""
    staged = staged_of(path.absolute())
    if (staged / MARK).exists() and not (path / "STORE").exists():
        reason = (
            "a standby has no store here before it leads; `duelog replica status URL` names the leader; "
            f"where no standby is to run any more, remove {staged}"
        )
        raise InvalidArgument(field, str(path), reason)


def _has_been_used(main: Path) -> bool:
    """Return whether a main environment has more than its first commit, so that its store has lost its STORE file."""
    if not (main / "data.mdb").exists():
        return False
    try:
        return pages.inspect(main).transaction > 1
    except DamagedStore:
        return True


def create(path: Path, config: StoreConfig) -> Identity:
    """Make a new store in `path`, where the lock is held and there is no STORE file. Raises OSError."""
    for name in ("attempts", "main", "partitions", "staging", "trash", "wal"):
        remove_tree(path / name)
    for name in ("partitions", "staging", "trash"):
        make_directory(path / name)
    identity = Identity(uuid.uuid4().bytes, config.partition_ms)
    staged = path / "staging" / "main"
    environment = Environment(staged, name="main", map_bytes=config.map_bytes, create=True)
    info = PartitionInfo(fmt.FORMAT_VERSION, identity.store_id, 0, 0, 0)

    def work(transaction: Transaction) -> None:
        transaction.put(fmt.PARTITION_INFO_KEY, info.pack())
        policy_records.record_defaults(transaction, of_config(config))

    try:
        environment.commit(work)
    finally:
        environment.close()
    move(staged, path / "main")
    write_identity(path, identity)
    return identity


def write_identity(path: Path, identity: Identity) -> None:
    """Write the STORE file, which makes a directory a store: what it needs is there. Raises OSError."""
    fields = {"format": STORE_VERSION, "store_id": identity.store_id.hex(), "partition_ms": identity.partition_ms}
    write_file(path / "STORE", pack_json(fields))


def read_identity(path: Path, config: StoreConfig) -> Identity:
    """Read and check the STORE file. Raises FormatMismatch, DamagedStore."""
    try:
        with explained(path / "STORE"):
            content = (path / "STORE").read_bytes()
    except DamagedStore as error:
        raise FormatMismatch(path, "STORE", None, "a STORE file") from error
    try:
        fields, is_whole = unpack_json(content)
        version = fields["format"]
    except (ValueError, KeyError) as error:
        raise DamagedStore(path / "STORE", f"cannot be read: {content[:80]!r}") from error
    if version != STORE_VERSION:
        raise FormatMismatch(path, "format", version, STORE_VERSION)
    if not is_whole:
        raise DamagedStore(path / "STORE", "does not match its checksum")
    if fields["partition_ms"] != config.partition_ms:
        raise FormatMismatch(path, "partition_ms", fields["partition_ms"], config.partition_ms)
    return Identity(bytes.fromhex(fields["store_id"]), fields["partition_ms"])


def stored_span_ms(path: Path) -> int | None:
    """The partition span of an existing store, for tools; None: there is no store."""
    try:
        fields = json.loads((path / "STORE").read_bytes())
        return int(fields["partition_ms"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_main(
    path: Path,
    config: StoreConfig,
    identity: Identity,
    listeners: Sequence[StoreListener] = (),
    memtable: Memtable | None = None,
    follow: Follow | None = None,
    *,
    read_only: bool,
) -> Environment:
    """Open the main environment and see that it is whole and belongs to this store. Raises DamagedStore, AlreadyOpen.

    `follow`: how what is unapplied is read, where another process writes.
    """
    try:
        environment = Environment(
            path / "main",
            name="main",
            durability=config.local_durability,
            map_bytes=config.map_bytes,
            read_only=read_only,
            listeners=listeners,
            memtable=memtable,
            follow=follow,
            walk=True,
        )
    except AlreadyOpen as error:
        raise AlreadyOpen(path, is_fork=error.is_fork) from error
    try:
        fields = environment.get(fmt.PARTITION_INFO_KEY)
        info = None if fields is None else PartitionInfo.unpack(fields)
        if info is None or info.store_id != identity.store_id:
            raise DamagedStore(path / "main", "belongs to another store")
        if info.version > fmt.FORMAT_VERSION:
            raise FormatMismatch(path / "main", "format", info.version, fmt.FORMAT_VERSION)
    except BaseException:
        environment.close()
        raise
    return environment


def refuse_lost_entries(main: Environment, partitions: PartitionSet) -> int:
    """Refuse a store in which a partition log ends before its frontier: entries that fired are gone.

    Returns the latest due time that has fired, epoch ms. Entries are lost by a power cut with durability "none". Going
    on would give their ids out again. Raises DamagedStore.
    """
    with main.read() as raw:
        begun = [row for row in catalog.frontiers(raw) if row[2].absorbed_end]
    for topic_id, start_ms, record in begun:
        partition = partitions.get(start_ms)
        if partition is None or partition.state is not PartitionState.OPEN:
            continue
        with partitions.lease(partition, partial=True), partition.environment.read() as raw:
            tail = find_tail(raw, partition.name, record.ledger_id)
        if tail < record.absorbed_end:
            raise DamagedStore(
                partition.path,
                f"ledger {record.ledger_id} of topic {topic_id} ends at entry {tail}, {record.absorbed_end} were there "
                "when it last fired: entries were lost",
            )
    return max((record.due_ms for _, _, record in begun), default=0)


class OpenState:
    """The state of one store: open in the process that opened it, until `closed` is set."""

    def __init__(self, path: Path) -> None:
        self.closed = False
        self._path = path
        self._process = here.pid

    @property
    def forked(self) -> bool:
        """True in a child process, after fork, of the one that opened the store."""
        return here.pid != self._process

    def check(self) -> None:
        """Raise ClosedError after close, and in a child process after fork."""
        if self.closed:
            raise ClosedError(f"store {self._path}")
        if here.pid != self._process:
            raise ClosedError(f"store {self._path} (opened by process {self._process}, used by child {here.pid})")


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
    run_limits: RunLimits
    wal: WalContent


class LogRows(NamedTuple):
    """The rows of a write-ahead log, by environment, and the place of its last group."""

    rows: dict[int, EnvironmentRows]
    position: int


def recover(
    path: Path, config: StoreConfig, clock: Clock, undo: ExitStack, *, read_only: bool, log: LogRows | None = None
) -> Recovered:
    """Open or make the store in `path`, and finish what a crash interrupted; `undo` closes it again.

    log: the write-ahead log; None: it is read from the store. Read-only, nothing is changed: another process may be
    writing. Raises the errors of DelayedStore.open, and CorruptRecord.
    """
    refuse_foreign(path)
    lock = None
    if not read_only:
        refuse_standby("path", path)
        make_directory(path)
        lock = StoreLock(path)
        undo.callback(lock.release)
        lock.take()
    is_new = not read_only and not (path / "STORE").exists()
    with explained(path):
        identity = create(path, config) if is_new else read_identity(path, config)
    listeners: Listeners = []
    publication, limits = Publication(), RunLimits(config.run_entries, config.run_bytes)
    memtable = Memtable(publication, limits, path / "main" if config.sets_bodies_apart else None)
    followed = FollowedWal(path, identity.store_id) if read_only else None
    follow = None if followed is None else followed.of(MAIN)
    main = open_main(path, config, identity, listeners, memtable, follow, read_only=read_only)
    undo.callback(main.close)
    partitions = (
        PartitionSet(path, main, config, identity.store_id, publication, listeners=listeners)
        if followed is None
        else FollowedPartitionSet(path, main, config, identity.store_id, followed)
    )
    undo.callback(partitions.close)
    wal, replay, fired_ms = WalContent([], 0, None, 1, {}), Replay(path, {}), 0
    if not read_only:
        if log is None:
            wal = read_wal(path, identity.store_id, catalog.oldest_segment(main))
            with explained(path):
                flush_wal(path, wal)
            log = LogRows(rows_by_environment(wal.groups), wal.position)
        publication.position = log.position
        with main.read() as raw:
            refuse_ahead(main.path, raw, log.position)
        replay = Replay(path, log.rows)
        replay.fill_main(main, memtable)  # it says which partitions there are
    partitions.load(replay.registered)  # before anything is swept: what it refuses is left as it is
    if not read_only:
        sweep(path, main)
        replay.fill_partitions(partitions)
        fired_ms = refuse_lost_entries(main, partitions)
    mark = main.get(fmt.counter_key(catalog.CLOCK))  # the log may hold it
    store_clock = StoreClock(clock, max(fired_ms, 0 if mark is None else fmt.unpack_u64(mark)))
    if not read_only:
        recount(path, identity.store_id, main, store_clock.now_ms())
    storage = Storage(path, identity.store_id, config, read_only, main, partitions, listeners)
    return Recovered(storage, lock, store_clock, memtable, limits, wal)


class Replay:
    """Puts the rows that a crash left in the log into the memtables of a store that nothing reads yet."""

    def __init__(self, path: Path, rows: dict[int, EnvironmentRows]) -> None:
        self._path = path
        self._rows = rows
        records = rows[MAIN].others if MAIN in rows else []
        self.registered = {start_ms for _, row in records if (start_ms := registered_by(row)) is not None}
        """The partitions whose registration the log has."""

    def fill_main(self, main: Environment, memtable: Memtable) -> None:
        """Raises DamagedStore, where entries before the unapplied ones are missing."""
        if (rows := self._rows.pop(MAIN, None)) is not None:
            with main.read() as raw:
                fill(self._path, main.name, raw, memtable, rows)

    def fill_partitions(self, partitions: PartitionSet) -> None:
        """Fill the memtables of partitions; rows of one that is closed or gone were applied. Raises as `fill_main`."""
        for start_ms, rows in self._rows.items():
            partition = partitions.get(start_ms)
            if partition is not None and partition.state is PartitionState.OPEN:
                with partitions.glance(partition) as raw:
                    refuse_ahead(partition.path, raw, partition.memtable.publication.position)
                    fill(self._path, partition.name, raw, partition.memtable, rows)


def fill(path: Path, name: str, raw: Reads, memtable: Memtable, rows: EnvironmentRows) -> None:
    """Put the rows of an environment that are not applied, as `raw` reads, into its memtable. Raises DamagedStore.

    path: of the store, name: of the environment, for the error that entries before the rows are missing.
    """
    unapplied = rows.after(applied_position(raw))
    if not unapplied:
        return
    for _, row in unapplied.others:
        add_row(memtable.view, row)
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
