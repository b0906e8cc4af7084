"""Two machines that lead by turns as the leader is killed, stopped, or cut off: nothing that was told is lost.

`DUELOG_TAKEOVERS=1000` has so many takeovers made instead of 9.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from random import Random

import pytest

from duelog import DelayedStore, StoreConfig
from duelog.replica.bucket import Bucket
from duelog.replica.following import last_object
from tests.disaster.running import module
from tests.duelog.replica.faulty import restored
from tests.duelog.replica.seaweed import KEYS, seaweed
from tests.proof import length
from tests.tools.command_line import ok

pytestmark = [pytest.mark.kill, pytest.mark.series]

TAKEOVERS = length("DUELOG_TAKEOVERS", 9, 1_000)
A_PAIR = 9
NAMES = ("one", "two")
_BOUND_S = 60.0


class Pair:
    """Two processes, and all that clients of theirs were told."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        self.lines: Queue[tuple[str, str]] = Queue()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.readers: list[threading.Thread] = []
        self.began = 0
        self.told: dict[str, int] = {}
        self.sent: set[int] = set()
        self.cancelling: set[int] = set()
        self.cancelled: set[int] = set()
        self.epochs: list[int] = []
        self.counts: dict[str, int] = defaultdict(int)

    def begin(self, name: str) -> None:
        """Begin a process; each has numbers of its own."""
        self.began += 1
        command = module(
            "tests.duelog.replica.standby_child", str(self.directory / name), self.url, str(self.began * 1_000_000)
        )
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.processes[name] = process

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    if line.endswith("\n"):
                        self.lines.put((name, line.strip()))

        self.readers.append(threading.Thread(target=read))
        self.readers[-1].start()

    def hear(self, name: str, word: str) -> None:
        """Take what is printed until a process says a word."""
        said: list[str] = []
        while not said or said[-1].split()[:2] != [f"{name}:", word]:
            try:
                who, line = self.lines.get(timeout=_BOUND_S)
            except Empty:
                raise TimeoutError(f"{name} did not say {word!r}: {said[-20:]}") from None
            said.append(f"{who}: {line}")
            self.take(line)

    def take(self, line: str) -> None:
        """Note a line that was printed."""
        first, *rest = line.split() or [""]
        assert first != "Traceback", line
        self.counts[first] += 1
        if first == "sending":
            self.sent.add(int(rest[0]))
        elif first == "told":
            assert rest[1] not in self.told, f"{rest[1]} was told for {self.told[rest[1]]} and {rest[0]}"
            self.told[rest[1]] = int(rest[0])
        elif first == "cancelling":
            self.cancelling.add(int(rest[0]))
        elif first == "cancelled":
            self.cancelled.add(int(rest[0]))
        elif first == "leads":
            self.epochs.append(int(rest[0]))

    def end(self) -> None:
        """Kill both, and take what they have said before."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        for reader in self.readers:
            reader.join()
        while not self.lines.empty():
            self.take(self.lines.get()[1])


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of SeaweedFS."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as address:
        yield address


def test_nothing_told_as_replicated_is_lost_on_a_server(
    weed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that speaks S3, and is reached over a connection."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": weed}.items():
        monkeypatch.setenv(name, value)
    take_turns(f"s3://backups/{tmp_path.name}", TAKEOVERS + 1, tmp_path)


@pytest.mark.parametrize("seed", range(-(-TAKEOVERS // A_PAIR)))
def test_nothing_told_as_replicated_is_lost_by_takeovers(seed: int, tmp_path: Path) -> None:
    """Kills, stops and cuts by turns, in a directory."""
    take_turns((tmp_path / "copy").as_uri(), seed, tmp_path)


def take_turns(url: str, seed: int, tmp_path: Path) -> None:
    """No id is told twice, nothing cancelled is left, and each machine that was deposed follows the other."""
    random, pair = Random(seed), Pair(tmp_path, url)
    ok("init", tmp_path / "one", "--partition", "1h")
    ok("replica", "init", tmp_path / "one", pair.url, "--no-probe")
    try:
        pair.begin("one")
        pair.hear("one", "leads")
        pair.begin("two")
        leader, other = NAMES
        for _ in range(min(A_PAIR, TAKEOVERS)):
            for _ in range(random.randrange(1, 30)):
                pair.hear(leader, "told")
            event = random.choice(("killed", "stopped", "cut off"))
            process, cut = pair.processes[leader], tmp_path / f"{leader}.cut"
            if event == "killed":
                process.kill()
                process.wait()
            elif event == "stopped":
                os.kill(process.pid, signal.SIGSTOP)
            else:
                cut.touch()
            pair.hear(other, "leads")
            pair.hear(other, "told")
            if event == "killed":
                pair.begin(leader)
            elif event == "stopped":
                os.kill(process.pid, signal.SIGCONT)
            else:
                cut.unlink()
            leader, other = other, leader
    finally:
        pair.end()
    assert pair.epochs == sorted(set(pair.epochs))
    last = last_object(Bucket(pair.url))
    assert last is not None
    assert last.epoch >= pair.epochs[-1]
    restored(Bucket(pair.url), tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored", StoreConfig(partition_ms=3_600_000)) as store:
        assert list(store.check(deep=True)) == []
        found = [int(message.payload) for message in store.topic("a").scheduled()]
    assert len(found) == len(set(found))
    assert set(found) <= pair.sent
    assert set(pair.told.values()) - pair.cancelling <= set(found)
    assert not pair.cancelled & set(found)
    assert pair.counts["told"] > TAKEOVERS // A_PAIR
