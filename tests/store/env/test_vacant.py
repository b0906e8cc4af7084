"""Environments without a directory: they read as an LMDB without rows, until it is made."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from duelog.store.codec.run import RunLimits
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Look, Memtable, Publication, Unapplied
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.errors import DamagedStore
from duelog.store.log import catalog
from tests.store.commits import KEY, putting


class Made:
    """What makes a directory with one row, or raises the next of `errors`, before it is made or once it is."""

    def __init__(self, path: Path, *errors: BaseException | None) -> None:
        self.path = path
        self.errors = list(errors)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        staged = self.path.with_name("staged")
        for has_rows in (False, True):
            if self.errors and (error := self.errors.pop(0)) is not None:
                raise error
            if not has_rows:
                yield staged
        staged.rename(self.path)

    def describe(self, transaction: LmdbTransaction) -> None:
        putting(b"\x01made", b"1")(transaction)


def test_the_first_commit_makes_the_directory_and_applies_what_is_unapplied(tmp_path: Path) -> None:
    """Until then reads see the memtable alone, and closing leaves nothing."""
    memtable = Memtable(Publication(), RunLimits())
    memtable.view.add_record(KEY, b"v")
    for commits in (False, True):
        environment = Environment(tmp_path / "e", name="e", memtable=memtable, make=Made(tmp_path / "e"))
        assert environment.get(KEY) == b"v"
        with environment.read() as raw:
            assert list(catalog.rows(raw, KEY[:1])) == [(KEY, b"v")]
        assert (environment.is_vacant, environment.find_problems(), environment.file_bytes()) == (True, [], 0)
        held = environment.hold()
        assert (held.is_vacant, held.moved()) == (True, False)
        if commits:
            environment.apply()
            assert (environment.is_vacant, held.moved(), bool(memtable)) == (False, True, False)
            assert (environment.get(KEY), environment.get(b"\x01made")) == (b"v", b"1")
        held.release()
        environment.close()
        assert (tmp_path / "e").exists() == commits


def test_a_directory_that_cannot_be_made_leaves_the_rows_where_they_are(tmp_path: Path) -> None:
    """The environment has not failed: the next commit tries again."""
    memtable = Memtable(Publication(), RunLimits())
    memtable.view.add_record(KEY, b"v")
    errors = (
        OSError(errno.ENOSPC, "full"),
        KeyboardInterrupt(),
        None,
        OSError(errno.ENOSPC, "full"),
        None,
        MemoryError(),
    )
    make = Made(tmp_path / "e", *errors)
    environment = Environment(tmp_path / "e", name="e", memtable=memtable, make=make)
    for expected in filter(None, errors):
        with pytest.raises(type(expected)):
            environment.apply()
        with suppress(FileNotFoundError):
            shutil.rmtree(tmp_path / "staged")
        assert (environment.get(KEY), environment.failed, environment.is_vacant) == (b"v", None, True)
    environment.apply()
    assert not memtable
    environment.close()


def test_who_follows_the_log_goes_over_to_the_directory_that_another_process_has_made(tmp_path: Path) -> None:
    """A row is seen by the log, then by LMDB, and in no read by neither. Where both lack it, the directory is lost."""

    class Log:
        """A log that has a record, and the registration, or not any more."""

        registered = True

        def __call__(self) -> Look:
            in_log = Unapplied.nothing()
            in_log.add_record(KEY, b"v")
            return lambda applied: in_log if applied < 0 else Unapplied.nothing()

        def is_registered(self) -> bool:
            return self.registered

    follow = Log()
    environment = Environment(tmp_path / "e", name="e", read_only=True, follow=follow)
    held = environment.hold()
    assert (environment.get(KEY), environment.is_vacant, held.moved()) == (b"v", True, False)
    with closing(Environment(tmp_path / "e", name="e", make=Made(tmp_path / "e"))) as writer:
        writer.apply()
    assert held.moved()
    held.renew()
    assert not held.is_vacant
    held.release()
    assert environment.get(b"\x01made") == b"1"
    environment.close()
    follow.registered = False
    with pytest.raises(DamagedStore, match="is missing"):
        Environment(tmp_path / "lost", name="lost", read_only=True, follow=follow)
