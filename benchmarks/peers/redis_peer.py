"""A Redis sorted set: the due time is the score, id and payload are the member."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from .peer import Peer, has_module, module, poll
from .server import Server, accepts, free_port, program

_ID_BYTES = 8

_TAKE = """
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
if #found > 0 then redis.call('ZREM', KEYS[1], unpack(found)) end
return found
"""
"""The recipe for several consumers: a message is found and removed by one script, so that nobody else gets it."""


class RedisPeer(Peer):
    """appendfsync: always survives a power cut, everysec (the usual one) loses a second."""

    def __init__(self, appendfsync: Literal["always", "everysec"]) -> None:
        self._appendfsync = appendfsync
        self._server: Server | None = None
        self._shared = False

    @classmethod
    def missing(cls) -> str | None:
        if program("redis-server") is None:
            return "apt-get install redis-server"
        return None if has_module("redis") else "pip install redis"

    def open(self, directory: Path, now_ms: int) -> None:
        port = self.port = free_port()
        settings = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": directory,
            "save": "",
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "daemonize": "no",
        }
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        self._server = Server([program("redis-server") or "", *options], directory, lambda: accepts(port))
        self._client: Any = module("redis").Redis(host="127.0.0.1", port=port)
        self._client.ping()
        self._next_id = int(self._client.zcard("queue"))

    def connect(self, port: int, number: int) -> None:
        self._client = module("redis").Redis(host="127.0.0.1", port=port)
        self._take: Any = self._client.register_script(_TAKE)
        self._next_id = (number << 32) + int(self._client.zcard("queue"))
        self._shared = True

    def _member(self, payload: bytes) -> bytes:
        self._next_id += 1
        return self._next_id.to_bytes(_ID_BYTES, "big") + payload

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self._client.zadd("queue", {self._member(payload): due_ms})

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        self._client.zadd("queue", {self._member(p): d for p, d in zip(payloads, dues, strict=True)})

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        return poll(lambda now: self._fetch(now, limit), now_ms, wait_seconds)

    def _fetch(self, now_ms: int, limit: int) -> list[bytes]:
        if self._shared:
            return [member[_ID_BYTES:] for member in self._take(["queue"], [now_ms, limit])]
        members = self._client.zrangebyscore("queue", "-inf", now_ms, start=0, num=limit)
        if members:
            self._client.zrem("queue", *members)
        return [member[_ID_BYTES:] for member in members]

    def remove_due_before(self, limit_ms: int) -> None:
        self._client.zremrangebyscore("queue", "-inf", f"({limit_ms}")

    def give_back(self) -> None:
        self._wait_for_rewrite()  # one that Redis began by itself: another is refused meanwhile
        self._client.bgrewriteaof()
        self._wait_for_rewrite()

    def _wait_for_rewrite(self) -> None:
        while True:
            found = self._client.info("persistence")
            if not found["aof_rewrite_in_progress"] and not found["aof_rewrite_scheduled"]:
                return
            time.sleep(0.01)

    def processes(self) -> list[int]:
        return [] if self._server is None else self._server.processes

    def close(self) -> None:
        self._client.close()
        if self._server is not None:
            self._server.stop()
