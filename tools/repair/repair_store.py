"""`duelog repair`, by three rules: the copy; what partitions and markers say; discard, with the bytes kept in a file.

In this order. Directories that lie elsewhere are put back, and files whose pages are broken are written anew from what
can be reached (repair_files.py). Small records are made anew from their copies, or from what else tells of them
(repair_records.py); frontiers, markers and cancellations from each other. Then holes and damaged bodies of every ledger
are discarded, and what points at them is acknowledged for every subscription, or cancelled where it has not fired
(repair_entries.py). Before a log is looked at it gets what the write-ahead log has of it, and a damaged write-ahead log
is begun anew at the end. At last the store is checked: what is left is reported, and needs a backup.

Deliberately not here: guessing. Without the main environment nothing tells what has fired and what each subscription
has read, so nothing is changed then.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from pyroaring import BitMap

from ...opening import StoreLock
from ...partitions.away import Away, rests
from ...partitions.partition import partition_path
from ...partitions.timespan import directory_name
from ...replica.identity import REPLICA
from ...store.codec import format as fmt
from ...store.codec.format import PartitionInfo, PartitionRecord, PartitionState
from ...store.env.environment import Environment
from ...store.errors import CorruptRecord, DamagedStore, DayAway
from ...store.files.directory import children, refuse_inside
from ...store.log import catalog
from ...store.wal.segment import MAIN
from ...survey.contents import Conditionals, read_logs
from ..store_check import check_store
from ..values import stored_identity
from . import repair_records as records
from .repair_entries import WalRepair, mend_partition, reconcile, recount_references
from .repair_files import Account, Place, RepairReport, describe, generations, put_back, require_main, rewrite_broken

__all__ = ["RepairReport", "repair_store"]


def repair_store(path: Path, output: Path) -> RepairReport:
    """Repair the store in `path`, which no process has open; `output` is added to, where anything is discarded.

    May be repeated; does nothing to a store without findings, and stops where it would have to guess (`left` says what
    is left). O(bytes). Raises InvalidArgument (`output` lies inside the store), StoreLocked, FormatMismatch,
    DamagedStore (the STORE file cannot be read), DayAway (some of it is in a copy alone), StoreFull.
    """
    refuse_inside("--output", output, path)
    identity = stored_identity(path)  # before a lock is made in what is no store
    lock = StoreLock(path)
    lock.take()
    account = Account(output)
    try:
        if not check_store(path, deep=True):
            return account.report
        for rest in [each for partition in children(path / "partitions") for each in rests(partition)]:
            raise DayAway(rest, f"is in {Away.read(rest).url} alone, with what a repair needs: restore that copy")
        if (path / REPLICA).exists():  # what is changed here is not in the log
            (path / REPLICA).unlink()
            account.say("the store has no copy any more: `duelog replica init` gives it a new prefix")
        try:
            _Repair(path, identity.store_id, identity.partition_ms, account).run()
        except (DamagedStore, CorruptRecord) as error:
            account.say(f"stopped: {error}")
    finally:
        lock.release()
    account.report.left = check_store(path, deep=True)
    return account.report


class _Repair:
    def __init__(self, path: Path, store_id: bytes, partition_ms: int, account: Account) -> None:
        self._path = path
        self._store_id = store_id
        self._partition_ms = partition_ms
        self._account = account
        self._logs: dict[int, int] = {}
        """Ledger id -> topic id of the logs of all partitions, as far as they are known by now."""
        self._partitions: dict[int, PartitionRecord] = {}
        self._of_partition: dict[int, dict[int, int]] = {}
        """Start of a partition -> topic id -> ledger id."""

    def run(self) -> None:
        path, account = self._path, self._account
        require_main(path)
        put_back(path, self._store_id, account)
        about_main = PartitionInfo(fmt.FORMAT_VERSION, self._store_id, 0, 0, 0)
        rewrite_broken(path, path / "main", "main", about_main, account)
        with closing(Environment(path / "main", name="main")) as main:
            describe(main, about_main, account)
            lost = account.write(main, records.mend_records, main.name, account)
            wal = WalRepair(path, self._store_id, catalog.oldest_segment(main), account)
            wal.apply(main, MAIN)
            lost_in = {place: self._mend_generation(place, directory) for place, directory in generations(path)}
            account.write(main, records.mend_topics, self._logs.values(), account)
            account.write(main, records.mend_counters, self._logs, account)
            account.write(main, records.mend_partitions, path, account)
            self._name_logs(main, wal, lost_in)
            account.write(main, records.mend_ledgers, lost, self._logs, account)
            self._mend_fired(main, lost)
            account.write(main, records.mend_cursors, lost, account)
            account.write(main, records.drop_strangers, account)
            account.write(main, records.mend_counters, self._logs, account)
            self._mend_entries(main)
            account.write(main, recount_references, account)
            wal.end(main)

    def _mend_generation(self, place: Place, directory: Path) -> list[bytes]:
        """Mend the records of a generation, registered or not; the keys of those that are lost."""
        rewrite_broken(self._path, directory, _name(place.start_ms), self._about(place), self._account)
        with closing(Environment(directory, name=_name(place.start_ms))) as environment:
            describe(environment, self._about(place), self._account)
            lost = self._account.write(environment, records.mend_records, environment.name, self._account)
            with environment.read() as raw:
                self._logs.update({ledger_id: topic_id for topic_id, ledger_id in read_logs(raw).items()})
        return lost

    def _name_logs(self, main: Environment, wal: WalRepair, lost_in: dict[Place, list[bytes]]) -> None:
        """Name every log of the partitions that are registered, given what the write-ahead log has of them."""
        with main.read() as raw:
            rows = catalog.partitions(raw)
        self._partitions = {start: record for start, record in rows if record.state is not PartitionState.DELETING}
        for start_ms, record in self._partitions.items():
            place = Place(start_ms, record.generation)
            directory = partition_path(self._path, *place)  # may be missing
            rewrite_broken(self._path, directory, _name(start_ms), self._about(place), self._account)
            with self._open(start_ms) as environment:
                wal.apply(environment, start_ms)
                lost = lost_in.get(place, [])
                here = self._account.write(
                    main, records.mend_logs, environment, start_ms, lost, self._logs, self._account
                )
            self._of_partition[start_ms] = here
            self._logs.update({ledger_id: topic_id for topic_id, ledger_id in here.items()})

    def _mend_fired(self, main: Environment, lost: list[bytes]) -> None:
        account = self._account
        with main.read() as raw:
            markers = records.read_marked(raw)
        conditionals = Conditionals()
        for start_ms, record in self._partitions.items():
            logs = self._of_partition[start_ms]
            with self._open(start_ms) as environment:
                account.write(main, records.mend_frontiers, environment, start_ms, record, logs, lost, markers, account)
                conditionals.add_all(environment, logs.values())
        account.write(main, records.mend_withdrawals, lost, conditionals, markers, self._open_log, account)

    def _mend_entries(self, main: Environment) -> None:
        with main.read() as raw:
            markers = records.read_marked(raw)
        discarded: dict[int, BitMap] = {}
        for start_ms, logs in self._of_partition.items():
            with self._open(start_ms) as environment:
                discarded |= mend_partition(main, environment, start_ms, logs, markers, self._account)
        self._account.write(main, reconcile, discarded, self._open_log, self._account)

    @contextmanager
    def _open_log(self, ledger_id: int) -> Iterator[records.PartitionLog | None]:
        for start_ms, logs in self._of_partition.items():
            for topic_id, log in logs.items():
                if log == ledger_id:
                    with self._open(start_ms) as environment:
                        yield records.PartitionLog(environment, topic_id, start_ms, ledger_id)
                    return
        yield None  # of a partition that is being deleted

    def _open(self, start_ms: int) -> AbstractContextManager[Environment]:
        path = partition_path(self._path, start_ms, self._partitions[start_ms].generation)
        return closing(Environment(path, name=_name(start_ms)))

    def _about(self, place: Place) -> PartitionInfo:
        end_ms = place.start_ms + self._partition_ms
        return PartitionInfo(fmt.FORMAT_VERSION, self._store_id, place.start_ms, end_ms, place.generation)


def _name(start_ms: int) -> str:
    return f"partition {directory_name(start_ms)}"
