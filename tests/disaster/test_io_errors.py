"""System calls fail one by one, disks and maps are full: what was acknowledged stands, and the rest goes on.

io_child is the program whose calls fail.
"""

import contextlib
import itertools
import json
import os
import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import StoreFull
from duelog.store.env import environment as environment_module
from tests.conftest import OpenStore
from tests.disaster import io_child
from tests.disaster.loop_disk import full_soon
from tests.disaster.running import memory, module
from tests.disaster.test_power_cut import WHY_NOT
from tests.proof import sample
from tests.store.wal.segments import can_write_directly

pytestmark = pytest.mark.fault
strace = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

CALLS = list(itertools.product(["pwrite64", "pwritev2", "writev", "fdatasync"], ["EIO", "ENOSPC"]))
ROUNDS = 45
"""More than a round of io_child makes of any call, so that each of them fails once."""


@dataclass
class Round:
    """Facts of a child with one failing call."""

    reserved: list[str] = field(default_factory=lambda: ["first", "second", "waits"])
    maybe_gone: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    failures: list[tuple[Any, str]] = field(default_factory=list)
    went_on: bool = False


def run(base: Path, call: str, error: str) -> list[Round]:
    """A round for each of the first calls, in each of which that call fails with `error`."""
    io_child.prepare(base / "prepared")
    (base / "rounds").mkdir()
    arguments = (str(base / "prepared"), str(base / "rounds"), call, "60", str(ROUNDS))
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", f"trace={call}", "-e"]
    command += [f"inject={call}:error={error}:when=60", "-o", os.devnull]
    done = subprocess.run(
        [*command, *module("tests.disaster.io_child", *arguments)], capture_output=True, text=True, check=True
    )
    rounds: list[Round] = []
    for line in done.stdout.splitlines():
        kind, *rest = json.loads(line)
        if kind == "round":
            rounds.append(Round())
        elif kind == "sent":
            rounds[-1].reserved += rest[0]
        elif kind == "got":
            rounds[-1].maybe_gone.update(rest[0])
        elif kind == "acked":
            rounds[-1].gone.update(rest[0])
        elif kind == "failed":
            rounds[-1].failures.append((rest[0], rest[1]))
        elif kind == "went on":
            rounds[-1].went_on = True
        else:
            pytest.fail(f"round {len(rounds)}: {rest}")
    return rounds


def look_at(path: Path, said: Round) -> None:
    """Reopen a store as the next process would, and hold it against what was acknowledged."""
    clock = ManualClock(io_child.START_MS + 100_000)
    with DelayedStore.open(path, io_child.CONFIG, clock=clock) as store:
        assert list(store.check(deep=True)) == []
        clock.advance(1_000_000)
        reader = store.topic("a").subscribe("reader")
        came: Counter[str] = Counter()
        while messages := reader.receive(100, timeout=0):
            came.update(bytes(message.payload).rstrip(b".").decode() for message in messages)
            reader.ack(messages)
        assert set(said.reserved) - said.maybe_gone <= came.keys()
        assert not said.gone & came.keys()
        assert max(came.values(), default=1) == 1
        assert list(store.check()) == []


@strace
@pytest.mark.series
@pytest.mark.parametrize(("call", "error"), sample(CALLS, 3))
def test_whichever_call_fails_what_was_acknowledged_stands(call: str, error: str) -> None:
    """EIO is StoreFailed, no space is StoreFull and passes; a root page that is not written is in doubt. All reopen."""
    with tempfile.TemporaryDirectory(prefix="duelog-io-", dir=memory()) as folder:
        if call == "pwritev2" and not can_write_directly(Path(folder)):
            pytest.skip("the file system has no writes past the page cache")
        rounds = run(Path(folder), call, error)
        failed = [said for said in rounds if said.failures]
        assert len(failed) >= 6
        assert not rounds[-1].failures, "the last rounds were to come after the last call"
        for number, said in enumerate(rounds, 1):
            look_at(Path(folder) / "rounds" / str(number), said)
        firsts = Counter(said.failures[0][1] for said in failed)
        if error == "EIO":
            assert set(firsts) <= {"StoreFailed", "StoreUnavailable"}  # the latter at opening
        elif call == "pwrite64":
            assert set(firsts) == {"StoreFull", "StoreFailed"}  # data pages; root pages
        elif call == "pwritev2":
            assert set(firsts) == {"StoreFailed"}  # groups of the log
        else:
            assert firsts.keys() <= {"StoreFull", "StoreFailed"}
        for said in failed:
            if said.failures[0][1] == "StoreFull":
                assert len(said.failures) == 1, "one call without room must not stop what comes after it"
                assert said.went_on == (said.failures[0][0] not in (9, "open"))


CONFIG = StoreConfig(
    partition_ms=3_600_000, map_bytes=1 << 20, ledger_max_entries=20, ack_flush_ms=0, wal_bytes=16 << 10
)


