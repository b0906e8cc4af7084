"""An environment: commits, what fails in them and in opening, and what its guards keep from happening."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lmdb
import pytest

from duelog.store.codec.format import run_key
from duelog.store.env import commit_queue
from duelog.store.env import environment as environment_module
from duelog.store.env.body_file import body_file
from duelog.store.env.commit_queue import CommitQueue, Request
from duelog.store.env.environment import Environment
from duelog.store.env.reader_gate import ReaderGate
from duelog.store.env.transaction import Transaction
from duelog.store.errors import BrokenInvariant, ClosedError, DamagedStore, ResourceShortage, StoreFailed, StoreFull
from duelog.store.files.directory import InPlace
from duelog.store.listener import StoreListener
from tests.conftest import in_threads, present, raising
from tests.store import commits
from tests.store.commits import BULK, KEY, PATIENCE_S, outcomes_of, putting, raw_value, spy_on, until


@pytest.mark.parametrize(("place", "error"), [(1, LookupError("not today")), (0, KeyboardInterrupt())])
def test_a_unit_of_work_that_fails_harms_no_neighbour(
    environment: Environment, place: int, error: BaseException
) -> None:
    """Its puts are not stored, its callback is not called, its error reaches its caller alone; others are stored.

    Also by the next leader, where the one that leads is interrupted.
    """
    heard: list[str] = []

    def failing(transaction: Transaction) -> None:
        transaction.put(b"\x01bad", b"v")
        transaction.after_commit(lambda: heard.append("failed"))
        raise error

    works: list[Callable[[Transaction], None]] = [putting(b"\x01a", b"v"), putting(b"\x01b", b"v")]
    works.insert(place, failing)
    outcomes = outcomes_of(environment, works)
    assert type(outcomes.pop(place)) is type(error)
    assert outcomes == [None, None]
    assert environment.get(b"\x01a") == environment.get(b"\x01b") == b"v"
    assert environment.get(b"\x01bad") is None
    assert not heard
    environment.write(putting(KEY, b"goes on"))


def test_effects_in_memory_come_in_commit_order(environment: Environment) -> None:
    """Callbacks after the commit run in the order of the transactions, over many threads."""
    heard: list[int] = []

    def take_number(transaction: Transaction) -> None:
        number = int(transaction.get(KEY) or b"0")
        transaction.put(KEY, b"%d" % (number + 1))
        transaction.after_commit(lambda: heard.append(number))

    in_threads([lambda: [environment.write(take_number) for _ in range(25)]] * 6)
    assert heard == list(range(150))
    assert environment.counts.commits == 150


def test_writing_inside_a_read_transaction_is_refused(environment: Environment) -> None:
    """It could wait for ever for a map that cannot grow while it reads."""
    with environment.read(), pytest.raises(BrokenInvariant, match="inside a read"):
        environment.write(putting(KEY, b"v"))


def test_a_full_map_grows_under_readers(environment: Environment) -> None:
    """Writing 16 MiB into a map of 1 MiB loses nothing and disturbs no reader."""
    spy = spy_on(environment)
    turns = threading.Semaphore(0)
    wrong: list[object] = []

    def read() -> None:
        for _ in range(32):
            turns.acquire()
            with environment.read() as raw:
                wrong.extend(len(value) for _, value in raw.cursor() if len(value) != len(BULK) + 4)

    def put_some(first: int) -> None:
        def work(transaction: Transaction) -> None:
            for number in range(first, first + 16):
                transaction.put(b"\x01%03d" % number, BULK)

        environment.write(work)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for first in range(0, 512, 16):
        turns.release(3)
        put_some(first)
    for reader in readers:
        reader.join()
    assert not wrong
    assert environment.map_bytes >= 16 << 20
    assert all(environment.get(b"\x01%03d" % number) == BULK for number in range(512))
    assert spy.readers_at_growth
    assert set(spy.readers_at_growth) == {0}


def test_growth_waits_for_a_reader_that_enters_again(environment: Environment) -> None:
    """A thread that reads may read once more inside, also while a writer waits to grow the map."""
    writer = threading.Thread(target=lambda: environment.write(putting(KEY, bytes(2 << 20))))
    environment.write(putting(b"\x01old", b"v"))
    with environment.read() as raw:
        value = raw_value(raw, b"\x01old")
        writer.start()
        until(lambda: environment._gate.wanted)
        assert environment.get(b"\x01old") == b"v"
        assert value.startswith(b"v")
        assert writer.is_alive()
    writer.join()
    assert environment.get(KEY) == bytes(2 << 20)


def test_work_runs_again_after_growth_and_is_stored_once(environment: Environment) -> None:
    """The transaction that met the full map is dead: every unit of it is done once more, with one outcome."""
    runs: list[str] = []

    def work(transaction: Transaction) -> int:
        runs.append("small")
        number = int(transaction.get(KEY) or b"0") + 1
        transaction.put(KEY, b"%d" % number)
        transaction.put(b"\x01big", bytes(3 << 20))
        return number

    assert environment.commit(work) == 1
    assert len(runs) > 1
    assert environment.get(KEY) == b"1"


def test_a_map_at_its_bound_is_full_and_goes_on_when_there_is_space(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """StoreFull names the size; what was there stays, smaller things still go in, and space cures it."""
    monkeypatch.setattr(environment_module, "MAX_MAP_BYTES", 1 << 20)
    environment.write(putting(b"\x01old", b"v"))
    with pytest.raises(StoreFull, match="1048576"):
        environment.write(putting(KEY, bytes(2 << 20)))
    assert environment.get(KEY) is None
    environment.write(putting(b"\x01small", b"v"))
    monkeypatch.setattr(environment_module, "MAX_MAP_BYTES", 1 << 30)
    environment.write(putting(KEY, bytes(2 << 20)))
    assert environment.get(b"\x01old") == environment.get(b"\x01small") == b"v"


def test_close_waits_for_readers(environment: Environment) -> None:
    """A reader finishes in peace; a later one is refused."""
    environment.write(putting(KEY, b"v"))
    closer = threading.Thread(target=environment.close)
    with environment.read() as raw:
        closer.start()
        until(lambda: environment._gate.wanted)
        assert raw_value(raw, KEY).startswith(b"v")
        assert closer.is_alive()
    closer.join()
    with pytest.raises(ClosedError, match="main is closed"):
        environment.get(KEY)
    with pytest.raises(ClosedError):
        environment.write(putting(KEY, b"v"))
    environment.close()


def test_close_waits_for_the_commit_under_way(environment: Environment) -> None:
    """Its caller has its answer; requests queued after it are told that it is closed, or committed."""
    closer = threading.Thread(target=environment.close)

    def work(transaction: Transaction) -> None:
        closer.start()
        until(lambda: environment._closed)
        transaction.put(KEY, b"v")

    environment.write(work)
    closer.join()
    again = Environment(environment.path, name="main")
    assert again.get(KEY) == b"v"
    again.close()


def interrupting(transaction: Transaction) -> None:
    """A unit of work during which its thread is interrupted."""
    raise KeyboardInterrupt


def test_a_listener_that_raises_after_the_commit_makes_no_stored_message_an_error(environment: Environment) -> None:
    """The commit stands for all of the group, and nothing is done twice."""

    def count(transaction: Transaction) -> None:
        transaction.put(KEY, b"%d" % (int(transaction.get(KEY) or b"0") + 1))

    class Interrupting(StoreListener):
        def committed(self, environment: str, elapsed_ns: int, requests: int, entries: int) -> None:
            raise KeyboardInterrupt

    environment._listeners = [Interrupting()]
    assert outcomes_of(environment, [count, count, count]) == [None, None, None]
    assert environment.get(KEY) == b"3"
    environment.write(count)
    assert environment.get(KEY) == b"4"


def test_an_interrupt_between_commit_and_memory_closes_for_writing(environment: Environment) -> None:
    """Where memory may lag behind the disk nothing more is written until the environment is opened again."""

    def interrupted(transaction: Transaction) -> None:
        transaction.put(KEY, b"v")
        transaction.after_commit(lambda: interrupting(transaction))

    outcomes = outcomes_of(environment, [interrupted, putting(b"\x01a", b"v")])
    assert isinstance(outcomes[0], KeyboardInterrupt)
    assert isinstance(outcomes[1], StoreFailed)
    with pytest.raises(StoreFailed, match="KeyboardInterrupt"):
        environment.write(putting(KEY, b"w"))
    assert environment.get(KEY) == b"v"


def test_a_commit_in_doubt_closes_for_writing_and_reading_goes_on(environment: Environment) -> None:
    """Every request in that commit gets StoreFailed, and so does every later writer, until it is opened again."""
    environment.write(putting(b"\x01old", b"v"))
    spy = spy_on(environment)
    spy.fail_commit = lmdb.Error("mdb_txn_commit: Input/output error")
    outcomes = outcomes_of(environment, [putting(KEY, b"1"), putting(KEY, b"2")], first=spy.disarmed)
    assert [type(outcome) for outcome in outcomes] == [StoreFailed, StoreFailed]
    with pytest.raises(StoreFailed, match=r"Input/output error.*reopen"):
        environment.write(putting(KEY, b"3"))
    assert isinstance(environment.failed, StoreFailed)
    assert environment.failed.path == environment.path
    assert environment.get(b"\x01old") == b"v"
    environment.close()
    again = Environment(environment.path, name="main")
    again.write(putting(KEY, b"4"))
    assert again.get(KEY) == b"4"
    again.close()


def test_a_commit_that_breaks_off_leaves_no_transaction_open(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error was, and though it is kept with its traceback: other threads would wait for ever."""
    monkeypatch.setattr(commits._SpiedTransaction, "commit", raising(MemoryError()))
    spy_on(environment)
    with pytest.raises(MemoryError) as kept:
        environment.write(putting(KEY, b"v"))
    thread = threading.Thread(target=lambda: environment._env.begin(write=True).abort(), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert kept.value.__traceback__ is not None
    assert isinstance(environment.failed, StoreFailed)


def test_a_full_disk_is_store_full_and_writing_goes_on(environment: Environment) -> None:
    """Nothing of the commit is stored, every request in it is told, and the next one is tried as usual."""
    environment.write(putting(b"\x01old", b"v"))
    spy = spy_on(environment)
    spy.fail_commit = lmdb.DiskError("mdb_txn_commit: No space left on device")
    (full,) = outcomes_of(environment, [putting(KEY, b"1")], first=spy.disarmed)
    assert isinstance(full, StoreFull)
    assert full.path == environment.path
    assert full.free_bytes is not None
    assert environment.failed is None
    assert environment.get(KEY) is None
    environment.write(putting(KEY, b"3"))
    assert environment.get(b"\x01old") == b"v"


@pytest.mark.parametrize("step", ["begin", "sync"])
def test_a_step_that_fails_closes_for_writing(tmp_path: Path, step: str) -> None:
    """The error has LMDB's reason; an fsync is never tried again and then called durable."""
    environment = Environment(tmp_path / "main", name="main", durability="none", create=True)
    environment.write(putting(KEY, b"v"))
    setattr(spy_on(environment), f"fail_{step}", lmdb.DiskError("mdb: Input/output error"))
    with pytest.raises(StoreFailed, match="Input/output"):
        environment.sync() if step == "sync" else environment.write(putting(KEY, b"w"))
    with pytest.raises(StoreFailed):
        environment.write(putting(KEY, b"w"))
    environment.close()


@pytest.fixture
def reopened(environment: Environment) -> Iterator[Environment]:
    """An environment with a row, opened again: nothing was committed by it."""
    environment.write(putting(KEY, b"v"))
    environment.close()
    with closing(Environment(environment.path, name="main", durability="relaxed")) as again:
        yield again


def test_an_environment_that_is_only_read_is_open_for_reading_alone(reopened: Environment) -> None:
    """LMDB keeps pages for one that is open for writing: it is from its first commit on, behind the rows there are."""
    reopened.sync()
    assert (reopened.get(KEY), reopened.takes_commits) == (b"v", False)
    reopened.write(putting(b"\x01w", b"w"))
    assert (reopened.get(KEY), reopened.get(b"\x01w"), reopened.takes_commits) == (b"v", b"w", True)


def test_a_commit_does_not_wait_for_a_held_read(reopened: Environment) -> None:
    """A backup may hold it for long: what is held is open for writing already."""
    held = reopened.hold()
    reopened.write(putting(b"\x01w", b"w"))
    assert held.raw.get(b"\x01w") is None
    held.release()


def test_a_first_commit_without_a_descriptor_is_tried_again_and_reading_goes_on(
    reopened: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has failed: LMDB's environment is open for reading as before."""
    lmdb_open = lmdb.open

    def short(path: str, **settings: Any) -> lmdb.Environment:
        if not settings["readonly"]:
            raise lmdb.Error(f"{path}: {os.strerror(errno.EMFILE)}")
        return lmdb_open(path, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", short)
        with pytest.raises(ResourceShortage):
            reopened.write(putting(KEY, b"w"))
        assert (reopened.get(KEY), reopened.failed) == (b"v", None)
    reopened.write(putting(KEY, b"w"))
    assert reopened.get(KEY) == b"w"


def test_the_first_commit_does_not_go_to_another_file_that_has_taken_the_place(
    reopened: Environment, tmp_path: Path
) -> None:
    """It is opened again by its name, and another store may have been moved there since it was read."""
    with closing(Environment(tmp_path / "other", name="other", create=True)) as other:
        other.write(putting(KEY, b"theirs"))
    os.rename(tmp_path / "other" / "data.mdb", reopened.path / "data.mdb")
    with pytest.raises(StoreFailed, match="removed or moved"):
        reopened.write(putting(KEY, b"ours"))
    assert reopened.get(KEY) == b"theirs"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, os.strerror(errno.EIO), "data.mdb")])
