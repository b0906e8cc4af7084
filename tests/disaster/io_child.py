"""The program whose system calls fail: one round for each call, all in children of one traced process.

strace makes the `when`-th call of a process fail and counts each process apart. So round k is a child that first
makes `when` - k calls of the same kind that do not matter, and then works: its own k-th call is the one that fails.
Each round has a copy of a prepared store. Facts, a JSON array a line on standard output:

    ["round", k]
    ["sent", [text, ...]]    send has returned        ["acked", [text, ...]]   ack(durable=True) has returned
    ["got", [text, ...]]     receive has returned     ["failed", step, error type]
    ["went on"]              the last send of the round has returned
    ["trouble", text]        what must never be

Arguments: the prepared store, a directory for the copies, the call, `when`, the number of rounds.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from duelog import DelayedStore, DuelogError, ManualClock, Message, StoreConfig

START_MS = 1_790_000_000_000
CONFIG = StoreConfig(partition_ms=3_600_000, ack_flush_ms=0, map_bytes=1 << 20, wal_bytes=16 << 10)


def say(*fact: object) -> None:
    """Tell one fact."""
    os.write(1, json.dumps(fact).encode() + b"\n")


def prepare(path: Path) -> None:
    """The store that every round begins with."""
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("a")
        topic.subscribe("reader").close()
        topic.send_batch([Message(b"first"), Message(b"second")])
        topic.send(b"waits", deliver_after=60)


def work(path: Path) -> None:
    """Send, fire, receive and acknowledge; an error is told, and the next step is tried."""
    clock = ManualClock(START_MS)
    try:
        store = DelayedStore.open(path, CONFIG, clock=clock)
    except DuelogError as error:
        say("failed", "open", type(error).__name__)
        return
    topic = store.topic("a")
    reader = topic.subscribe("reader")

    def send(*texts: str, after: float | None = None) -> Callable[[], None]:
        def step() -> None:
            if len(texts) == 1:
                topic.send(texts[0].encode(), deliver_after=after)
            else:
                topic.send_batch([Message(text.encode() + b"." * 5_000, deliver_after=after) for text in texts])
            say("sent", texts)

        return step

    def receive() -> None:
        messages = reader.receive(4, timeout=0)
        texts = [bytes(message.payload).rstrip(b".").decode() for message in messages]
        say("got", texts)
        if messages:
            reader.ack(messages, durable=True)
            say("acked", texts)

    def fire() -> None:
        clock.advance(100_000)
        store.tick()

    steps = (send("a"), send("b", after=50), send("c", "d", "e"), receive, send("f", "g", after=70), fire, receive)
    for number, step in enumerate((*steps, receive, send("h", after=200), send("i"))):
        try:
            step()
        except DuelogError as error:
            say("failed", number, type(error).__name__)
        else:
            if number == len(steps) + 2:
                say("went on")
    try:
        store.close()
    except DuelogError as error:
        say("failed", "close", type(error).__name__)


def main() -> None:
    """One child after the other."""
    prepared, copies, call, when, rounds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
    for number in range(1, rounds + 1):
        path = copies / str(number)
        shutil.copytree(prepared, path)
        child = os.fork()
        if not child:
            try:
                say("round", number)
                with tempfile.TemporaryFile() as scratch:
                    for _ in range(when - number):
                        if call == "fdatasync":
                            os.fdatasync(scratch.fileno())
                        elif call == "writev":
                            os.writev(scratch.fileno(), [b"x"])
                        elif call == "pwritev2":
                            os.pwritev(scratch.fileno(), [b"x"], 0)
                        else:
                            os.pwrite(scratch.fileno(), b"x", 0)
                work(path)
            except BaseException:
                say("trouble", traceback.format_exc())
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            say("trouble", f"round {number} ended with {status}")


if __name__ == "__main__":
    main()
