"""Environments: group commits, the growth of the map, and closing."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from duelog.store.env import environment as environment_module
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import BrokenInvariant, ClosedError, StoreFull
from tests.conftest import in_threads
from tests.store.commits import BULK, KEY, outcomes_of, putting, raw_value, spy_on, until

# -- group commits ----------------------------------------------------------------------------


def test_a_failing_unit_of_work_harms_no_neighbour(environment: Environment) -> None:
    """Its puts are not stored, its callback is not called, its error reaches its caller alone; others are stored."""
    heard: list[str] = []

    def failing(transaction: Transaction) -> None:
        transaction.put(b"\x01bad", b"v")
        transaction.after_commit(lambda: heard.append("failed"))
        raise LookupError("not today")

    works: list[Callable[[Transaction], None]] = [putting(b"\x01a", b"v"), failing, putting(b"\x01b", b"v")]
    outcomes = outcomes_of(environment, works)
    assert [type(outcome) for outcome in outcomes] == [type(None), LookupError, type(None)]
    assert environment.get(b"\x01a") == environment.get(b"\x01b") == b"v"
    assert environment.get(b"\x01bad") is None
    assert not heard


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


# -- growth ------------------------------------------------------------------------------------


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
        until(lambda: environment._gate._wanted)
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


# -- life --------------------------------------------------------------------------------------


def test_close_waits_for_readers(environment: Environment) -> None:
    """A reader finishes in peace; a later one is refused."""
    environment.write(putting(KEY, b"v"))
    closer = threading.Thread(target=environment.close)
    with environment.read() as raw:
        closer.start()
        until(lambda: environment._gate._wanted)
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
