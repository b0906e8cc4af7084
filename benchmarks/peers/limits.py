"""The limits: the same bytes with nothing around them. They keep no due times, so they deliver in append order."""

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb

from ..harness.load import DAY_MS
from .peer import Peer

_KEY = struct.Struct(">BQI")
_DAYS = 7
_SCRATCH_BYTES = 1 << 34
_IN_PLACE_BYTES = 1 << 24
_SECTOR_BYTES = 512


class RawLmdbPeer(Peer):
    """Seven environments, one for each day, a value for each message under keys of duelog's size, appended.

    A batch is as many commits as it has days, side by side, as with duelog.
    """

    def open(self, directory: Path, now_ms: int) -> None:
        self._environments = []
        for day in range(_DAYS):
            path = directory / f"day{day}"
            self._environments.append(
                lmdb.open(str(path), map_size=_SCRATCH_BYTES, meminit=False, readahead=False, lib_version=0)
            )
        self._next = [0] * _DAYS
        self._read = [0] * _DAYS
        self._day = 0
        self._pool = ThreadPoolExecutor(_DAYS + 1)

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self._append(due_ms // DAY_MS % _DAYS, [payload])

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        days: list[list[bytes]] = [[] for _ in range(_DAYS)]
        for payload, due_ms in zip(payloads, dues, strict=True):
            days[due_ms // DAY_MS % _DAYS].append(payload)
        jobs = [self._pool.submit(self._append, day, rows) for day, rows in enumerate(days) if rows]
        for job in jobs:
            job.result()

    def _append(self, day: int, payloads: list[bytes]) -> None:
        first = self._next[day]
        items = [(_KEY.pack(0xF0, 1, first + at), payload) for at, payload in enumerate(payloads)]
        with self._environments[day].begin(write=True) as transaction:
            consumed, added = transaction.cursor().putmulti(items, append=True)
        if consumed != added or added != len(items):
            raise RuntimeError("a key was not past the end")
        self._next[day] += len(items)

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        """Read the next values of one day and delete them, one commit."""
        while self._day < _DAYS and self._read[self._day] == self._next[self._day]:
            self._day += 1
        if self._day == _DAYS:
            return []
        found: list[bytes] = []
        with self._environments[self._day].begin(write=True) as transaction:
            cursor = transaction.cursor()
            more = cursor.set_range(_KEY.pack(0xF0, 1, self._read[self._day]))
            while more and len(found) < limit:
                found.append(cursor.value())
                more = cursor.delete() and bool(cursor.key())
        self._read[self._day] += len(found)
        return found

    def close(self) -> None:
        self._pool.shutdown()
        for environment in self._environments:
            environment.close()


class RawFilePeer(Peer):
    """One file that grows, a write and an fdatasync for each message or batch."""

    def open(self, directory: Path, now_ms: int) -> None:
        self._file = os.open(directory / "log", os.O_CREAT | os.O_RDWR, 0o600)
        self._read = 0
        self._size = 0

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self.schedule_batch([payload], [due_ms])

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        self._size = len(payloads[0])
        os.write(self._file, b"".join(payloads))
        os.fdatasync(self._file)

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        """Read on; nothing is acknowledged."""
        data = os.pread(self._file, limit * self._size, self._read)
        self._read += len(data)
        return [data[at : at + self._size] for at in range(0, len(data), self._size)]

    def close(self) -> None:
        os.close(self._file)


class PreallocatedFilePeer(RawFilePeer):
    """One file of 16 MiB, written over again at sectors: a write and an fdatasync for each message or batch."""

    def open(self, directory: Path, now_ms: int) -> None:
        super().open(directory, now_ms)
        os.write(self._file, bytes(_IN_PLACE_BYTES))
        os.fsync(self._file)
        self._at = 0

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        content = b"".join(payloads)
        if self._at + len(content) > _IN_PLACE_BYTES:
            self._at = 0
        os.pwrite(self._file, content, self._at)
        os.fdatasync(self._file)
        self._at += len(content) + -len(content) % _SECTOR_BYTES

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        """Nothing: what was written first is overwritten."""
        return []
