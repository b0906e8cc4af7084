"""Machines that serve one store by turns, each a process of `duelog serve --standby` with a directory of its own."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue

from tests.ports import free_port
from tests.tools.command_line import DUELOG, ok

WITHIN_S = 120
SERVES, FOLLOWS = "is served at ", "this machine follows "


class Machines:
    """All processes, and what they print. `leader` and `follows` are as their last lines say."""

    def __init__(self, directory: Path, url: str, environment: Mapping[str, str] | None = None) -> None:
        """The file settings.toml in `directory` has the settings of each."""
        self._directory = directory
        self._url = url
        self._environment = {**os.environ, **(environment or {})}
        self._lines: Queue[tuple[str, str]] = Queue()
        self._readers: list[threading.Thread] = []
        self._commands: dict[str, list[str]] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.addresses: dict[str, tuple[str, str]] = {}
        """By name: where Pulsar's clients and those of `duelog.connect` find it."""
        self.said: list[str] = []
        self.leader = ""
        self.follows: dict[str, str] = {}
        """By name of a machine that follows another, that one."""

    def prepare(self, name: str, settings: str) -> None:
        """Make the store of the first machine, its copy, and the settings of all."""
        (self._directory / "settings.toml").write_text(settings, encoding="utf-8")
        ok("init", self._directory / name)
        ok("replica", "init", self._directory / name, self._url, "--no-probe")

    def add(
        self,
        name: str,
        host: str,
        port: int,
        listen: int,
        within: Sequence[str] = (),
        options: Sequence[str] = ("--standby",),
    ) -> None:
        """Begin a machine. within: a command that runs another, elsewhere. options: of `duelog serve`, besides."""
        self.addresses[name] = f"pulsar://{host}:{port}", f"duelog://{host}:{listen}"
        self._commands[name] = [
            *within, *DUELOG, "serve", str(self._directory / name), "--replica", self._url, "--host", host, *options,
            "--config", str(self._directory / "settings.toml"), "--port", str(port), "--listen", f"{host}:{listen}",
        ]  # fmt: skip
        self.begin(name)

    def join(self, name: str, *options: str, within: Sequence[str] = ()) -> None:
        """Begin a machine at free ports of localhost, and wait until it leads, or follows the one that does."""
        self.add(name, "localhost", free_port(), free_port(), within, options or ("--standby",))
        self.wait(lambda: name in (self.leader, *self.follows))
        self.wait(lambda: self.leader == name or self.follows[name] == self.leader)

    def begin(self, name: str) -> None:
        """Begin a process, or begin it again."""
        self.follows.pop(name, None)
        self.processes[name] = process = subprocess.Popen(
            self._commands[name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment
        )

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    self._lines.put((name, line))

        self._readers.append(threading.Thread(target=read))
        self._readers[-1].start()

    def wait(self, wanted: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        """Take what is printed until something holds. Raises TimeoutError, also where a process has ended."""
        deadline = time.monotonic() + within_s
        while not wanted():
            ended = [name for name, process in self.processes.items() if process.poll() not in (None, 0, -9)]
            try:
                self._take(*self._lines.get(timeout=0.1))
            except Empty:
                if ended or time.monotonic() > deadline:
                    raise TimeoutError(f"{ended or 'nothing'} ended: {''.join(self.said[-60:])}") from None

    def _take(self, name: str, line: str) -> None:
        self.said.append(f"{time.strftime('%X')} {name}: {line}")
        if SERVES in line:
            self.leader = name
            self.follows.pop(name, None)
        elif FOLLOWS in line:
            url = line.partition(FOLLOWS)[2].partition(",")[0].strip()
            self.follows[name] = next((other for other, (own, _) in self.addresses.items() if own == url), "")

    def is_settled(self) -> bool:
        """One leads, and all others follow it."""
        others = [name for name in self._commands if name != self.leader]
        return bool(self.leader) and [self.follows.get(name) for name in others] == [self.leader] * len(others)

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a process, and wait for it."""
        process = self.processes[name]
        process.send_signal(number)
        self.wait(lambda: process.poll() in (0, -signal.SIGKILL))

    def close(self) -> None:
        """Kill those that run."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
