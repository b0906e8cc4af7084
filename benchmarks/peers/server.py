"""A server process on the loopback interface that does not outlive its starter."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..harness.machine import children

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 30.0
_STOP_SECONDS = 60.0


def program(name: str, *places: str) -> str | None:
    """Path of a program, looked for on the path, in the usual folders, and by these patterns below /."""
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")))
    if found:
        return found
    for pattern in places:
        matches = sorted(Path("/").glob(pattern))
        if matches:
            return str(matches[-1])
    return None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A child process with its log in the directory. The kernel ends it when this process ends, whatever the way."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        ready: Callable[[], bool],
        *,
        stop_signal: signal.Signals = signal.SIGTERM,
        user: str | None = None,
    ) -> None:
        """Start, and wait until `ready`. Raises RuntimeError with the end of its log when it does not come up."""
        libc = ctypes.CDLL(None)

        def follow_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, int(stop_signal))

        self._stop_signal = stop_signal
        log = directory / "server.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                user=user,
                group=user,
                preexec_fn=follow_parent,  # noqa: PLW1509  # no thread has been started yet
            )
        limit = time.monotonic() + _START_SECONDS
        while True:
            if self._process.poll() is None and ready():
                return
            if self._process.poll() is not None or time.monotonic() > limit:
                self.stop()
                raise RuntimeError(f"{command[0]} did not start: {log.read_text(errors='replace')[-300:]}")
            time.sleep(0.02)

    @property
    def processes(self) -> list[int]:
        """The server and its children."""
        return children(self._process.pid)

    def stop(self) -> None:
        """End it in its own way, or by force when that takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(self._stop_signal)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def accepts(port: int) -> bool:
    """True if somebody listens on a port of 127.0.0.1."""
    with socket.socket() as connection:
        connection.settimeout(1.0)
        return connection.connect_ex(("127.0.0.1", port)) == 0
