"""An SQLite table with an index on the due time, in WAL mode."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from .peer import Peer, poll


class SqlitePeer(Peer):
    """synchronous: FULL survives a power cut, NORMAL (the usual one) loses the last transactions."""

    def __init__(self, synchronous: Literal["FULL", "NORMAL"]) -> None:
        self._synchronous = synchronous

    def open(self, directory: Path, now_ms: int) -> None:
        self._db = sqlite3.connect(directory / "queue.db", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={self._synchronous}")
        self._db.execute("CREATE TABLE IF NOT EXISTS messages (id INTEGER PRIMARY KEY, due_ms INTEGER, payload BLOB)")
        self._db.execute("CREATE INDEX IF NOT EXISTS by_due ON messages (due_ms)")

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self._db.execute("INSERT INTO messages (due_ms, payload) VALUES (?, ?)", (due_ms, payload))

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        rows = zip(dues, payloads, strict=True)
        self._db.executemany("INSERT INTO messages (due_ms, payload) VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        return poll(lambda now: self._fetch(now, limit), now_ms, wait_seconds)

    def _fetch(self, now_ms: int, limit: int) -> list[bytes]:
        query = "SELECT id, payload FROM messages WHERE due_ms <= ? ORDER BY due_ms LIMIT ?"
        rows = self._db.execute(query, (now_ms, limit)).fetchall()
        if rows:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("DELETE FROM messages WHERE id = ?", [(row[0],) for row in rows])
            self._db.execute("COMMIT")
        return [row[1] for row in rows]

    def remove_due_before(self, limit_ms: int) -> None:
        self._db.execute("DELETE FROM messages WHERE due_ms < ?", (limit_ms,))

    def give_back(self) -> None:
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
