"""Refusals of an environment where LMDB would go on silently, or die; the gate of its readers."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from duelog.store.codec.format import run_key
from duelog.store.env.environment import Environment
from duelog.store.env.reader_gate import ReaderGate
from duelog.store.env.transaction import Transaction
from duelog.store.errors import BrokenInvariant, ClosedError, CorruptRecord, DamagedStore
from tests.store.commits import BULK, KEY, putting, raw_value

# -- guards ------------------------------------------------------------------------------------


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


def test_a_read_only_environment_refuses_writing(environment: Environment) -> None:
    """Also beside nothing at all."""
    path = environment.path
    environment.close()
    reader = Environment(path, name="main", read_only=True)
    with pytest.raises(ClosedError, match="read-only"):
        reader.write(putting(KEY, b"v"))
    reader.close()


def test_a_flipped_bit_in_a_record_is_never_handed_out(environment: Environment) -> None:
    """A small record carries a checksum over key and value."""
    environment.write(putting(KEY, b"value"))
    environment.commit(lambda transaction: transaction.raw.put(b"\x01other", raw_value(transaction.raw, KEY)))
    with pytest.raises(CorruptRecord, match=b"\x01other".hex()):
        environment.get(b"\x01other")


# -- files that LMDB must not see --------------------------------------------------------------


def filled(path: Path) -> Path:
    """An environment with some 2 MiB in it, closed; its data file."""
    environment = Environment(path, name="main", create=True)
    for number in range(64):
        environment.write(putting(b"\x01%d" % number, BULK))
    environment.close()
    return path / "data.mdb"


def refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> DamagedStore:
    """The error with which `path` is refused before LMDB opens it."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("LMDB opened it")

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", opened)
        with pytest.raises(DamagedStore) as caught:
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
