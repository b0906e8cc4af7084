"""The audit of one sealed partition: a plain function of its generation and what the main environment says of it.

The command line calls it in a loop, Spark's tasks call it on other machines: arguments and result are plain values that
pack into bytes. It opens the generation without locks, touches nothing else, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import lmdb
import msgpack
import numpy as np
from pyroaring import BitMap

from ....snapshot.stored import inspect_snapshots
from ....store.codec import format as fmt
from ....store.codec.format import Table
from ....store.codec.run import Run
from ....store.env.environment import Environment
from ....store.errors import CorruptEntry, CorruptRecord, DamagedStore
from ....store.log.scan import runs
from ...scan.sealed import Sealed, open_sealed
from ...store_check import check_file
from .log_tally import NO_ENTRY, Batch, Day, Issue, LogResult, LogTask, Mask, tally_log

_BATCH_ENTRIES = 1 << 20
_BATCH_RUNS = 1 << 14


class PartitionTask(NamedTuple):
    """The audit of one partition, to be done anywhere that its generation can be read from.

    logs: those of which something has fired. withdrawn: (ledger id, entries cancelled, entries admitted) of logs that
    may lie in it and of which nothing has. verify: read every page and body too, not only headers.
    """

    sealed: Sealed
    store_id: bytes
    as_of_ms: int
    verify: bool
    logs: tuple[LogTask, ...]
    withdrawn: tuple[tuple[int, bytes, bytes], ...]

    def pack(self) -> bytes:
        """As bytes, for a task."""
        return msgpack.packb(self)

    @classmethod
    def unpack(cls, packed: bytes) -> PartitionTask:
        """The inverse of `pack`."""
        sealed, store_id, as_of_ms, verify, logs, withdrawn = msgpack.unpackb(packed, use_list=False)
        return cls(Sealed(*sealed), store_id, as_of_ms, verify, tuple(LogTask(*each) for each in logs), withdrawn)


class PartitionResult(NamedTuple):
    """What was found. `unreadable`: why nothing of it was looked at; empty: it was."""

    start_ms: int
    unreadable: str
    file_bytes: int
    logs: list[LogResult]
    issues: list[Issue]

    def pack(self) -> bytes:
        """As bytes, for the process that gathers the results."""
        return msgpack.packb(self)

    @classmethod
    def unpack(cls, packed: bytes) -> PartitionResult:
        """The inverse of `pack`."""
        start_ms, unreadable, file_bytes, logs, issues = msgpack.unpackb(packed, use_list=False)
        return cls(start_ms, unreadable, file_bytes, [_log_result(each) for each in logs], _issues(issues))


def _log_result(fields: tuple[object, ...]) -> LogResult:
    topic_id, ledger_id, entries, unfired, some, days, hours, issues = cast(tuple[int, ...], fields)
    return LogResult(
        topic_id,
        ledger_id,
        entries,
        unfired,
        cast(str, some),
        [Day(*each) for each in cast(list[tuple[int, ...]], days)],
        list(cast(list[tuple[int, int]], hours)),
        _issues(issues),
    )


def _issues(fields: object) -> list[Issue]:
    return [Issue(*each) for each in cast(list[tuple[str, int, str, int]], fields)]


def audit_packed(packed: bytes) -> bytes:
    """`audit_partition` from bytes to bytes."""
    return audit_partition(PartitionTask.unpack(packed)).pack()


def audit_partition(task: PartitionTask) -> PartitionResult:
    """Audit one sealed partition. O(headers), with `verify` O(bytes). Raises nothing for what the files hold."""
    sealed = task.sealed
    try:
        problems = [found.message for found in check_file(sealed.path)] if task.verify else []
        if problems:
            return PartitionResult(sealed.start_ms, "; ".join(problems[:5]), sealed.file_bytes, [], [])
        with open_sealed(sealed, task.store_id) as environment:
            logs, issues = audit_environment(environment, task)
            issues += [Issue("incomplete-snapshot", NO_ENTRY, "snapshots were left when the partition closed", 0)
                       for _ in inspect_snapshots(environment)][:1]  # fmt: skip
        return PartitionResult(sealed.start_ms, "", sealed.file_bytes, logs, issues)
    except (DamagedStore, CorruptRecord, lmdb.Error) as error:
        return PartitionResult(sealed.start_ms, str(error) or type(error).__name__, sealed.file_bytes, [], [])


def audit_environment(environment: Environment, task: PartitionTask) -> tuple[list[LogResult], list[Issue]]:
    """The logs of an open environment, sealed or under locks, and what is wrong with its records."""
    issues: list[Issue] = []
    found: dict[int, int] = {}
    with environment.read() as raw:
        for key, value in _small_records(raw):
            try:
                fields = fmt.unseal(key, value)
                if key[0] == Table.LOG:
                    found[fmt.trailing_u32(key)] = fmt.unpack_u64(fields)
            except ValueError as error:
                issues.append(Issue("corrupt-record", NO_ENTRY, f"{_table(key)} {key.hex()}: {error}", 0))
    known = {log.topic_id: log for log in task.logs}
    withdrawn = {ledger_id: (cancelled, admitted) for ledger_id, cancelled, admitted in task.withdrawn}
    none = BitMap().serialize()
    results = []
    for topic_id, ledger_id in sorted(found.items()):
        log = known.pop(topic_id, None)
        if log is not None and log.ledger_id != ledger_id:
            message = f"its log is ledger {ledger_id}, the frontier is of ledger {log.ledger_id}"
            issues.append(Issue("missing-entries", NO_ENTRY, message, 0))
            log = None
        if log is None:
            log = LogTask.unknown(topic_id, ledger_id, *withdrawn.get(ledger_id, (none, none)))
        results.append(tally_log(_batches(environment, ledger_id, task.verify), log, task.as_of_ms))
    if not issues:
        for log in known.values():  # the log table has none of them
            results.append(tally_log([], log, task.as_of_ms))
    return results, issues


def _table(key: bytes) -> str:
    return Table(key[0]).name if key[0] in {int(table) for table in Table} else f"table {key[0]:#04x}"


def _small_records(raw: lmdb.Transaction) -> Iterator[tuple[bytes, bytes]]:
    cursor = raw.cursor()
    more = cursor.first()
    snapshots = bytes((Table.SNAPSHOT_PART,))  # a snapshot says of itself whether it is whole
    while more:
        key = bytes(cursor.key())
        if key >= snapshots:
            return
        yield key, bytes(cursor.value())
        more = cursor.next()


def _batches(environment: Environment, ledger_id: int, verify: bool) -> Iterator[Batch | Issue]:
    """The entries of a log in batches, each a read transaction of its own; what is damaged as an Issue."""
    start = 0
    while True:
        gathered = _Gathered()
        issues: list[Issue] = []
        first: int | None = None
        more = False
        with environment.read() as raw:
            for run in runs(raw, environment.name, ledger_id, start):
                if isinstance(run, CorruptEntry):
                    if gathered.runs:
                        more = True
                        break
                    issues.append(Issue("corrupt-entry", run.entry_id, run.reason, 0))
                    start = run.entry_id + 1
                    continue
                if first is None:
                    first = run.first_entry
                elif run.first_entry != start or gathered.full:
                    more = True
                    break
                gathered.add(run)
                start = run.limit
                if verify:
                    issues += [Issue("corrupt-entry", entry_id, reason, 1) for entry_id, reason in run.damaged_bodies()]
            batch = gathered.batch(first) if first is not None else None
        yield from issues
        if batch is not None:
            yield batch
        if not more:
            return


class _Gathered:
    """Runs that follow each other, as columns; views into the transaction that they were read in."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._entries = 0

    @property
    def full(self) -> bool:
        return self._entries >= _BATCH_ENTRIES or len(self.runs) >= _BATCH_RUNS

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self._entries += run.count

    def batch(self, first_entry: int) -> Batch:
        counts = np.fromiter((run.count for run in self.runs), np.int64, len(self.runs))
        bases = np.fromiter((run.base_ms for run in self.runs), np.int64, len(self.runs))
        dues = np.concatenate([run.due_offsets() for run in self.runs]).astype(np.int64) + np.repeat(bases, counts)
        ends = np.concatenate([run.ends() for run in self.runs]).astype(np.int64)
        sizes = np.diff(ends, prepend=0)
        starts = np.cumsum(counts) - counts
        sizes[starts] = ends[starts]
        conditional: Mask | None = None
        if any(run.conditional for run in self.runs):
            conditional = np.repeat([run.conditional for run in self.runs], counts)
        return Batch(first_entry, dues, sizes, conditional)
