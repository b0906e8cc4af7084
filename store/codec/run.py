"""Runs: the entries that one commit appended to one ledger, as one LMDB value.

    run      := crc:u32 version:u8 kind:u8 flags:u16 count:u32 base_ms:i64 target:u64 spare:u32 columns bodies
    MESSAGES := due:u32[count] end:u32[count] body_crc:u32[count] [old_ledger:u64[count] old_entry:u32[count]]
    MARKERS  := due:u32[count] entry:u32[count]

Numbers in values are little-endian, so that numpy reads columns where they lie. `crc` covers the key
and everything from `version` to the end of the columns; each body has its own checksum in a column, so
a scan of due times touches the first page of a run and no payload, and one damaged body costs one entry.
`due` counts ms from `base_ms`; `end` is where a body ends, counted from where bodies begin (two equal
ends: compaction dropped the body). The markers of a run all point into the ledger `target`; with FLAG_TIMED
`spare` is how many ms after the last of their due times they were written.

The road not taken: a value for each entry. It costs 16 bytes and a node a message, and whole pages
above about 2,000 bytes.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BrokenInvariant, CorruptEntry
from .bodies import Bodies, Buffer
from .checksum import crc32
from .format import run_key, split_run_key

RUN_VERSION = 1
APART_VERSION = 2
"""Version of a run whose bodies lie in its ledger's body file: in their place it has the byte that they begin at."""
HEADER = struct.Struct("<IBBHIqQI")
HEADER_BYTES = HEADER.size
MAX_DUE_SPAN_MS = 2**32 - 1
"""The due times of a run lie within this many ms of its base."""

FLAG_CONDITIONAL = 0x0001
"""Each entry names an older one in two further columns, and fires only if it is admitted."""

FLAG_EARLY = 0x0002
"""Entries of a main log that were not due when they were appended are among these: readers look at due times."""

FLAG_TIMED = 0x0004
"""Flag of markers: `spare` has the ms from the largest due time to the firing; without it the time is not known."""

FLAG_SKIPS = 0x0008
"""Flag of a single message without a body: `spare` ids before it were never given to an entry."""

_CRC = struct.Struct("<I")
_LOCATE = struct.Struct("<I")
_SPAN = struct.Struct("<II")
_SINGLE = struct.Struct("<BBHIqQIIII")
_CONDITION = struct.Struct("<QI")
_APART = struct.Struct("<Q")
APART_BYTES = _APART.size
"""Bytes in place of bodies that lie in a body file."""

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]


class RunKind(IntEnum):
    """The kind of entries that a run has."""

    MESSAGES = 1
    MARKERS = 2


ReadBodies = Callable[[int, int, int], memoryview]
"""Reads from the body file of a ledger: (ledger id, byte, length); fewer bytes where it has fewer."""

_COLUMN_BYTES: dict[int, int] = {RunKind.MESSAGES: 12, RunKind.MARKERS: 8}
_CONDITION_BYTES = 12


def seal_run(key: bytes, rest: bytes, parts: Sequence[Buffer]) -> bytes:
    """A value, given what follows its first checksum: header and columns, and bodies."""
    return b"".join((_CRC.pack(crc32(rest, crc32(key))), rest, *parts))


class PackedRun:
    """The value of a MESSAGES run but for its first checksum, which covers the key: made before the key is known."""

    __slots__ = ("_bodies", "_value", "count")

    def __init__(
        self,
        base_ms: int,
        dues: Int64s,
        bodies: Sequence[bytes],
        replaced: tuple[npt.NDArray[np.uint64], UInt32s] | None = None,
        *,
        early: bool = False,
    ) -> None:
        """`dues` are epoch ms within [base_ms, base_ms + MAX_DUE_SPAN_MS].

        replaced: (ledger ids, entry ids), which make the entries conditional. early: some were not due when they were
        appended to a main log. An empty body stands for one that compaction dropped.
        """
        bodies, self.count = Bodies.of(bodies), len(bodies)
        flags = (FLAG_EARLY if early else 0) | (FLAG_CONDITIONAL if replaced is not None else 0)
        header = HEADER.pack(0, RUN_VERSION, RunKind.MESSAGES, flags, self.count, base_ms, 0, 0)
        columns = [(dues - base_ms).astype("<u4").tobytes(), bodies.ends().tobytes(), bodies.checksums()]
        if replaced is not None:
            columns += [replaced[0].astype("<u8").tobytes(), replaced[1].astype("<u4").tobytes()]
        self._bodies = HEADER_BYTES + sum(map(len, columns))
        self._value = bytearray().join((header, *columns, *bodies.parts()))

    def sealed(self, key: bytes) -> bytearray:
        """The value under `key`. Valid until it is asked for another one."""
        _CRC.pack_into(self._value, 0, crc32(memoryview(self._value)[4 : self._bodies], crc32(key)))
        return self._value


