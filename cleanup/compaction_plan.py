"""The plan of compacting a closed partition: a small value that can be sent to another machine.

Made from the claims on the partition (log_claims.py), which are picklable too, and the headers of its runs; no body is
read, nothing is written.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ..partitions.timespan import directory_name
from ..store.codec import format as fmt
from ..store.codec.format import OriginRecord, PartitionInfo, Relied, Table
from ..store.codec.run import Run, RunKind
from ..store.env.body_file import length_of
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.errors import BrokenInvariant, CorruptEntry, DamagedStore
from ..store.log import catalog
from ..store.log.ledger import find_tail
from ..store.log.scan import runs
from .log_claims import LogClaims, needed


class LogPlan(NamedTuple):
    """The plan for one log: `needed` is a serialised bitmap of entries whose bodies stay.

    dead_entries, dead_bytes: bodies that go; body_bytes: all bodies there are now.
    """

    topic_id: int
    ledger_id: int
    entries: int
    needed: bytes
    dead_entries: int
    dead_bytes: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """The bodies that compaction of a partition would drop, and the generation it starts from. Picklable.

    transaction: number of the source's last LMDB transaction; file_bytes: the length of its files. relied_on: see
    `OriginRecord`.
    """

    store_id: bytes
    start_ms: int
    end_ms: int
    generation: int
    transaction: int
    file_bytes: int
    logs: tuple[LogPlan, ...]
    relied_on: tuple[Relied, ...]

    @property
    def partition(self) -> str:
        return directory_name(self.start_ms)

    @property
    def body_bytes(self) -> int:
        return sum(log.body_bytes for log in self.logs)

    @property
    def dead_bytes(self) -> int:
        return sum(log.dead_bytes for log in self.logs)

    @property
    def dead_entries(self) -> int:
        return sum(log.dead_entries for log in self.logs)

    @property
    def dead_ratio(self) -> float:
        """Share of the bytes of bodies that would go; 0 where there are none."""
        total = self.body_bytes
        return self.dead_bytes / total if total else 0.0

    def origin(self) -> OriginRecord:
        return OriginRecord(
            self.generation, self.transaction, self.file_bytes, self.dead_entries, self.dead_bytes, self.relied_on
        )

    def info(self) -> PartitionInfo:
        return PartitionInfo(fmt.FORMAT_VERSION, self.store_id, self.start_ms, self.end_ms, self.generation + 1)

    def described(self) -> dict[bytes, bytes]:
        """The rows of the new generation that say what it is, by key."""
        fields = {fmt.PARTITION_INFO_KEY: self.info().pack(), fmt.ORIGIN_KEY: self.origin().pack()}
        return {key: fmt.seal(key, packed) for key, packed in fields.items()}

    def stays(self) -> dict[int, BitMap]:
        return {log.ledger_id: BitMap.deserialize(log.needed) for log in self.logs}

    def require_source(self, source: Environment, raw: Reads) -> None:
        """Refuse a source that is not the generation that was planned, as it was. Raises DamagedStore."""
        info = _info(source, raw)
        if info != self.info()._replace(generation=self.generation) or raw.id() != self.transaction:
            message = f"is {info} as of transaction {raw.id()}, not generation {self.generation}"
            raise DamagedStore(source.path, f"{message} as of {self.transaction}, for which compaction was planned")


def plan_generation(source: Environment, claims: Iterable[LogClaims]) -> CompactionPlan:
    """Plan what can be dropped from a sealed generation, by the claims on each of its logs (`claims_of_logs`).

    Reads the headers of its runs, and nothing else; O(entries). REQUIRES: at the time of the claims the catalog had
    the partition as CLOSED. Raises DamagedStore, CorruptRecord.
    """
    known = {(row.topic_id, row.ledger_id): row for row in claims}
    with source.read() as raw:
        info = _info(source, raw)
        logs = []
        for log in partition_logs(raw):
            if log not in known:
                raise BrokenInvariant(f"{source.name}: the claims were not read of log {log[1]} of topic {log[0]}")
            logs.append(known[log])
        planned = tuple(_plan_log(raw, source.name, claims_of_log) for claims_of_log in logs)
        transaction = raw.id()
    relied_on = tuple(
        Relied(claims_of_log.topic_id, ledger_id, positions.serialize())
        for claims_of_log in sorted(logs, key=lambda claims_of_log: claims_of_log.topic_id)
        if claims_of_log.topic is not None and not claims_of_log.frontier.released
        for ledger_id, positions in sorted(claims_of_log.relied_on.items())
    )
    file_bytes = length_of(source.path)
    return CompactionPlan(
        info.store_id, info.start_ms, info.end_ms, info.generation, transaction, file_bytes, planned, relied_on
    )


def partition_logs(raw: Reads) -> list[tuple[int, int]]:
    """(topic id, ledger id) of every log of a partition, in a read transaction of its environment. O(logs)."""
    rows = catalog.rows(raw, fmt.prefix(Table.LOG))
    return [(fmt.trailing_u32(key), fmt.unpack_u64(fields)) for key, fields in rows]


def _info(source: Environment, raw: Reads) -> PartitionInfo:
    fields = catalog.fields_of(raw, fmt.PARTITION_INFO_KEY)
    if fields is None:
        raise DamagedStore(source.path, "has no partition record")
    return PartitionInfo.unpack(fields)


def _plan_log(raw: Reads, name: str, claims: LogClaims) -> LogPlan:
    ledger_id = claims.ledger_id
    tail = find_tail(raw, name, ledger_id)
    read = list(runs(raw, name, ledger_id))
    stay = needed(claims, tail, _conditional(read))
    dead_entries = dead_bytes = body_bytes = 0
    for run in read:
        if isinstance(run, CorruptEntry) or not can_be_thinned(run):
            continue
        sizes = run.body_bytes()
        gone = ~mask(stay, run) & (sizes > 0)
        body_bytes += int(sizes.sum())
        dead_entries += int(gone.sum())
        dead_bytes += int(sizes[gone].sum())
    stay.run_optimize()
    return LogPlan(claims.topic_id, ledger_id, tail, stay.serialize(), dead_entries, dead_bytes, body_bytes)


def _conditional(read: Iterable[Run | CorruptEntry]) -> BitMap | None:
    """The conditional entries of a log, by its runs in order; None where one of them cannot be read."""
    needed = BitMap()
    expected = 0
    for run in read:
        if isinstance(run, CorruptEntry) or run.first_entry != expected:
            return None
        expected = run.limit
        if run.conditional:
            needed.add_range(run.first_entry, run.limit)
    return needed


def can_be_thinned(run: Run) -> bool:
    """Return whether the bodies of a run can be located; a run whose bodies cannot is copied as it is."""
    return run.kind == RunKind.MESSAGES and run.bodies_fit


def mask(entries: BitMap, run: Run) -> npt.NDArray[np.bool_]:
    """Which entries of a run are in `entries`."""
    mask = np.zeros(run.count, dtype=np.bool_)
    window = BitMap(range(run.first_entry, run.limit))
    mask[np.frombuffer((entries & window).to_array(), dtype=np.uint32) - np.uint32(run.first_entry)] = True
    return mask
