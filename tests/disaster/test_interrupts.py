"""A program that goes on after Ctrl-C loses and doubles nothing: its main thread sends beside three others.

Whenever the store stops it is closed, opened again, and held against what was acknowledged. Ends with a line of JSON.

    python -m tests.disaster.test_interrupts DIR INTERRUPTS SEED
"""

import faulthandler
import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import DuelogError, StoreFailed
from tests.conftest import START_MS
from tests.disaster.running import module
from tests.proof import length

pytestmark = [pytest.mark.fault, pytest.mark.series]

CONFIG = StoreConfig(partition_ms=60_000, preload_ms=0, wal_bytes=64 << 10, max_clock_jump_ms=None)
PATIENCE_S = 60
SENDS_A_ROUND = 300
INTERRUPTS = length("DUELOG_INTERRUPTS", 20, 60)


class Program:
    """Messages sent and acknowledged, and counts of events."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.path = path
        self.acknowledged: set[str] = set()
        self.intended: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._armed = False
        self._number = 0
        self._mutex = threading.Lock()
        signal.signal(signal.SIGALRM, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def send(self, store: DelayedStore, rng: random.Random) -> None:
        """One message, or twenty together, over partitions that are there and new ones; each name once."""
        with self._mutex:
            count = rng.choice((1, 1, 1, 20))
            names = [str(self._number + at) for at in range(count)]
            self._number += count
            self.intended.update(names)
        dues = [START_MS + 60_000 * rng.randrange(1, 40) for _ in names]
        if count == 1:
            store.topic("t").send(names[0].encode(), deliver_at=dues[0])
        else:
            messages = [Message(name.encode(), deliver_at=due_ms) for name, due_ms in zip(names, dues, strict=True)]
            store.topic("t").send_batch(messages)
        with self._mutex:
            self.acknowledged.update(names)

    def round(self, interrupts: int) -> None:
        """Send until the store stops, or for a while; then it has everything, once."""
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        store = DelayedStore.open(self.path, CONFIG, clock=ManualClock(START_MS))
        halt = threading.Event()

        def beside(seed: int) -> None:
            rng = random.Random(seed)
            while not halt.is_set():
                try:
                    self.send(store, rng)
                except DuelogError:
                    return
                except BaseException as error:
                    self.wrong.append(f"a thread beside: {error!r}")
                    return

        threads = [threading.Thread(target=beside, args=(self.rng.randrange(1 << 30),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(SENDS_A_ROUND):
            if self.seen["interrupts"] >= interrupts:
                break
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, 0.0003 + self.rng.random() * 0.01)
                self.send(store, self.rng)
            except KeyboardInterrupt:
                self.seen["interrupts"] += 1
            except StoreFailed:
                self.seen["stopped"] += 1
                break
            except Exception as error:
                self.wrong.append(f"the main thread: {error!r}")
                break
            finally:
                self._armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        halt.set()
        for thread in threads:
            thread.join()
        store.close()
        self.look()
        faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """Open the store: it has what was acknowledged, each message once, and nothing that was not sent."""
        with DelayedStore.open(self.path, CONFIG, clock=ManualClock(START_MS)) as store:
            found = Counter(bytes(message.payload).decode() for message in store.topic("t").scheduled())
            self.wrong += [str(finding) for finding in store.check()]
        if lost := self.acknowledged - found.keys():
            self.wrong.append(f"lost: {sorted(lost)[:9]}")
        if twice := [name for name, count in found.items() if count > 1]:
            self.wrong.append(f"twice: {sorted(twice)[:9]}")
        if unknown := found.keys() - self.intended:
            self.wrong.append(f"never sent: {sorted(unknown)[:9]}")
        self.seen["opened"] += 1


def test_a_program_that_goes_on_after_interrupts_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Beside three threads that send: the store stops or goes on, and opened again it has each message once."""
    command = module("tests.disaster.test_interrupts", str(tmp_path / "store"), str(INTERRUPTS), "1")
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout)
    print(told)
    assert told["wrong"] == []
    assert told["interrupts"] >= INTERRUPTS


def main() -> None:
    """Go on until so many interrupts have come, or something is wrong."""
    program, interrupts = Program(Path(sys.argv[1]), int(sys.argv[3])), int(sys.argv[2])
    while program.seen["interrupts"] < interrupts and not program.wrong:
        program.round(interrupts)
    print(json.dumps({"wrong": program.wrong, "messages": len(program.acknowledged), **program.seen}))


if __name__ == "__main__":
    main()
