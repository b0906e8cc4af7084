"""The delivery log: what was handed out, kept where a killed process leaves it behind.

Acknowledgements and failed deliveries are in the main environment, each some time after it happened. What is in flight
is in memory, and here: a mapped file, to which each batch that is handed out is appended, by no system call. Of a
process that died the next opening reads it (`recount`): whatever was handed out and is not acknowledged has had one
delivery more. It is not flushed, and names the boot of the machine that it is of: a power cut loses it, and nothing
else with it.

    <store>/attempts/000000000001.log := header record*          a file of 256 KiB, zero behind the last record
    header := crc:u32 version:u32 store_id:byte[16] boot_id:byte[16]
    record := crc:u32 subscription:u32 ledger:u64 times:u32 first:u32 last:u32 length:u32 bitmap:byte[length]

Entries `first` to `last` of a ledger, or those of the roaring bitmap, were handed out for the `times`-th time; `times`
0: what was noted of the subscription before does not count. Records are absolute, so reading one twice changes nothing.

A file that is full is followed by another. Then all that is still in flight is noted again (`carry`), and the files
before are removed. Where there is no space for a file, nothing is noted until there is: delivering goes on.
"""

import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pyroaring import BitMap

from duelog.store.codec.checksum import crc32
from duelog.store.codec.format import (
    ATTEMPTS_BLOCK_BITS,
    CursorRecord,
    FailedDeliveries,
    attempts_key,
    pack_attempts,
    unpack_attempts,
)
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import StoreFull
from duelog.store.files.process import here
from duelog.store.files.system_calls import reserve
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail

DIRECTORY = "attempts"
FILE_BYTES = 1 << 18
_VERSION = 1
_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<I16s16s")
_RECORD = struct.Struct("<IQIIII")
_BEGIN = 64
_LOGGER = logging.getLogger("duelog.attempts")

Noted = tuple[int, int, int, BitMap]
"""(subscription id, ledger id, times, entries); times 0: forget what came before."""

Handed = dict[int, dict[int, BitMap]]
"""By ledger id and times: the entries that were handed out for the so-many-th time."""


class DeliveryLog:
    """The delivery log of an open store. Thread-safe; calls about one subscription are made under its lock."""

    def __init__(self, path: Path, store_id: bytes) -> None:
        """path: the store's directory. New files are numbered after those that are there."""
        self._path = path / DIRECTORY
        self._header = _HEADER.pack(_VERSION, store_id, boot_id())
        before = log_files(path)  # of an opening that had no space to count them
        self._number = int(before[-1].stem) if before else 0
        self._files: list[Path] = []
        self._process = here.pid
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._at = 0
        self._file_bytes = FILE_BYTES
        self._holders: dict[int, Callable[[], None]] = {}
        self._closed = False
        self._failing = False

    def join(self, subscription_id: int, carry: Callable[[], None]) -> None:
        """Have `carry` note what is in flight of a subscription when asked to; it takes the subscription's lock."""
        self._holders[subscription_id] = carry

    def leave(self, subscription_id: int) -> None:
        """A subscription has nothing in flight until it joins again."""
        self._holders.pop(subscription_id, None)

    def note(self, subscription_id: int, ledger_id: int, entries: BitMap, times: int) -> None:
        """Entries of a ledger, at least one, were handed out for the `times`-th time. Raises nothing."""
        first, last = entries.min(), entries.max()
        bitmap = b"" if last - first + 1 == len(entries) else entries.serialize()
        self._append(_RECORD.pack(subscription_id, ledger_id, min(times, 2**32 - 1), first, last, len(bitmap)) + bitmap)

    def forget(self, subscription_id: int) -> None:
        self._append(_RECORD.pack(subscription_id, 0, 0, 0, 0, 0))

    def _append(self, record: bytes) -> None:
        sealed = _CRC.pack(crc32(record)) + record
        with self._lock:
            at = self._at
            if self._map is None or at + len(sealed) > len(self._map):
                if not self._begin_file(len(sealed)) or self._map is None:
                    return
                at = self._at
            self._map[at : at + len(sealed)] = sealed
            self._at = at + len(sealed)

    def _begin_file(self, least: int) -> bool:
        """Go on in a new file; False: there is to be none, or there is no space for it."""
        if self._closed or here.pid != self._process:
            return False
        size = max(self._file_bytes, _BEGIN + least)
        try:
            self._path.mkdir(exist_ok=True)
            target = self._path / f"{self._number + 1:012d}.log"
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                reserve(descriptor, size)
                following = mmap.mmap(descriptor, size)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._failing:
                _LOGGER.warning("deliveries are not noted, a crash will not count them: %s", error)
            self._failing = True
            return False
        following[: _CRC.size + len(self._header)] = _CRC.pack(crc32(self._header)) + self._header
        self._failing = False
        self._map, self._at = following, _BEGIN
        self._number += 1
        self._files.append(target)
        return True

    # -- upkeep ------------------------------------------------------------------------------------

    @property
    def worn(self) -> bool:
        """True if there are full files that `carry` would remove."""
        return len(self._files) > 1

    def carry(self) -> None:
        """Note again all that is in flight, and remove the files before. REQUIRES: no subscription's lock."""
        with self._lock:
            old = self._files[:-1]
        for holder in list(self._holders.values()):
            holder()
        with self._lock:
            if len(self._files) > len(old) + 1:  # it filled a file: let the next one be larger
                self._file_bytes *= 2
            for path in old:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            self._files = [path for path in self._files if path not in old]

    def discard(self) -> None:
        """The store closes in order: nothing that is in flight counts. Nothing is noted any more."""
        with self._lock:
            self._closed, self._map = True, None
            for path in self._files:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            self._files = []


