"""`duelog repair`: what is damaged is made anew where the rest tells what it was, else discarded with its bytes.

In this order. Directories that lie elsewhere are put back (repair_places.py), and files whose pages are broken are
written anew from what can be reached. Small records are made anew from their copies (repair_records.py), or from what
else tells of them: topics, partitions and counters (repair_catalog.py), ledgers of partitions and of main logs
(repair_ledgers.py), frontiers (repair_fired.py), cancellations (repair_withdrawals.py), subscriptions
(repair_subscriptions.py). Then holes and damaged bodies of every ledger are discarded (cleanup/mend.py); what points at
them is acknowledged for every subscription, or cancelled where it has not fired; counts are counted again; snapshots of
a partition that was changed are removed. Before a log is looked at it gets what the write-ahead log has of it, and a
damaged write-ahead log is begun anew at the end (repair_wal.py). At last the store is checked: what
is left is reported, and needs a backup.

Deliberately not here: guessing. Without the main environment nothing tells what has fired and what each subscription
has read, so nothing is changed then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from pyroaring import BitMap

from ...check.check_partitions import was_used
from ...check.check_withdrawals import Conditionals
from ...opening import Identity, StoreLock
from ...partitions.partition import partition_path
from ...partitions.timespan import directory_name, parse_directory_name
from ...store.codec import format as fmt
from ...store.codec.format import PartitionInfo, PartitionRecord, PartitionState
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.errors import CorruptRecord, DamagedStore
from ...store.files.directory import make_directory, move, refuse_inside, remove_tree
from ...store.files.pages import read_values
from ...store.log import catalog
from ...store.wal.segment import MAIN
from ..store_check import check_file, check_store
from ..values import stored_identity
from .repair_catalog import drop_strangers, mend_counters, mend_partitions, mend_topics, partition_directories
from .repair_fired import OpenLog, mend_frontiers
from .repair_ledgers import mend_ledgers, mend_logs, read_logs
from .repair_partition import PartitionRepair, recount
from .repair_places import put_back
from .repair_records import mend_records
from .repair_report import Account, RepairReport
from .repair_subscriptions import mend_cursors, reconcile
from .repair_wal import WalRepair
from .repair_withdrawals import mend_withdrawals

__all__ = ["RepairReport", "repair_store"]


def repair_store(path: Path, output: Path) -> RepairReport:
    """Repair the store in `path`, which no process has open; `output` is added to, where anything is discarded.

    May be repeated; does nothing to a store without findings, and stops where it would have to guess (`left` says what
    is left). O(bytes). Raises InvalidArgument (`output` lies inside the store), StoreLocked, FormatMismatch,
    DamagedStore (the STORE file cannot be read), StoreFull.
    """
    refuse_inside("--output", output, path)
    lock = StoreLock(path)
    account = Account(output)
    try:
        identity = stored_identity(path)
        if not check_store(path, deep=True):
            return account.report
        try:
            _Repair(path, identity, account).run()
        except (DamagedStore, CorruptRecord) as error:
            account.say(f"stopped: {error}")
    finally:
        lock.release()
    account.report.left = check_store(path, deep=True)
    return account.report


class _Repair:
    def __init__(self, path: Path, identity: Identity, account: Account) -> None:
        self._path = path
        self._store_id = identity.store_id
        self._partition_ms = identity.partition_ms
        self._account = account

    def run(self) -> None:
        # Before LMDB opens any of them: what is broken may kill the process.
        self._need_main()
        put_back(self._path, self._store_id, self._account)
        about_main = PartitionInfo(fmt.FORMAT_VERSION, self._store_id, 0, 0, 0)
        self._rewrite_file(self._path / "main", "main", about_main)
        with closing(Environment(self._path / "main", name="main")) as main:
            self._describe(main, about_main)
            lost = mend_records(main, self._account)
            self._wal = WalRepair(self._path, self._store_id, catalog.oldest_segment(main), self._account)
            self._wal.apply(main, MAIN)
            logs: dict[int, int] = {}
            lost_in: dict[Path, list[bytes]] = {}
            for directory in partition_directories(self._path):
                lost_in[directory] = self._mend_directory(directory, logs)
            mend_topics(main, logs.values(), self._account)
            mend_counters(main, logs, self._account)
            mend_partitions(main, self._path, self._account)
            self._mend_logs(main, lost, logs, lost_in)
            self._wal.end(main)

    def _mend_directory(self, directory: Path, logs: dict[int, int]) -> list[bytes]:
        """Mend the records of a generation, registered or not; the keys of lost ones. Adds its logs to `logs`."""
        start_ms = parse_directory_name(directory.parent.name)
        info = self._about(start_ms, int(directory.name[1:]))
        self._rewrite_file(directory, _name(start_ms), info)
        with closing(Environment(directory, name=_name(start_ms))) as environment:
            self._describe(environment, info)
            lost = mend_records(environment, self._account)
            logs.update({ledger_id: topic_id for topic_id, ledger_id in read_logs(environment).items()})
        return lost

    def _mend_logs(
        self, main: Environment, lost: list[bytes], logs: dict[int, int], lost_in: dict[Path, list[bytes]]
    ) -> None:
        """Mend every log, given a catalog that names every partition. logs: ledger id -> topic id, added to."""
        account = self._account
        with main.read() as raw:
            partitions = [row for row in catalog.partitions(raw) if row[1].state is not PartitionState.DELETING]
        of_partition: dict[int, dict[int, int]] = {}
        for start_ms, record in partitions:
            directory = partition_path(self._path, start_ms, record.generation)
            self._rewrite_file(directory, _name(start_ms), self._about(start_ms, record.generation))  # if it is missing
            with self._open(start_ms, record) as environment:
                self._wal.apply(environment, start_ms)
                here = mend_logs(main, environment, start_ms, lost_in.get(directory, []), logs, account)
            of_partition[start_ms] = here
            logs.update({ledger_id: topic_id for topic_id, ledger_id in here.items()})
        mend_ledgers(main, lost, logs, account)
        conditionals = Conditionals()
        for start_ms, record in partitions:
            with self._open(start_ms, record) as environment:
                mend_frontiers(main, environment, start_ms, record, of_partition[start_ms], lost, account)
                conditionals.add_all(environment, of_partition[start_ms].values())
        open_log = self._open_log(dict(partitions), of_partition)
        mend_withdrawals(main, lost, conditionals, open_log, account)
        mend_cursors(main, lost, account)
        drop_strangers(main, account)
        mend_counters(main, logs, account)
        work = PartitionRepair(main, account)
        discarded: dict[int, BitMap] = {}
        for start_ms, record in partitions:
            with self._open(start_ms, record) as environment:
                discarded.update(work.mend(environment, start_ms, of_partition[start_ms]))
        reconcile(main, discarded, open_log, account)
        for start_ms, record in partitions:
            with self._open(start_ms, record) as environment:
                recount(main, environment, start_ms, account)

    def _open_log(self, records: dict[int, PartitionRecord], of_partition: dict[int, dict[int, int]]) -> OpenLog:
        places = {log: (topic, start_ms) for start_ms, here in of_partition.items() for topic, log in here.items()}

        @contextmanager
        def opened(ledger_id: int) -> Iterator[tuple[Environment, int, int] | None]:
            if ledger_id not in places:  # of a partition that is being deleted
                yield None
                return
            topic_id, start_ms = places[ledger_id]
            with self._open(start_ms, records[start_ms]) as environment:
                yield environment, topic_id, start_ms

        return opened

    def _open(self, start_ms: int, record: PartitionRecord) -> AbstractContextManager[Environment]:
        return closing(Environment(partition_path(self._path, start_ms, record.generation), name=_name(start_ms)))

    def _about(self, start_ms: int, generation: int) -> PartitionInfo:
        return PartitionInfo(fmt.FORMAT_VERSION, self._store_id, start_ms, start_ms + self._partition_ms, generation)

    # -- files -------------------------------------------------------------------------------------

    def _need_main(self) -> None:
        """Raises DamagedStore where nothing of the main environment can be reached."""
        directory = self._path / "main"
        reached = read_values(directory) if (directory / "data.mdb").is_file() else ()
        if any(key != fmt.PARTITION_INFO_KEY for key, _ in reached):
            return
        partitions = sum(was_used(directory) for directory in partition_directories(self._path))
        raise DamagedStore(
            directory,
            "holds nothing that can be read, and nothing else tells what has fired, what was cancelled and what "
            f"was read; nothing was changed. {partitions} partitions with messages are there: put main/ of a backup "
            "beside them, and repair again",
        )

    def _rewrite_file(self, directory: Path, name: str, info: PartitionInfo) -> None:
        """Write a file with broken pages, or none, anew from what can be reached of it."""
        if directory.exists() and not list(check_file(directory)):
            return
        values = list(read_values(directory)) if (directory / "data.mdb").is_file() else []
        staged = self._path / "staging" / f"repair-{name.replace(' ', '-')}"
        remove_tree(staged)
        make_directory(staged.parent)

        def fill(transaction: Transaction) -> None:
            transaction.put(fmt.PARTITION_INFO_KEY, info.pack())
            for key, value in values:
                if 0 < len(key) < 511 and key != fmt.PARTITION_INFO_KEY:
                    transaction.raw.put(key, value)

        with closing(Environment(staged, name=name, create=True)) as environment:
            environment.write(fill)
        make_directory(directory.parent)
        if directory.exists():
            trash = self._path / "trash" / f"repair-{directory.parent.name}-{directory.name}"
            make_directory(trash.parent)
            remove_tree(trash)
            move(directory, trash)
        move(staged, directory)
        self._account.say(f"{name}: written anew with the {len(values)} records that could be reached")

    def _describe(self, environment: Environment, info: PartitionInfo) -> None:
        try:
            fields = environment.get(fmt.PARTITION_INFO_KEY)
        except CorruptRecord:
            fields = None
        if fields != info.pack():
            environment.write(lambda transaction: transaction.put(fmt.PARTITION_INFO_KEY, info.pack()))
            self._account.say(f"{environment.name}: described anew")


def _name(start_ms: int) -> str:
    return f"partition {directory_name(start_ms)}"