def test_a_reopening_that_breaks_off_closes_for_writing_and_reading_goes_on(
    reopened: Environment, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whatever broke it off: what is known is only what can be read."""

    def breaks_off(self: InPlace) -> None:
        raise error

    monkeypatch.setattr(InPlace, "verify", breaks_off)
    with pytest.raises((KeyboardInterrupt, StoreFailed)):
        reopened.write(putting(KEY, b"w"))
    with pytest.raises(StoreFailed):
        reopened.write(putting(KEY, b"w"))
    assert reopened.get(KEY) == b"v"


def test_a_program_that_caught_an_interrupt_as_a_read_ended_may_write(environment: Environment) -> None:
    """Its traceback keeps the block, which is left all the same: the store would stop at a write inside a read."""

    class Interrupted:
        def abort(self) -> None:
            raise KeyboardInterrupt

    read = environment.read()
    try:
        with read:
            read._raw = Interrupted()  # type: ignore[assignment]
    except KeyboardInterrupt:
        environment.write(putting(KEY, b"v"))
    assert environment.get(KEY) == b"v"


def test_sync_does_nothing_where_every_commit_is_durable(environment: Environment, tmp_path: Path) -> None:
    """And is done once for many commits where they are not."""
    spy = spy_on(environment)
    environment.write(putting(KEY, b"v"))
    environment.sync()
    assert spy.syncs == 0
    relaxed = Environment(tmp_path / "relaxed", name="relaxed", durability="none", create=True)
    spy = spy_on(relaxed)
    for _ in range(3):
        relaxed.write(putting(KEY, b"v"))
    relaxed.sync()
    relaxed.sync()
    assert spy.syncs == 1
    relaxed.close()


def test_a_sync_that_was_interrupted_is_made_by_the_next(tmp_path: Path) -> None:
    """What asked for it goes on after the interrupt, and would release the log for rows that are not on disk."""
    with closing(Environment(tmp_path / "main", name="main", durability="relaxed", create=True)) as environment:
        environment.write(putting(KEY, b"v"))
        spy = spy_on(environment)
        spy.fail_sync = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            environment.sync()
        environment.sync()
        assert spy.syncs == 2


def test_a_body_file_that_goes_as_its_environment_comes_to_be_held_stays_until_it_is_released(
    environment: Environment,
) -> None:
    """The held commit may name it: a copy had a run without its bodies."""
    path = body_file(environment.path, 7)
    path.parent.mkdir()
    path.write_bytes(b"bodies")
    begin = environment._begin_read

    def removed() -> lmdb.Transaction | None:
        begun = begin()
        environment.remove_bodies([7])
        return begun

    with patch.object(environment, "_begin_read", removed):
        held = environment.hold()
    was_there = path.exists()
    held.release()
    assert (was_there, path.exists()) == (True, False)


def test_close_waits_for_a_sync_that_another_thread_is_at(tmp_path: Path) -> None:
    """LMDB's environment is freed by closing, and a sync reads it."""
    environment = Environment(tmp_path / "e", name="e", durability="relaxed", create=True)
    environment.write(putting(KEY, b"v"))
    syncing, go = threading.Event(), threading.Event()
    real = environment._env

    class Slow:
        """LMDB's environment, whose sync takes until it is told to go on."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def sync(self, force: bool) -> None:
            if not syncing.is_set():
                syncing.set()
                assert go.wait(PATIENCE_S)
            real.sync(force)

    environment._env = Slow()  # type: ignore[assignment]
    syncer = threading.Thread(target=environment.sync)
    syncer.start()
    assert syncing.wait(PATIENCE_S)
    closer = threading.Thread(target=environment.close)
    closer.start()
    until(lambda: environment._gate.wanted or not closer.is_alive())
    assert not environment._released
    go.set()
    syncer.join(PATIENCE_S)
    closer.join(PATIENCE_S)
    assert environment._released


def in_child(action: Callable[[], object]) -> str:
    """Run `action` in a forked child; the class of what it raised, or an empty string."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = b""
        try:
            action()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".encode()
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return said.decode()


@pytest.mark.parametrize("use", ["read", "write"])
def test_a_forked_child_is_refused(environment: Environment, use: str) -> None:
    """The child is told which process opened it, and the parent goes on as if nothing had been."""
    environment.write(putting(KEY, b"v"))
    use_it = {"read": lambda: environment.get(KEY), "write": lambda: environment.write(putting(KEY, b"child"))}[use]
    said = in_child(use_it)
    assert said.startswith("ClosedError")
    assert str(os.getpid()) in said
    assert environment.get(KEY) == b"v"
    environment.write(putting(KEY, b"w"))


def test_a_forked_child_may_close_even_while_the_parent_reads(environment: Environment) -> None:
    """Closing in the child does not wait and takes nothing from the parent."""
    environment.write(putting(KEY, b"v"))
    with environment.read() as raw:
        assert in_child(environment.close) == ""
        assert raw_value(raw, KEY).startswith(b"v")
    environment.write(putting(KEY, b"w"))


def test_a_run_under_a_key_that_exists_is_refused(environment: Environment) -> None:
    """LMDB answers False and stores nothing; that is never taken for success."""
    key = run_key(1, 0)
    environment.write(lambda transaction: transaction.insert_run(key, b"first", 1))
    environment.write(lambda transaction: transaction.insert_run(run_key(1, 1), b"next", 1))
    with pytest.raises(BrokenInvariant, match=f"{key.hex()}.*please report"):
        environment.write(lambda transaction: transaction.insert_run(key, b"second", 1))
    with environment.read() as raw:
        assert raw_value(raw, key) == b"first"


def test_an_append_that_lmdb_refuses_is_an_error(environment: Environment) -> None:
    """Told a wrong end, LMDB's append answers False: nothing of that commit is stored."""
    environment.write(lambda transaction: transaction.insert_run(run_key(7, 0), b"last", 1))
    environment._last_run = run_key(5, 0)

    def work(transaction: Transaction) -> None:
        transaction.put(KEY, b"v")
        transaction.insert_run(run_key(6, 0), b"between", 1)

    with pytest.raises(BrokenInvariant, match="out of order"):
        environment.write(work)
    assert environment.get(KEY) is None


def test_a_run_before_the_last_is_inserted_in_its_place(environment: Environment) -> None:
    """A ledger that is not the newest is written to as well."""
    for ledger_id, first in ((3, 0), (9, 0), (3, 5), (4, 0), (9, 1)):
        key = run_key(ledger_id, first)
        environment.write(lambda transaction, key=key: transaction.insert_run(key, key, 1))  # type: ignore[misc]
    with environment.read() as raw:
        keys = [bytes(key) for key in raw.cursor().iternext(values=False)]
    assert keys == [run_key(*place) for place in ((3, 0), (3, 5), (4, 0), (9, 0), (9, 1))]


def filled(path: Path) -> Path:
    """An environment with some 2 MiB in it, closed; its data file."""
    environment = Environment(path, name="main", create=True)
    for number in range(64):
        environment.write(putting(b"\x01%d" % number, BULK))
    environment.close()
    return path / "data.mdb"


def refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> DamagedStore:
    """The error with which `path` is refused before LMDB opens it."""
    with patch.object(lmdb, "open", raising(AssertionError("LMDB opened it"))), pytest.raises(DamagedStore) as caught:
        Environment(path, name="main")
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no LMDB data file (0 bytes)"),
        (b"hello, world", "no LMDB data file (12 bytes)"),
        (bytes(100), "no LMDB data file (100 bytes)"),
        (b"SQLite format 3\0" + bytes(8176), "no LMDB data file (8192 bytes)"),
        (bytes(40) + (4096).to_bytes(4, "little") + bytes(8148), "no LMDB data file (8192 bytes)"),
    ],
    ids=["empty", "text", "zeros", "foreign", "no-magic"],
)
def test_a_foreign_data_file_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    """The error says what was found, and the file stays as it was."""
    path = tmp_path / "main"
    path.mkdir()
    (path / "data.mdb").write_bytes(content)
    assert refused(path, monkeypatch).reason == reason
    assert (path / "data.mdb").read_bytes() == content
    assert [child.name for child in path.iterdir()] == ["data.mdb"]


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.7, 0.999])
def test_a_truncated_data_file_is_refused_without_reading_it_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    """The page that is not there would kill the process with SIGBUS: it is looked for in the file."""
    data = filled(tmp_path / "main")
    size = int(data.stat().st_size * kept) // 4096 * 4096
    os.truncate(data, size)
    assert f"is {size} bytes, truncated" in refused(data.parent, monkeypatch).reason
    assert data.stat().st_size == size


