"""Two brokers with a placement table, or a proxy in front of one or two: `duelog serve` and `duelog proxy`."""

import os
import sys
import urllib.request
from pathlib import Path

from .served_peer import SERVE, ServedPeer
from .server import Server, accepts, free_port

_NAMESPACES = {"a": "public/default", "b": "public/second"}


class FleetPeer(ServedPeer):
    """A topic in a namespace of each broker; every second client works on the second one."""

    def __init__(self, *, brokers: int, proxied: bool) -> None:
        super().__init__(batching=False)
        self._names = "ab"[:brokers]
        self._proxied = proxied
        self._servers: list[Server] = []

    def open(self, directory: Path, now_ms: int) -> None:
        table = directory / "placement.toml"
        ports = {name: free_port() for name in self._names}
        http = {name: free_port() for name in self._names}
        lines = ['default = "a"']
        for name, port in ports.items():
            lines += [f"[brokers.{name}]", f'url = "pulsar://127.0.0.1:{port}"']
        lines += ["[namespaces]", *(f'"{_NAMESPACES[name]}" = "{name}"' for name in self._names)]
        table.write_text("\n".join(lines))
        for name, port in ports.items():
            self._start(directory / name, port, "serve", str(directory / name / "store"), "--http", str(http[name]),
                        "--placement", str(table), "--name", name)  # fmt: skip
        if "b" in http:
            url = f"http://127.0.0.1:{http['b']}/admin/v2/namespaces/{_NAMESPACES['b']}"
            request = urllib.request.Request(
                url, method="PUT", data=b"{}", headers={"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=30).close()
        self.port = ports["a"]
        if self._proxied:
            self.port = free_port()
            self._start(directory / "proxy", self.port, "proxy", "--placement", str(table))
        for number in range(len(self._names)):
            self.connect(self.port, number)
            self.consume()  # messages are kept for subscriptions that there are
            self._consumer.close()
            self._consumer = None
            self._client.close()
        self.connect(self.port, 0)

    def _start(self, directory: Path, port: int, *arguments: str) -> None:
        directory.mkdir()
        command = [sys.executable, "-c", SERVE, os.getcwd(), *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self._servers.append(Server(command, directory, lambda: accepts(port)))

    def connect(self, port: int, number: int) -> None:
        super().connect(port, number)
        self.topic = f"{_NAMESPACES[self._names[number % len(self._names)]]}/benchmark"

    def processes(self) -> list[int]:
        return [process for server in self._servers for process in server.processes]

    def close(self) -> None:
        self._client.close()
        for server in reversed(self._servers):
            server.stop()
