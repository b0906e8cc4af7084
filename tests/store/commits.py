"""Units of work committed one after the other, and a spy between an environment and LMDB."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads, Records
from duelog.store.env.transaction import Transaction
from duelog.store.log.ledger import Ledger, end_after
from tests.conftest import present

PATIENCE_S = 60.0

KEY = b"\x01key"
BULK = bytes(32 * 1024)


def until(condition: Callable[[], object]) -> None:
    """Give other threads the processor until `condition` holds; an AssertionError after a long time."""
    trim = time.monotonic() + PATIENCE_S
    while not condition():
        os.sched_yield()
        assert time.monotonic() < trim, "waited in vain"


def putting(key: bytes, fields: bytes) -> Callable[[Transaction], None]:
    """A unit of work that stores one record."""
    return lambda transaction: transaction.put(key, fields)


def raw_value(raw: Reads, key: bytes) -> bytes:
    """The stored value of a key, checksum and all."""
    return bytes(present(raw.get(key)))


def outcomes_of(
    environment: Environment,
    works: list[Callable[[Transaction], Any]],
    first: Callable[[Transaction], object] | None = None,
) -> list[Any]:
    """Commit each of `works`, behind `first`, and return what each returned or raised."""
    outcomes: list[Any] = []
    if first is not None:
        environment.commit(first)
    for work in works:
        try:
            outcomes.append(environment.commit(work))
        except BaseException as error:
            outcomes.append(error)
    return outcomes


class Log:
    """A log of one ledger."""

    def __init__(self, ledger_id: int, entries: int = 0) -> None:
        self.ledger = Ledger(ledger_id, entries)

    def took(self, transaction: Transaction, count: int) -> int:
        """Take the next ids in a transaction; returns the first."""
        staged = transaction.stage(self, _StagedEnd)
        first, staged.end = staged.end, end_after(self.ledger.ledger_id, staged.end, count)
        return first


class _StagedEnd:
    """The end of a log as a transaction leaves it."""

    def __init__(self, log: Log) -> None:
        self.ledger = log.ledger
        self.end = log.ledger.entries

    def committed(self) -> None:
        self.ledger.entries = self.end


@contextmanager
def beside(records: Records, look: Callable[[], object]) -> Iterator[None]:
    """Have `look` run between the two steps of each group that comes to records of a memtable."""

    class Looked(deque[bytes]):
        def extend(self, keys: Iterable[bytes]) -> None:
            super().extend(keys)
            look()

    records._unsorted = Looked(records._unsorted)
    yield
    records._unsorted = deque(records._unsorted)


class Spy:
    """Stands before LMDB's environment: watches it grow, and fails where it is told to, once each."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._env: Any = environment._env
        self.fail_begin: Exception | None = None
        self.fail_commit: Exception | None = None
        self.fail_sync: BaseException | None = None
        self.syncs = 0
        self.readers_at_growth: list[int] = []
        self._spared = False

    def disarmed(self, transaction: Transaction) -> None:
        """A unit of work whose own commit is to succeed."""
        self._spared = True

    def begin(self, *arguments: Any, **options: Any) -> Any:
        if options.get("write"):
            error, self.fail_begin = self.fail_begin, None
            if error is not None:
                raise error
            return _SpiedTransaction(self, self._env.begin(*arguments, **options))
        return self._env.begin(*arguments, **options)

    def set_mapsize(self, size: int) -> None:
        self.readers_at_growth.append(len(self._environment._gate.inside))
        self._env.set_mapsize(size)

    def sync(self, force: bool) -> None:
        self.syncs += 1
        error, self.fail_sync = self.fail_sync, None
        if error is not None:
            raise error
        self._env.sync(force)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class NotedLock:
    """In place of the lock of groups: notes whether who takes it is inside an environment's gate."""

    def __init__(self, environment: Environment) -> None:
        self._gate = environment._gate
        self.inside: list[bool] = []

    def __enter__(self) -> None:
        self.inside.append(self._gate.held)

    def __exit__(self, *_: object) -> None:
        """It was never taken."""


def spy_on(environment: Environment) -> Spy:
    """Put a spy between an environment and LMDB."""
    spy = Spy(environment)
    environment._env = spy  # type: ignore[assignment]
    return spy


class _SpiedTransaction:
    """A raw write transaction whose commit fails when the spy says so."""

    def __init__(self, spy: Spy, raw: Any) -> None:
        self._spy = spy
        self._raw = raw

    def commit(self) -> None:
        spared, self._spy._spared = self._spy._spared, False
        error = self._spy.fail_commit
        if error is None or spared:
            self._raw.commit()
            return
        self._spy.fail_commit = None
        self._raw.abort()
        raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)
