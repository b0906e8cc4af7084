"""Work deferred to the next commit: it runs first, once, before anything is read, and nothing drops it."""

from __future__ import annotations

import lmdb
import pytest

from duelog.errors import BrokenInvariant, ClosedError, StoreFailed, StoreFull
from duelog.store.codec.format import Table
from duelog.store.env import map_size
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from tests.store.group_commits import BULK, KEY, putting, share, spy_on


def defer(environment: Environment, key: bytes, fields: bytes = b"deferred") -> bool:
    """Have a record put with the next commit; False: a commit is under way."""

    def action() -> bool:
        environment.defer(putting(key, fields))
        return True

    return bool(environment.unless_committing(action))


def test_deferred_work_runs_before_that_of_the_commit(environment: Environment) -> None:
    """In order, and once."""
    seen: list[list[bytes]] = []

    def look(transaction: Transaction) -> None:
        seen.append([bytes(key) for key, _ in transaction.raw.cursor() if key[0] != Table.COPY])

    defer(environment, b"\x01a")
    defer(environment, b"\x01b")
    assert environment.has_unapplied
    environment.write(look)
    assert seen == [[b"\x01a", b"\x01b"]]
    assert not environment.has_unapplied
    defer(environment, b"\x01a", b"again")
    environment.write(putting(b"\x01a", b"written"))
    assert environment.get(b"\x01a") == b"written"


def test_a_reader_finds_what_was_deferred(environment: Environment) -> None:
    """It is committed first."""
    defer(environment, KEY)
    assert environment.get(KEY) == b"deferred"
    assert not environment.has_unapplied
    assert environment.counts.commits == 1


def test_a_read_inside_a_read_leaves_it_deferred(environment: Environment) -> None:
    """Nothing is written inside a read transaction."""
    with environment.read() as raw:
        defer(environment, KEY)
        with environment.read() as inner:
            assert inner.get(KEY) is None
        environment.apply_deferred()
        assert environment.has_unapplied
        assert raw.get(KEY) is None
    assert environment.get(KEY) == b"deferred"


def test_what_is_held_lacks_what_was_deferred(environment: Environment) -> None:
    """A commit that is held for long is read from where it is durable: holding commits nothing."""
    defer(environment, KEY)
    held = environment.hold()
    assert held.raw.get(KEY) is None
    environment.apply_deferred()
    assert held.moved()
    assert held.raw.get(KEY) is None
    held.renew()
    assert not held.moved()
    assert held.raw.get(KEY) is not None
    held.release()


def test_applying_commits_only_where_something_was_deferred(environment: Environment) -> None:
    """Else it costs nothing."""
    environment.apply_deferred()
    assert environment.counts.commits == 0
    defer(environment, KEY)
    environment.apply_deferred()
    environment.apply_deferred()
    assert environment.counts.commits == 1


def test_nothing_is_deferred_during_a_commit(environment: Environment) -> None:
    """The caller is told, in the work of a commit and in what follows from it."""
    told: list[bool] = []

    def work(transaction: Transaction) -> None:
        told.append(defer(environment, KEY))
        transaction.after_commit(lambda: told.append(defer(environment, KEY)))

    share(environment, [work, work])
    assert told == [False] * 4
    assert defer(environment, KEY)


def test_work_that_fails_takes_nothing_deferred_with_it(environment: Environment) -> None:
    """Neither the error of another's work, nor one of the commit."""
    defer(environment, KEY)

    def fail(_: Transaction) -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        environment.write(fail)
    assert environment.has_unapplied
    assert environment.get(KEY) == b"deferred"


def test_a_full_map_grows_for_deferred_work(environment: Environment) -> None:
    """It runs again, from the beginning."""
    for number in range(64):
        defer(environment, b"\x01%03d" % number, BULK)
    environment.apply_deferred()
    assert all(environment.get(b"\x01%03d" % number) == BULK for number in range(64))


def test_what_finds_no_space_stays_deferred(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader is told so, until there is space."""
    with monkeypatch.context() as patch:
        patch.setattr(map_size, "MAX_MAP_BYTES", 1 << 20)
        for number in range(64):
            defer(environment, b"\x01%03d" % number, BULK)
        for _ in range(2):
            with pytest.raises(StoreFull):
                environment.get(b"\x01000")
    assert environment.get(b"\x01063") == BULK


def test_nothing_is_deferred_where_nothing_may_be_written(environment: Environment) -> None:
    """Not after a failure, whose deferred work no reader passes over, nor after closing."""
    defer(environment, KEY)
    spy_on(environment).fail_commit = lmdb.Error("Input/output error")
    with pytest.raises(StoreFailed):
        environment.apply_deferred()
    for refuse in (lambda: defer(environment, KEY), lambda: environment.get(KEY)):
        with pytest.raises(StoreFailed):
            refuse()
    environment.close()
    with pytest.raises(ClosedError):
        defer(environment, KEY)


def test_the_order_of_deferred_work_is_an_invariant(environment: Environment) -> None:
    """An error of deferred work, which cannot be, is that of the commit: nothing is stored."""

    def action() -> bool:
        def broken(_: Transaction) -> None:
            raise BrokenInvariant("says the test")

        environment.defer(broken)
        return True

    environment.unless_committing(action)
    with pytest.raises(BrokenInvariant):
        environment.write(putting(KEY, b"written"))
    environment._deferred.clear()
    assert environment.get(KEY) is None