def live_through_full(store: DelayedStore, clock: ManualClock, make_room: Callable[[], None]) -> None:
    """Fill a store until there is no space, read and acknowledge what is there, and go on when there is."""
    topic = store.topic("a")
    reader = topic.subscribe("reader")
    sent = [b"%d" % number for number in range(5)]
    topic.send_batch([Message(payload, deliver_after=60) for payload in sent])

    def fill() -> None:
        for number in range(10_000):
            payload = b"%d." % (len(sent) + number) + bytes(3_000)
            topic.send(payload)
            sent.append(payload)

    with pytest.raises(StoreFull) as caught:
        fill()
    assert str(caught.value.path) in str(caught.value)
    assert len(sent) > 50
    with pytest.raises(StoreFull):
        fill()  # a small one may still have found space in the write-ahead log
    got = [message.payload for message in reader.receive(20, timeout=0)]
    assert got == sent[5:25], "what is there is handed out"
    assert {found.code for found in store.check()} <= {"suspended"}
    clock.advance(100_000)  # now the delayed ones are to fire, for which there is no space
    messages = reader.receive(20, timeout=0)
    assert [message.payload for message in messages] == sent[25:45]
    make_room()
    topic.send(b"after")
    reader.ack(messages, durable=True)
    left: list[bytes] = []
    while messages := reader.receive(1_000, timeout=0):
        left += [message.payload for message in messages]
        reader.ack(messages)
    reader.close()
    reader = topic.subscribe("reader")  # what was received first and never acknowledged
    got = [message.payload for message in reader.receive(1_000, timeout=0)]
    assert got == sent[5:25]
    assert sorted(left) == sorted([*sent[45:], *sent[:5], b"after"])


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Sets how large a file this process may write; Python ignores the signal that says it was too large."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 4 MiB (or the parameter); skips where none can be mounted."""
    with full_soon(tmp_path / "disk", getattr(request, "param", 4)) as path:
        yield path


@pytest.mark.parametrize("full", ["map", "file", "disk"])
def test_what_is_full_passes_when_there_is_space(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, full: str
) -> None:
    """A map or, by `ulimit -f`, a file that may not grow; a disk, until another file is removed from it."""
    path = tmp_path
    if full == "map":
        monkeypatch.setattr(environment_module, "MAX_MAP_BYTES", 1 << 20)
        make_room = partial(monkeypatch.setattr, environment_module, "MAX_MAP_BYTES", 1 << 30)
    elif full == "file":
        limit = request.getfixturevalue("file_limit")
        limit(1 << 20)
        make_room = partial(limit, 1 << 30)
    else:
        path = request.getfixturevalue("small_disk")
        (path / "ballast").write_bytes(bytes(2 << 20))
        make_room = (path / "ballast").unlink
    with DelayedStore.open(path / "store", CONFIG, clock=clock) as store:
        live_through_full(store, clock, make_room)
        assert list(store.check(deep=True)) == []


def test_a_full_disk_is_freed_by_acknowledging(small_disk: Path, clock: ManualClock) -> None:
    """Sends stop while there is space for what the log holds: acknowledging and trimming make space for more."""
    with DelayedStore.open(small_disk / "store", replace(CONFIG, ack_flush_ms=100), clock=clock) as store:
        topic = store.topic("a")
        reader = topic.subscribe("reader")

        def fill() -> None:
            for _ in range(10_000):
                topic.send(bytes(3_000))

        for _ in range(5):
            with pytest.raises(StoreFull):
                fill()
            while messages := reader.receive(100, timeout=0):
                reader.ack(messages)
            clock.advance(1_000)
            store.tick()
            for _ in range(50):
                topic.send(bytes(3_000))


@pytest.mark.parametrize("small_disk", [24], indirect=True)
def test_a_disk_is_full_once_there_is_no_space_for_a_small_segment(small_disk: Path, clock: ManualClock) -> None:
    """The log has outgrown what is free: its next segment is smaller, and sends go on."""
    with DelayedStore.open(small_disk / "store", replace(CONFIG, wal_bytes=8 << 20), clock=clock) as store:
        topic = store.topic("a")

        def fill() -> None:
            for _ in range(10_000):
                topic.send(bytes(3_000))

        with pytest.raises(StoreFull) as refused:
            fill()
        assert (refused.value.free_bytes or 0) < 6 << 20
        assert list(store.check(deep=True)) == []


def test_a_partition_for_which_there_is_no_space_is_made_when_there_is(small_disk: Path, clock: ManualClock) -> None:
    """What is sent to it on a full disk stands in the log; a checkpoint without space leaves nothing behind."""
    ballast, partitions = small_disk / "ballast", small_disk / "store" / "partitions"
    with DelayedStore.open(small_disk / "store", CONFIG, clock=clock) as store:
        topic = store.topic("a")
        topic.send(b"first")
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        for hour in range(3):
            topic.send(b"x", deliver_after=3_600 * (hour + 1))
            with pytest.raises(StoreFull):
                store._engine.writer().apply_all()
        assert [*(small_disk / "store" / "staging").iterdir(), *partitions.iterdir()] == []
        ballast.unlink()
        store._engine.writer().apply_all()
        assert (store.stats().pending, len(list(partitions.iterdir()))) == (3, 3)
        assert list(store.check(deep=True)) == []


def test_a_full_disk_at_opening_changes_nothing(
    open_store: OpenStore, tmp_path: Path, file_limit: Callable[[int], None]
) -> None:
    """A store that cannot be made for want of space is made at the next try."""
    file_limit(4096)
    with pytest.raises(StoreFull):
        open_store()
    file_limit(1 << 30)
    open_store().topic("a").send(b"x")
    assert (tmp_path / "store" / "STORE").exists()
