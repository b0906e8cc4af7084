"""A store on the system clock under everything at once, for as long as one likes: `make torture ARGS="--minutes 60"`.

A child process sends (one by one, in batches, numbered), reschedules to 1 to 5 ms from now, cancels, replaces by a key
in transactions, receives, acknowledges and gives back, in several threads; beside that descriptors run short, SIGINT
strikes its main thread in whatever it is doing, stores are closed and opened again, and the parent kills the child, and
restores the copy that the store ships to. What was asked and what was answered goes into a log, which outlives the
child. At the end a child drains the store, the copy is held against it, and the log is judged:

- lost: a message that was acknowledged to its sender, not cancelled, never received;
- doubled: a message received at two positions of the main log, or twice as new by consumers of one open store;
- early: a message received before it was due, or before every time that was asked for;
- cancelled: a message received though it was said that it never would be;
- stuck: a store that does not close, or does not hand out what is due;
- raw: an error that is no DuelogError; found: what `check` finds at the end, in a copy, or is not in that.

Not a part of the suite: it takes the time that it is given, by the clock of the machine.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import DuelogError
from duelog.replica.bucket import Bucket
from duelog.replica.restoring import restore
from tests.disaster.running import module
from tests.disaster.torture_child import PARTITION_MS, copy_of
from tests.disaster.torture_child import main as child_main

_DRAIN_S = 900


def events(log: Path) -> Iterator[list[Any]]:
    """Events of a log, oldest first; a line cut off by a kill is passed over."""
    with log.open() as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def judge(log: Path, show: int = 5) -> Counter[str]:
    """Count what was asked and what went wrong; prints the first few of each wrong."""
    counts: Counter[str] = Counter()
    asked: dict[str, set[int]] = {}  # name -> due times that were asked for
    sure: set[str] = set()  # stored, as its sender was told
    gone: set[str] = set()  # cancelled, as its sender was told
    doubtful: set[str] = set()  # a cancellation or a reschedule of it was interrupted
    places: dict[str, str] = {}
    fresh: set[tuple[str, str]] = set()
    drained_ms = 0

    def wrong(kind: str, *what: object) -> None:
        counts[kind] += 1
        if counts[kind] <= show:
            print(kind, *what, flush=True)

    for kind, *rest in events(log):
        if kind == "try":
            name, due_ms = rest
            asked.setdefault(name, set()).add(due_ms)
        elif kind == "stored":
            counts["stored"] += len(rest[0])
            sure.update(rest[0])
        elif kind == "move":
            asked[rest[0]].add(rest[1])
            doubtful.add(rest[0])
        elif kind == "moved":
            name, due_ms, done = rest
            counts["rescheduled"] += done
            doubtful.discard(name)
            asked[name] = {due_ms} if done else asked[name]
            if not done:
                wrong("lost", name, "could not be rescheduled though it was not due for minutes")
        elif kind == "cancel":
            doubtful.add(rest[0])
        elif kind == "cancelled":
            doubtful.discard(rest[0])
            if rest[1]:
                counts["cancelled"] += 1
                gone.add(rest[0])
        elif kind == "got":
            session, name, place, due_ms, now_ms, times = rest
            counts["received"] += 1
            if places.setdefault(name, place) != place:
                wrong("doubled", name, "at", places[name], "and", place)
            if not times and (session, name) in fresh:
                wrong("doubled", name, "twice as new in session", session)
            fresh.add((session, name))
            if now_ms < due_ms or due_ms < min(asked[name]):  # a time that has passed is the time it was asked at
                wrong("early", name, "due", due_ms, "received", now_ms, "asked for", asked.get(name))
            if name in gone:
                wrong("came though cancelled", name)
        elif kind == "drained":
            (drained_ms,) = rest
        elif kind in ("raw", "stuck", "found"):
            wrong(kind, *rest)
        else:
            counts[kind] += 1
    if not drained_ms:
        wrong("stuck", "the store was not drained: what is lost is not known")
    for name in sorted(sure - gone - doubtful - places.keys()):
        if max(asked[name]) < drained_ms:
            wrong("lost", name, asked[name])
    return counts


def run(directory: Path, seconds: float, seed: int) -> Counter[str]:
    """Torture a store in `directory` for so long, drain it, and judge."""
    rng = random.Random(seed)
    log = directory / "log"
    log.touch()
    until = time.monotonic() + seconds
    lives = 0
    while time.monotonic() < until:
        lives += 1
        child = _start(directory, rng.randrange(1 << 30), min(rng.uniform(10, 60), until - time.monotonic()))
        killed = rng.random() < 0.5
        try:
            child.wait(rng.uniform(3, 40) if killed else 180)
        except subprocess.TimeoutExpired:
            if not killed:
                _note(log, "stuck", "a child did not end")
            child.kill()
            child.wait()
            _note(log, "kills")
        if child.returncode not in (0, -signal.SIGKILL):
            _note(log, "raw", f"a child ended with status {child.returncode}")
        _restore(directory, log)
        if lives % 10 == 0:
            print(f"{lives} lives, {int(until - time.monotonic())} s to go", flush=True)
    child = _start(directory, 0, 0)
    try:
        child.wait(_DRAIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        _note(log, "stuck", "the store was not drained in time")
    if _restore(directory, log) != _waiting(directory / "store"):
        _note(log, "found", "other messages wait in the copy than in the store")
    counts = judge(log)
    counts["lives"] = lives
    return counts


def _restore(directory: Path, log: Path) -> set[tuple[str, int, bytes]]:
    """Restore the copy, note what `check` finds in it, and return what waits there."""
    restored = directory / "restored"
    bucket = Bucket(copy_of(directory))
    if not bucket.manifests():  # a child was killed before it had made one
        return set()
    try:
        restore(bucket, restored)
        with _opened(restored) as store:
            for finding in store.check(deep=True):
                _note(log, "found", "restored", finding.code, finding.message)
        return _waiting(restored)
    except DuelogError as error:
        _note(log, "found", "restored", str(error))
        return set()
    finally:
        _note(log, "restores")
        shutil.rmtree(restored, ignore_errors=True)


def _waiting(path: Path) -> set[tuple[str, int, bytes]]:
    """What waits in a store."""
    with _opened(path) as store:
        return {
            (topic.name, message.due_ms, bytes(message.payload))
            for topic in store.topics()
            for message in store.topic(topic.name).scheduled()
        }


def _opened(path: Path) -> DelayedStore:
    """Open a store at a time when nothing of it is due."""
    return DelayedStore.open(path, StoreConfig(partition_ms=PARTITION_MS), clock=ManualClock(1))


def _start(directory: Path, seed: int, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(module("tests.disaster.torture", "--child", str(directory), str(seed), str(seconds)))


def _note(log: Path, *event: object) -> None:
    with log.open("a") as file:
        file.write(json.dumps(event) + "\n")


WRONG = ("lost", "doubled", "early", "came though cancelled", "stuck", "raw", "found")


def main() -> int:
    """Run and print what was done and what went wrong; exit status 1 if anything did."""
    if sys.argv[1:2] == ["--child"]:
        return child_main(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--directory", type=Path, help="an empty or absent one, kept; a temporary one if left out")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="duelog-torture-") as scratch:
        directory = arguments.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        counts = run(directory, arguments.minutes * 60, arguments.seed)
    did = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if name not in WRONG)
    print(did)
    print(", ".join(f"{name} {counts[name]}" for name in WRONG))
    return int(any(counts[name] for name in WRONG))


if __name__ == "__main__":
    sys.exit(main())