def test_pages_freed_past_the_end_of_the_file_are_no_damage(tmp_path: Path) -> None:
    """A commit may allocate pages and give them up again; the file is then short and whole."""
    environment = Environment(tmp_path / "main", name="main", create=True)

    def work(transaction: Transaction) -> None:
        for number in range(50):
            transaction.put(b"\x01%02d" % number, BULK)
        for number in range(50):
            transaction.delete(b"\x01%02d" % number)
        transaction.put(KEY, b"v")

    environment.write(work)
    environment.close()
    again = Environment(tmp_path / "main", name="main")
    assert again.get(KEY) == b"v"
    again.close()


def test_alone_at_once_does_not_wait_for_readers() -> None:
    """With a reader inside it says no, and keeps no reader out; without, it is alone until it leaves."""
    gate = ReaderGate()
    with gate.reading():
        with gate.alone_at_once() as alone:
            assert not alone
        with gate.reading():
            pass
    entered = threading.Event()

    def read() -> None:
        with gate.reading():
            entered.set()

    reader = threading.Thread(target=read)
    with gate.alone_at_once() as alone:
        assert alone
        reader.start()
        assert not entered.wait(0.05)
    reader.join()
    assert entered.is_set()


def test_a_read_only_environment_refuses_writing(environment: Environment) -> None:
    """Also beside nothing at all."""
    path = environment.path
    environment.close()
    reader = Environment(path, name="main", read_only=True)
    with pytest.raises(ClosedError, match="read-only"):
        reader.write(putting(KEY, b"v"))
    reader.close()