def boot_id() -> bytes:
    """The boot of this machine, 16 bytes: another after a power cut. Zeros where the system does not say."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def log_files(path: Path) -> list[Path]:
    """The files of the delivery log of the store in `path`, oldest first."""
    return sorted((path / DIRECTORY).glob("[0-9]" * 12 + ".log"))


def read_log(file: Path, store_id: bytes) -> Iterator[Noted]:
    """Yield a file's records up to the first that is not whole; none if the file is of another store or boot."""
    content = file.read_bytes()
    header = _HEADER.pack(_VERSION, store_id, boot_id())
    if content[: _CRC.size + len(header)] != _CRC.pack(crc32(header)) + header:
        return
    at = _BEGIN
    while at + _CRC.size + _RECORD.size <= len(content):
        body = at + _CRC.size
        fields = _RECORD.unpack_from(content, body)
        subscription_id, ledger_id, times, first, last, length = fields
        limit = body + _RECORD.size + length
        if limit > len(content) or crc32(content[body:limit]) != _CRC.unpack_from(content, at)[0]:
            return
        entries = BitMap.deserialize(content[body + _RECORD.size : limit]) if length else BitMap(range(first, last + 1))
        yield subscription_id, ledger_id, times, entries
        at = limit


def recount(path: Path, store_id: bytes, main: Environment, now_ms: int) -> None:
    """Count what was handed out before a crash and is not acknowledged, and remove the log of it.

    Each such message has at least as many failed deliveries as it was handed out; that the last of them ended is put
    at `now_ms`. In one transaction. Where the disk is full the log stays, for the opening after this one.
    """
    files = log_files(path)
    if not files:
        return
    found: dict[int, Handed] = {}
    for file in files:
        for subscription_id, ledger_id, times, entries in read_log(file, store_id):
            if not times:
                found.pop(subscription_id, None)
                continue
            of_ledger = found.setdefault(subscription_id, {}).setdefault(ledger_id, {})
            of_ledger[times] = of_ledger.get(times, BitMap()) | entries

    def work(transaction: Transaction) -> int:
        cursors = [record for _, _, record in catalog.cursors(transaction.raw) if record.subscription_id in found]
        return sum(_count(transaction, cursor, found[cursor.subscription_id], now_ms) for cursor in cursors)

    try:
        counted = main.write(work) if found else 0
        if counted:
            main.flush()
            _LOGGER.info("%d messages were in flight when the store was left: counted as delivered", counted)
    except StoreFull:
        return
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _count(transaction: Transaction, cursor: CursorRecord, handed: Handed, now_ms: int) -> int:
    """Raise the counts of one subscription; how many messages are unacknowledged."""
    acked = dict(catalog.acked(transaction.raw, cursor.subscription_id))
    count = 0
    for ledger_id, by_times in handed.items():
        there = BitMap(range(find_tail(transaction.raw, "main", ledger_id)))
        if ledger_id < cursor.ledger_id:
            continue
        if ledger_id == cursor.ledger_id:
            there.remove_range(0, cursor.next_entry)
        if ledger_id in acked:
            there -= BitMap.deserialize(acked[ledger_id])
        times_of = {entry: times for times in sorted(by_times) for entry in by_times[times] & there}
        blocks: dict[int, dict[int, int]] = {}
        for entry_id, times in times_of.items():
            blocks.setdefault(entry_id >> ATTEMPTS_BLOCK_BITS, {})[entry_id] = times
        for block, of_block in blocks.items():
            key = attempts_key(cursor.subscription_id, ledger_id, block)
            fields = transaction.get(key)
            rows = {} if fields is None else unpack_attempts(block, fields)
            for entry_id, times in of_block.items():
                known = rows.get(entry_id, FailedDeliveries(0, now_ms, now_ms))
                if times > known.times:
                    rows[entry_id] = FailedDeliveries(times, known.first_ms, now_ms)
            transaction.put(key, pack_attempts(rows))
        count += len(times_of)
    return count
