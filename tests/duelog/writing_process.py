"""A process that has a store open for writing while a test reads it: told what to do line by line.

Its clock is manual; every command is answered once it is done, so that a test knows what the store holds.
"""

import atexit
import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.conftest import HOUR_MS, present

START_MS = 1_790_000_000_000

_PROGRAM = """
import json, sys
from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.store.wal import write_batch

write_batch.LARGE_BYTES = 128
for line in sys.stdin:
    path, start_ms, fields = json.loads(line)
    clock = ManualClock(start_ms)
    with DelayedStore.open(path, StoreConfig(**fields), clock=clock) as store:
        print("null", flush=True)
        for line in sys.stdin:
            name, *values = json.loads(line)
            answer = None
            if name == "close":
                break
            if name == "subscribe":
                store.topic(values[0]).subscribe(values[1]).close()
            elif name == "send":
                topic, text, delays_ms = values
                messages = [Message(text.encode(), deliver_after=delay_ms / 1000) for delay_ms in delays_ms]
                answer = [str(sent) for sent in store.topic(topic).send_batch(messages)]
            elif name == "send_singly":
                topic, delays_ms = values
                for delay_ms in delays_ms:
                    store.topic(topic).send(b"", deliver_after=delay_ms / 1000)
            elif name == "advance":
                clock.advance(values[0])
                answer = store.tick().fired
            elif name == "live":
                topic, subscription, turns = values
                answer = 0
                with store.topic(topic).subscribe(subscription) as consumer:
                    for turn in range(turns):
                        delays = [float(delay) for delay in range(0, 14_400, 450)]
                        store.topic(topic).send_batch([Message(b"live", deliver_after=delay) for delay in delays])
                        clock.advance(1_800_000)
                        store.tick()
                        while batch := consumer.receive(1000):
                            answer += consumer.ack(batch)
            elif name == "drain":
                with store.topic(values[0]).subscribe(values[1]) as subscription:
                    answer = 0
                    while batch := subscription.receive(1000):
                        answer += subscription.ack(batch, durable=True)
                clock.advance(1000)
                store.tick()
            print(json.dumps(answer), flush=True)
    print("null", flush=True)
"""


class WritingProcess:
    """A child process that holds the store open for writing until the block ends; the next one may be the same."""

    _idle: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, path: Path, **config: Any) -> None:
        config.setdefault("partition_ms", HOUR_MS)
        if not self._idle:
            command = [sys.executable, "-c", _PROGRAM]
            self._idle.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self._process = self._idle.pop()
        self.do(str(path), START_MS, config)

    def answer(self) -> Any:
        """The answer to the oldest command that was asked and not answered."""
        line = present(self._process.stdout).readline()
        assert line, f"the writing process ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self, name: object, *values: object) -> None:
        """Have a command carried out while the caller goes on; `answer` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *values]) + "\n")
        self._process.stdin.flush()

    def answered(self) -> bool:
        """True if an answer is there."""
        return bool(select.select([present(self._process.stdout)], [], [], 0)[0])

    def do(self, name: object, *values: object) -> Any:
        """Have a command carried out; returns its answer."""
        self.ask(name, *values)
        return self.answer()

    def send(self, topic: str, text: str, *delays_ms: int) -> list[str]:
        """Send one message for each delay; returns their ids."""
        sent: list[str] = self.do("send", topic, text, delays_ms)
        return sent

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() == -signal.SIGKILL:
            end(self._process)
        else:
            self.do("close")
            self._idle.append(self._process)


def end(process: subprocess.Popen[str]) -> int:
    """Close the pipes of a process, which ends it, and wait for it."""
    present(process.stdin).close()
    present(process.stdout).close()
    return process.wait(timeout=60)


@atexit.register
def _end_all() -> None:
    for process in WritingProcess._idle:
        end(process)