def pack_groups(dues: Int64s, bodies: Bodies, groups: Sequence[tuple[int, int, int]]) -> list[PackedRun]:
    """A run of plain messages for each group (base_ms, start, limit) of rows, which follow each other from 0 on.

    As a PackedRun of each; the columns of all are made at once.
    """
    bases = np.array([base_ms for base_ms, _, _ in groups], dtype=np.int64)
    starts = np.array([start for _, start, _ in groups], dtype=np.int64)
    counts = np.array([limit - start for _, start, limit in groups], dtype=np.int64)
    offsets = (dues - np.repeat(bases, counts)).astype("<u4").tobytes()
    ends = np.cumsum(bodies.sizes())
    before = np.concatenate(([0], ends))[starts]
    ends_column = (ends - np.repeat(before, counts)).astype("<u4").tobytes()
    crcs, parts, each = bodies.checksums(), bodies.parts(), 2 if bodies.head else 1
    packed = []
    for base_ms, start, limit in groups:
        count, low, high = limit - start, 4 * start, 4 * limit
        run = PackedRun.__new__(PackedRun)
        run.count, run._bodies = count, HEADER_BYTES + 12 * count
        header = HEADER.pack(0, RUN_VERSION, RunKind.MESSAGES, 0, count, base_ms, 0, 0)
        columns = offsets[low:high] + ends_column[low:high] + crcs[low:high]
        run._value = bytearray().join((header, columns, *parts[each * start : each * limit]))
        packed.append(run)
    return packed


def fields_of_message(
    base_ms: int, due_ms: int, body: bytes, replaced: tuple[int, int] | None = None, *, early: bool = False
) -> bytes:
    """The header and columns of a run of one message, for `seal_run`; as `PackedRun` has them.

    Without numpy, which would cost more than the rest of it.
    """
    flags, offset = FLAG_EARLY if early else 0, due_ms - base_ms
    if replaced is not None:
        flags |= FLAG_CONDITIONAL
    rest = _SINGLE.pack(RUN_VERSION, RunKind.MESSAGES, flags, 1, base_ms, 0, 0, offset, len(body), crc32(body))
    return rest if replaced is None else rest + _CONDITION.pack(*replaced)


def pack_skip(key: bytes, base_ms: int, skipped: int) -> bytes:
    """The value of a run before which `skipped` ids are passed over; its one entry, without a body, is no message."""
    rest = _SINGLE.pack(RUN_VERSION, RunKind.MESSAGES, FLAG_SKIPS, 1, base_ms, 0, skipped, 0, 0, 0)
    return b"".join((_CRC.pack(crc32(rest, crc32(key))), rest))


def skipped_before(value: Buffer) -> int:
    """How many ids are passed over before a run."""
    _, _, _, flags, _, _, _, spare = HEADER.unpack_from(value)
    return int(spare) if flags & FLAG_SKIPS else 0


def pack_markers(
    key: bytes, target: int, base_ms: int, entries: UInt32s, dues: Int64s, fired_ms: int | None = None
) -> bytes:
    """The value of a MARKERS run: markers of `entries` of the partition log with ledger id `target`.

    `fired_ms` is when they are written; more than MAX_DUE_SPAN_MS after the last due time is stored as that.
    """
    flags = after = 0
    if fired_ms is not None:
        flags, after = FLAG_TIMED, min(max(fired_ms - int(dues.max()), 0), MAX_DUE_SPAN_MS)
    columns = np.empty((2, len(entries)), dtype="<u4")
    columns[0] = dues - base_ms
    columns[1] = entries
    rest = HEADER.pack(0, RUN_VERSION, RunKind.MARKERS, flags, len(entries), base_ms, target, after)[4:]
    return seal_run(key, rest + columns.tobytes(), ())


def has_bodies(value: Buffer) -> bool:
    """Return whether a run is of messages."""
    return value[5] == RunKind.MESSAGES


def is_apart(value: Buffer) -> bool:
    """Return whether a run has its bodies in a body file."""
    return value[4] == APART_VERSION


