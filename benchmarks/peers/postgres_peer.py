"""A PostgreSQL table with an index on the due time; batches come by COPY, consumers take rows with SKIP LOCKED."""

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peer import Peer, has_module, module, poll
from .server import Server, free_port, program

_PLACES = "usr/lib/postgresql/*/bin/"

_COPY = "COPY messages (due_ms, payload) FROM STDIN (FORMAT binary)"

_TAKE = """
    WITH due AS (
        SELECT id FROM messages WHERE due_ms <= %s ORDER BY due_ms LIMIT %s FOR UPDATE SKIP LOCKED
    )
    DELETE FROM messages USING due WHERE messages.id = due.id RETURNING messages.due_ms, messages.payload
"""


def _program(name: str) -> str | None:
    return program(name, _PLACES + name)


class PostgresPeer(Peer):
    """PostgreSQL as installed (fsync and synchronous_commit on), so that it survives a power cut."""

    @classmethod
    def missing(cls) -> str | None:
        if _program("postgres") is None or _program("initdb") is None:
            return "apt-get install postgresql"
        return None if has_module("psycopg") else 'pip install "psycopg[binary]"'

    def open(self, directory: Path, now_ms: int) -> None:
        data = directory / "data"
        user = self._user()
        if not data.exists():
            data.mkdir()
            if user is not None:
                shutil.chown(data, user, user)
            subprocess.run(
                [_program("initdb") or "", "-D", str(data), "-U", "bench", "-A", "trust", "-E", "UTF8", "--locale=C"],
                user=user,
                group=user,
                check=True,
                cwd=data,
                stdout=subprocess.DEVNULL,
            )
        port = free_port()
        settings = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._psycopg = module("psycopg")
        self._url = f"host=127.0.0.1 port={port} user=bench dbname=postgres"
        command = [_program("postgres") or "", "-D", str(data), *options]
        self._server = Server(command, directory, self._answers, stop_signal=signal.SIGINT, user=user)
        self._db: Any = self._psycopg.connect(self._url, autocommit=True)
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS messages (id bigserial PRIMARY KEY, due_ms bigint NOT NULL, payload bytea)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS by_due ON messages (due_ms)")

    @staticmethod
    def _user() -> str | None:
        """PostgreSQL refuses to run as root; its package makes a user of its own."""
        if os.geteuid():
            return None
        return pwd.getpwnam("postgres").pw_name

    def _answers(self) -> bool:
        try:
            self._psycopg.connect(self._url).close()
        except self._psycopg.OperationalError:
            return False
        return True

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self._db.execute("INSERT INTO messages (due_ms, payload) VALUES (%s, %s)", (due_ms, payload))

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        with self._db.cursor() as cursor, cursor.copy(_COPY) as copy:
            copy.set_types(["int8", "bytea"])
            for row in zip(dues, payloads, strict=True):
                copy.write_row(row)

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        return poll(lambda now: self._fetch(now, limit), now_ms, wait_seconds)

    def _fetch(self, now_ms: int, limit: int) -> list[bytes]:
        with self._db.cursor(binary=True) as cursor:
            rows = cursor.execute(_TAKE, (now_ms, limit)).fetchall()
        rows.sort(key=lambda row: row[0])
        return [row[1] for row in rows]

    def remove_due_before(self, limit_ms: int) -> None:
        self._db.execute("DELETE FROM messages WHERE due_ms < %s", (limit_ms,))

    def give_back(self) -> None:
        self._db.execute("VACUUM FULL messages")

    def processes(self) -> list[int]:
        return self._server.processes

    def close(self) -> None:
        self._db.execute("CHECKPOINT")
        self._db.close()
        self._server.stop()
