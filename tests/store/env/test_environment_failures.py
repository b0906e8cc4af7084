"""Commits that are interrupted or fail: what each caller is told, and what may go on."""

import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import StoreFailed, StoreFull
from duelog.store.listener import StoreListener
from tests.store import commits
from tests.store.commits import KEY, PATIENCE_S, outcomes_of, putting, spy_on, until

# -- interrupts --------------------------------------------------------------------------------


def interrupting(transaction: Transaction) -> None:
    """A unit of work during which its thread is interrupted."""
    raise KeyboardInterrupt


def test_an_interrupted_leader_interrupts_no_other(environment: Environment) -> None:
    """The others of its commit are stored by the next leader; nothing of its own is."""

    def interrupted(transaction: Transaction) -> None:
        transaction.put(b"\x01mine", b"v")
        raise KeyboardInterrupt

    outcomes = outcomes_of(environment, [interrupted, putting(b"\x01a", b"v"), putting(b"\x01b", b"v")])
    assert isinstance(outcomes[0], KeyboardInterrupt)
    assert outcomes[1:] == [None, None]
    assert environment.get(b"\x01a") == environment.get(b"\x01b") == b"v"
    assert environment.get(b"\x01mine") is None
    environment.write(putting(KEY, b"goes on"))


def test_a_listener_that_raises_after_the_commit_makes_no_stored_message_an_error(environment: Environment) -> None:
    """The commit stands for all of the group, and nothing is done twice."""

    def count(transaction: Transaction) -> None:
        transaction.put(KEY, b"%d" % (int(transaction.get(KEY) or b"0") + 1))

    class Interrupting(StoreListener):
        def committed(self, environment: str, elapsed_ns: int, requests: int, entries: int) -> None:
            raise KeyboardInterrupt

    environment._listeners = [Interrupting()]
    outcomes = outcomes_of(environment, [count, count, count])
    assert outcomes == [None, None, None]
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


# -- commits that fail -------------------------------------------------------------------------


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

    def break_off(transaction: object) -> None:
        raise MemoryError

    monkeypatch.setattr(commits._SpiedTransaction, "commit", break_off)
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
    until(lambda: environment._gate._wanted or not closer.is_alive())
    assert not environment._released
    go.set()
    syncer.join(PATIENCE_S)
    closer.join(PATIENCE_S)
    assert environment._released