def test_a_reader_follows_a_map_that_another_process_has_grown(tmp_path: Path) -> None:
    """A read-only environment with a small map sees what a writer put past its end."""
    path = tmp_path / "main"
    with_small_map = Environment(path, name="main", map_bytes=1 << 20, create=True)
    with_small_map.write(putting(KEY, b"old"))
    with_small_map.close()
    reader = Environment(path, name="main", map_bytes=1 << 20, read_only=True)
    assert reader.get(KEY) == b"old"
    program = (
        "import sys; from pathlib import Path; from duelog.store.env.environment import Environment\n"
        "writer = Environment(Path(sys.argv[1]), name='main', map_bytes=1 << 20)\n"
        "for n in range(64): writer.write(lambda t, n=n: t.put(b'\\x01%d' % n, bytes(65536)))\n"
        "writer.write(lambda t: t.put(b'\\x01key', b'new')); writer.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert reader.get(KEY) == b"new"
    assert reader.get(b"\x0163") == bytes(65536)
    reader.close()


class Committed:
    """A queue whose work is numbers; what is committed, batch by batch, and what each caller got, in order."""

    def __init__(self) -> None:
        self.queue = CommitQueue(lambda: None, self._commit_group, lambda error: None)
        self.batches: list[list[int]] = []
        self.got: list[tuple[int, Any]] = []
        self.before: dict[int, Callable[[], None]] = {}
        """Callbacks that the leader runs before it commits a batch, by its place."""
        self._threads: list[threading.Thread] = []

    def _commit_group(self, batch: list[Request]) -> None:
        act = self.before.pop(len(self.batches), None)
        self.batches.append([request.work for request in batch])
        if act is not None:
            act()
        for request in batch:
            request.value = request.work * 10

    def send(self, number: int) -> None:
        """Have a thread bring a number, and see it waiting."""
        waiting = len(self.queue)

        def run() -> None:
            self.got.append((number, self.queue.run(number)))

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()
        until(lambda: len(self.queue) > waiting)

    def send_all(self, numbers: Iterable[int]) -> None:
        """Threads that bring a number each, in this order."""
        for number in numbers:
            self.send(number)

    def join(self) -> None:
        """Every caller has returned."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a thread waits for ever"
        assert not self.queue._led, "a request leads for ever"


def test_callers_of_one_group_return_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wakes the next when it has been woken, and the last the next leader: no two are woken at once."""
    served = Committed()
    woken: list[int] = []
    wake = Request.wake

    def watch(request: Request) -> bool:
        done = wake(request)
        woken.extend([request.work] if done else [])
        return done

    monkeypatch.setattr(Request, "wake", watch)
    served.before[0] = lambda: served.send_all(range(1, 6))
    served.before[1] = lambda: served.send_all(range(6, 9))
    assert served.queue.run(0) == 0
    served.join()
    assert served.batches == [[0], [1, 2, 3, 4, 5], [6, 7, 8]]
    assert sorted(served.got) == [(number, number * 10) for number in range(1, 9)]
    assert woken == list(range(1, 9))


def interrupt_main() -> None:
    """SIGINT for the thread that runs the test."""
    main = present(threading.main_thread().ident)
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_caller_interrupted_during_its_commit_keeps_no_other_from_returning(place: int) -> None:
    """First, in the middle and last of the group; it raises when its own work has been committed."""
    served = Committed()
    leading, queued, leaving = threading.Event(), threading.Event(), threading.Event()
    leave = served.queue._leave

    def left(request: Request) -> None:
        leaving.set()
        leave(request)
        assert request.value == place * 10

    served.queue._leave = left  # type: ignore[method-assign]

    def gather() -> None:
        leading.set()
        assert queued.wait(PATIENCE_S)

    def interrupt() -> None:
        interrupt_main()
        assert leaving.wait(PATIENCE_S)

    served.before[0], served.before[1] = gather, interrupt
    leader = threading.Thread(target=served.queue.run, args=(99,))
    leader.start()
    assert leading.wait(PATIENCE_S)
    served.send(100)  # it leads the group in which the main thread waits
    served.send_all(range(place))

    def others() -> None:
        until(lambda: len(served.queue) == place + 2)
        served.send_all(range(place + 1, 5))
        queued.set()

    helper = threading.Thread(target=others)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        served.queue.run(place)
    helper.join(PATIENCE_S)
    leader.join(PATIENCE_S)
    served.join()
    assert served.batches[1] == [100, *range(5)]
    assert sorted(served.got) == [(number, number * 10) for number in (*range(5), 100) if number != place]


def test_a_caller_interrupted_when_it_is_woken_wakes_the_next() -> None:
    """Its turn is not lost with it, whether the next one returns or leads."""
    for done in (True, False):
        queue = Committed().queue
        woken, following = Request(0), Request(1)
        for request in (woken, following):
            request.gate = threading.Lock()
            request.gate.acquire()
            request.done = done
            queue._queue.append(request)
        queue._led = True
        woken.done = woken.wake()
        queue._leave(woken)
        assert following.woken
        assert queue._led


def test_a_request_that_no_other_wakes_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interrupts of the caller before it, the second while it hands the lead on, hold nobody up for ever."""
    monkeypatch.setattr(commit_queue, "_LOOK_AGAIN_S", 0.01)
    served = Committed()
    served.queue._led = True  # left by who was interrupted twice
    assert served.queue.run(1) == 10
    served.queue._led = True
    in_threads(partial(served.queue.run, number) for number in range(2, 6))
    assert sorted(number for batch in served.batches for number in batch) == [1, 2, 3, 4, 5]