def place_apart(value: Buffer) -> tuple[int, int]:
    """Byte of the body file at which the bodies of a run begin, and their length. REQUIRES: `is_apart`, verified."""
    (at,) = _APART.unpack_from(value, len(value) - APART_BYTES)
    (last_end,) = _LOCATE.unpack_from(value, HEADER_BYTES + 4 * (2 * HEADER.unpack_from(value)[4] - 1))
    return at, last_end


def set_apart(key: bytes, value: Buffer, at: int) -> tuple[bytes, Buffer]:
    """Split the value of a MESSAGES run: one whose bodies begin at byte `at` of the body file, and the bodies."""
    _, _, _, flags, count, _, _, _ = HEADER.unpack_from(value)
    columns = HEADER_BYTES + (24 if flags & FLAG_CONDITIONAL else 12) * count
    rest = b"".join((bytes((APART_VERSION,)), memoryview(value)[5:columns], _APART.pack(at)))
    return seal_run(key, rest, ()), memoryview(value)[columns:]


_FEW = 24
"""Up to this many bodies of a run are read one by one: gathering columns for them would take longer."""


class RunLimits(NamedTuple):
    """Limits at which a run of messages is cut (StoreConfig.run_entries, StoreConfig.run_bytes)."""

    entries: int = 192
    bytes: int = 256 * 1024


class Run:
    """A run read where it lies: valid as long as the read transaction that `value` came from."""

    __slots__ = (
        "_at",
        "_bodies",
        "_data",
        "_read",
        "_value",
        "base_ms",
        "bodies_at",
        "conditional",
        "count",
        "early",
        "environment",
        "first_entry",
        "kind",
        "ledger_id",
        "target",
    )  # fmt: skip

    def __init__(
        self, environment: str, key: bytes | memoryview, value: memoryview | bytes, read: ReadBodies | None = None
    ) -> None:
        """Parse and verify header and columns. Raises CorruptEntry (entry: the run's first).

        read: None where bodies in a body file are not asked for.
        """
        self.environment = environment
        self.ledger_id, self.first_entry = split_run_key(key)
        self._value = value
        if len(value) < HEADER_BYTES:
            raise self._corrupt(self.first_entry, f"run of {len(value)} bytes")
        header: tuple[int, ...] = HEADER.unpack_from(value)
        crc, version, kind, flags, self.count, self.base_ms, self.target, _ = header
        if version not in (RUN_VERSION, APART_VERSION) or kind not in _COLUMN_BYTES:
            raise self._corrupt(self.first_entry, f"run of version {version}, kind {kind}")
        self.kind = kind
        self.conditional = bool(flags & FLAG_CONDITIONAL)
        self.early = bool(flags & FLAG_EARLY)
        each = _COLUMN_BYTES[kind] + (_CONDITION_BYTES if self.conditional else 0)
        self._bodies = HEADER_BYTES + each * self.count
        self.bodies_at: int | None = None
        """Where its bodies begin in the body file; None: they are in the run."""
        self._data: memoryview | bytes | None = value
        """The bytes in which its bodies lie, from `_at` on; None of a body file until they are asked for."""
        self._at = self._bodies
        self._read = read
        end = self._bodies + (0 if version == RUN_VERSION else APART_BYTES)
        if end > len(value) or not self.count:
            raise self._corrupt(self.first_entry, f"run of {len(value)} bytes cannot hold {self.count} entries")
        if crc32(value[4:end], crc32(key)) != crc:
            raise self._corrupt(self.first_entry, "run header does not match its checksum")
        if version != RUN_VERSION:
            self.bodies_at, self._data = _APART.unpack_from(value, self._bodies)[0], None

    def _corrupt(self, entry_id: int, reason: str) -> CorruptEntry:
        return CorruptEntry(self.environment, self.ledger_id, entry_id, reason)

    def _column(self, number: int) -> UInt32s:
        column: UInt32s = np.frombuffer(self._value, "<u4", self.count, HEADER_BYTES + 4 * self.count * number)
        return column

    @property
    def limit(self) -> int:
        """One past the last entry id."""
        return self.first_entry + self.count

    @property
    def stored_bytes(self) -> int:
        return len(self._value) if self.bodies_at is None else self._bodies + int(self.ends()[-1])

    def _region(self, start: int, end: int) -> memoryview | bytes:
        """Bytes from where bodies begin, unverified; fewer where there are fewer."""
        data = self._apart() if self._data is None else self._data
        return data[self._at + start : self._at + end]

    def _apart(self) -> memoryview:
        if self._read is None or self.bodies_at is None:
            raise BrokenInvariant(f"bodies of {self.ledger_id}:{self.first_entry} are asked for without their file")
        self._data, self._at = self._read(self.ledger_id, self.bodies_at, int(self.ends()[-1])), 0
        return self._data

    @property
    def follows(self) -> int:
        """The first id of its own, or of those that are passed over before it."""
        return self.first_entry - skipped_before(self._value)

    def due_offsets(self) -> UInt32s:
        """Due times of all entries, ms from `base_ms` (a view)."""
        return self._column(0)

    def dues(self) -> Int64s:
        """Due times of all entries, epoch ms (a copy)."""
        dues: Int64s = self._column(0).astype(np.int64) + self.base_ms
        return dues

    def due(self, index: int) -> int:
        """Due time of the entry at `index` in the run, epoch ms."""
        return self.base_ms + int(_LOCATE.unpack_from(self._value, HEADER_BYTES + 4 * index)[0])

    def fired_ms(self) -> int | None:
        """Time at which the markers were written, epoch ms of the store's clock; None where it is not stored.

        REQUIRES: kind is MARKERS.
        """
        _, _, _, flags, _, _, _, after = HEADER.unpack_from(self._value)
        if not flags & FLAG_TIMED:
            return None
        return self.base_ms + int(self._column(0).max()) + int(after)

    def targets(self) -> UInt32s:
        """Entry ids that the markers point at (a view). REQUIRES: kind is MARKERS."""
        return self._column(1)

    def ends(self) -> UInt32s:
        """The end of each body, counted from where bodies begin (a view). REQUIRES: kind is MESSAGES."""
        return self._column(1)

    def body_bytes(self) -> Int64s:
        """Bytes of each body, 0 where it was dropped (a copy). REQUIRES: kind is MESSAGES."""
        sizes: Int64s = self.ends().astype(np.int64)
        sizes[1:] -= sizes[:-1].copy()
        return sizes

    @property
    def bodies_fit(self) -> bool:
        """True where every body lies inside the run, after the one before. REQUIRES: kind is MESSAGES."""
        sizes = self.body_bytes()
        end = int(sizes.sum())
        return int(sizes.min()) >= 0 and len(self._region(max(end - 1, 0), end)) == min(end, 1)

    def whole(self) -> memoryview | bytes:
        """The value of this run with its bodies in it, as many bytes of them as there are."""
        if self.bodies_at is None:
            return self._value
        rest = b"".join((bytes((RUN_VERSION,)), self._value[5 : self._bodies]))
        bodies = self._region(0, int(self.ends()[-1]))
        return seal_run(run_key(self.ledger_id, self.first_entry), rest, (bodies,))

    def fixed(self) -> bytes:
        """Keep what does not depend on the bodies: the facts of the header, due times, conditions."""
        value, columns = self._value, HEADER_BYTES + 12 * self.count
        parts = (
            value[4:HEADER_BYTES],
            value[HEADER_BYTES : HEADER_BYTES + 4 * self.count],
            value[columns : self._bodies],
        )
        return b"".join(parts)

    def keeping(self, keep: npt.NDArray[np.bool_]) -> bytes:
        """The value of this run with the bodies of the entries in the mask `keep` only.

        Due times and conditions stay, and so do the checksums of the bodies that stay: they are not computed anew,
        so that damage is still found. REQUIRES: kind is MESSAGES, `bodies_fit`.
        """
        value = self._value
        columns = np.frombuffer(value, "<u4", 3 * self.count, HEADER_BYTES).reshape(3, self.count).copy()
        columns[1] = np.cumsum(np.where(keep, self.body_bytes(), 0))
        columns[2][~keep] = 0
        conditions = value[HEADER_BYTES + 12 * self.count : self._bodies]
        rest = b"".join((bytes((RUN_VERSION,)), value[5:HEADER_BYTES], columns.tobytes(), conditions))
        return seal_run(run_key(self.ledger_id, self.first_entry), rest, self.raw_bodies(keep))

    def raw_bodies(self, keep: npt.NDArray[np.bool_]) -> list[bytes | memoryview]:
        """The bytes of the bodies in a mask, in order, unverified. REQUIRES: kind is MESSAGES, `bodies_fit`."""
        edged = np.zeros(self.count + 2, dtype=np.bool_)
        edged[1:-1] = keep
        edges = np.flatnonzero(edged[1:] != edged[:-1])
        bounds = np.zeros(self.count + 1, dtype=np.int64)
        bounds[1:] = self.ends()
        value, at = self._region(0, int(bounds[-1])), bounds[edges].tolist()
        return [value[start:limit] for start, limit in zip(at[::2], at[1::2], strict=True)]

    def replaced(self) -> tuple[npt.NDArray[np.uint64], UInt32s]:
        """(ledger ids, entry ids) that conditional entries replace (views). REQUIRES: conditional."""
        at = HEADER_BYTES + 12 * self.count
        ledgers: npt.NDArray[np.uint64] = np.frombuffer(self._value, "<u8", self.count, at)
        entries: UInt32s = np.frombuffer(self._value, "<u4", self.count, at + 8 * self.count)
        return ledgers, entries

    def body(self, index: int) -> bytes | None:
        """The body at `index`, verified; None when compaction dropped it. Raises CorruptEntry."""
        body = self.body_view(index)
        return None if body is None else bytes(body)

    def body_view(self, index: int) -> memoryview | bytes | None:
        """Return the body where it lies: valid as long as the run."""
        value, count = self._value, self.count
        end_at = HEADER_BYTES + 4 * (count + index)
        # Before the first end stands the last due time; the first body begins at 0.
        start, end = _SPAN.unpack_from(value, end_at - 4)
        if not index:
            start = 0
        if start == end:
            return None
        data = self._apart() if self._data is None else self._data
        body = data[self._at + start : self._at + end]
        if len(body) != end - start:
            raise self._corrupt(self.first_entry + index, "body lies outside its run")
        if crc32(body) != _LOCATE.unpack_from(value, end_at + 4 * count)[0]:
            raise self._corrupt(self.first_entry + index, "body does not match its checksum")
        return body

    def body_views(self, indices: Sequence[int]) -> Iterator[memoryview | bytes | CorruptEntry | None]:
        """Return the bodies of entries in ascending order, where they lie; a damaged one comes as its error."""
        if len(indices) < _FEW:
            yield from map(self._body_or_error, indices)
            return
        first, limit = indices[0], indices[-1] + 1
        ends: list[int] = self._column(1)[max(first - 1, 0) : limit].tolist()
        if not first:
            ends.insert(0, 0)
        checksums: list[int] = self._column(2)[first:limit].tolist()
        begin = ends[0]
        bodies = memoryview(self._region(begin, ends[-1]))
        for index in indices:
            at = index - first
            body = bodies[ends[at] - begin : ends[at + 1] - begin]
            intact = len(body) == ends[at + 1] - ends[at] > 0 and crc32(body) == checksums[at]
            yield body if intact else self._body_or_error(index)

    def _body_or_error(self, index: int) -> memoryview | bytes | CorruptEntry | None:
        try:
            return self.body_view(index)
        except CorruptEntry as error:
            return error

    def raw_body(self, index: int) -> bytes:
        """The bytes of the body at `index` as far as they are there, unverified: for repair."""
        return bytes(self.body_region(index, index + 1)[2])

    def body_checksums(self) -> UInt32s:
        """The checksum of each body (a view). REQUIRES: kind is MESSAGES."""
        return self._column(2)

    def body_region(self, low: int, high: int) -> tuple[int, int, memoryview]:
        """(start, limit, bytes) of the bodies [low, high) on end, unverified; fewer bytes where the run is short.

        `start` and `limit` count from where bodies begin, as `ends` does.
        """
        ends = self.ends()
        start, limit = int(ends[low - 1]) if low else 0, int(ends[high - 1])
        return start, limit, memoryview(self._region(start, limit))

    def bodies(self) -> Iterator[tuple[int, bytes | CorruptEntry | None]]:
        """Every (entry id, body); a damaged one comes as the error that says so, and the rest goes on."""
        for entry_id, body in enumerate(self.body_views(range(self.count)), self.first_entry):
            yield entry_id, bytes(body) if isinstance(body, memoryview) else body

    def damaged_bodies(self) -> list[tuple[int, str]]:
        """(entry id, reason) of every body that does not match its checksum. O(bytes). REQUIRES: kind is MESSAGES."""
        bodies = self.body_views(range(self.count))
        return [(body.entry_id, body.reason) for body in bodies if isinstance(body, CorruptEntry)]


def whole_value(key: bytes, value: memoryview | bytes, read: ReadBodies | None) -> memoryview | bytes:
    """The value of a run with its bodies in it; that of one which cannot be read, as it is."""
    if len(value) < HEADER_BYTES or value[4] != APART_VERSION:
        return value
    try:
        return Run("", key, value, read).whole()
    except CorruptEntry:
        return value
