"""Where the system refuses, the command line says a line on standard error and a status, never a traceback."""

import errno
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lmdb
import pytest

from duelog.store.env import environment as opening
from duelog.tools import store_check
from tests.tools.command_line import DUELOG, FUTURE_MS, child, make_store, ok, refused

COMMANDS = ["stats {}", "scheduled {} t --json", "dump {}", "audit {}", "--help"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a message."""
    with make_store(tmp_path / "store") as store:
        store.topic("t").send(b"x", deliver_at=FUTURE_MS)
    return tmp_path / "store"


@pytest.mark.parametrize("command", [*COMMANDS, "--version"])
def test_a_full_output_is_status_2_and_one_line(path: Path, command: str) -> None:
    """Also where all of it is written at the end; 1 would say that something was found."""
    with open("/dev/full", "w") as full:
        done = child(*command.format(path).split(), stdout=full)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last) == (2, "duelog: standard output: No space left on device")
    assert "Traceback" not in done.stderr


def test_standard_streams_that_are_closed_are_as_if_nobody_read_them(path: Path) -> None:
    """Each command ended with a traceback, for want of standard output; a file of the store could get its number."""
    for closed, said in ((1, "duelog: findings: 0\n"), (2, "")):
        done = subprocess.run(
            [*DUELOG, "check", path],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(os.close, closed),
            check=True,
        )
        assert done.stderr == said


@pytest.mark.parametrize("command", [*COMMANDS, "send --help", ""])
def test_a_pipe_that_was_closed_before_anything_was_written_is_quiet(path: Path, command: str) -> None:
    """Whatever writes the output, and whenever."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = child(*command.format(path).split(), stdout=pipe)
    assert done.returncode == 141
    assert all(line.startswith("duelog: ") for line in done.stderr.splitlines()), done.stderr
    assert "pipe" not in done.stderr


@pytest.mark.parametrize(
    "unusable", ["a-file/store", "x" * 300, "loop/store"], ids=["below a file", "too long a name", "a link to itself"]
)
@pytest.mark.parametrize("command", ["send {} t x", "stats {}", "check {}", "repair {}", "backup {} copy"])
def test_a_path_that_cannot_be_used_is_status_2_and_one_line(
    tmp_path: Path, command: str, unusable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which path it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    said = refused(*command.format(tmp_path / unusable).split())
    assert str(tmp_path / unusable).rstrip("/")[:60] in said
    assert len(said.splitlines()) == 1


def not_permitted_by_lmdb(patch: pytest.MonkeyPatch) -> None:
    """A file that may be read, in a directory whose lock file may not be written."""
    for module in (opening, store_check):

        def refusing(directory: str, **_: Any) -> lmdb.Environment:
            raise lmdb.ReadonlyError(f"{directory}: {os.strerror(errno.EACCES)}")

        patch.setattr(getattr(module, "lmdb"), "open", refusing)  # noqa: B009 - mypy wants it exported


def not_permitted_to_read(patch: pytest.MonkeyPatch) -> None:
    """Files of another user."""
    open_ = os.open

    def refusing(path: str | Path, *arguments: Any, **options: Any) -> int:
        if Path(path).name == "data.mdb":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_(path, *arguments, **options)

    patch.setattr(os, "open", refusing)


def not_permitted_to_look(patch: pytest.MonkeyPatch) -> None:
    """A directory of another user."""
    read = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.name == "STORE":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    patch.setattr(Path, "read_bytes", refusing)


@pytest.mark.parametrize("refuse", [not_permitted_by_lmdb, not_permitted_to_read, not_permitted_to_look])
@pytest.mark.parametrize("command", ["check {}", "stats {}", "audit {}", "repair {}", "send {} t x"])
def test_a_store_that_one_may_not_read_is_not_called_damaged(
    path: Path, command: str, refuse: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that there is no permission, and nothing of repair; nothing is discarded."""
    before = sorted(found.name for found in path.parent.iterdir())
    with monkeypatch.context() as patch:
        refuse(patch)
        said = refused(*command.format(path).split())
    assert "Permission denied" in said
    assert "repair" not in said
    assert sorted(found.name for found in path.parent.iterdir()) == before
    assert ok("check", path) == ""


def test_a_shortage_of_descriptors_is_no_finding_of_check(path: Path) -> None:
    """Status 2, and the store is as it was."""

    def refusing(directory: str, **_: Any) -> lmdb.Environment:
        raise lmdb.Error(f"{directory}: {os.strerror(errno.EMFILE)}")

    with patch.object(lmdb, "open", refusing):
        assert "Too many open files" in refused("check", path)
    assert ok("check", path) == ""


def test_where_no_directory_can_be_made_nothing_is_told_as_missing() -> None:
    """The file system of /proc makes none: that is said, and of which path."""
    assert refused("init", "/proc/x") == "duelog: /proc/x: no directory can be made in /proc\n"


def test_an_option_that_was_not_given_is_not_told_as_none(path: Path) -> None:
    """Without a value only the option's name stands before the reason."""
    assert refused("reschedule", path, "t", "2:0") == "duelog: --at: expected one of the two, --at or --after\n"
    assert "None" not in refused("policies", "set", path)


def test_a_range_that_ends_before_it_begins_is_refused(path: Path, tmp_path: Path) -> None:
    """With both options and their values; a range that is empty is not."""
    early, late = "2030-01-01T00:00Z", "2031-01-01T00:00Z"
    told = f"duelog: --until='{early}': is before --from='{late}'\n"
    assert refused("scheduled", path, "t", "--from", late, "--until", early) == told
    assert refused("export", path, tmp_path / "export", "--from", late, "--until", early) == told
    ok("scheduled", path, "t", "--from", early, "--until", early)


def test_the_help_of_policies_says_the_whole_name_of_a_dead_letter_topic() -> None:
    """Nothing of it is taken for markup."""
    told = ok("policies", "set", "--help")
    assert "--DLQ" not in told
    assert "-DLQ." in told
    assert "…" not in told.partition("--dead-letter-topic")[2].partition("--ack-timeout")[0]


@pytest.mark.parametrize("command", ["dump {} --limit {}", "dump {} --ledger {}", "topics list {} --limit {}"])
def test_a_number_that_no_machine_counts_to_is_no_traceback(path: Path, command: str) -> None:
    """As a limit it is none; a ledger of that number cannot be."""
    done = child(*command.format(path, 10**20).split())
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if "ledger" in command else 0)


@pytest.mark.parametrize("command", ["init {}", "send {} t x --create", "serve {} --port 0"])
@pytest.mark.parametrize("address", ["http://localhost:8080", "duelog://localhost:6700", "s3://bucket/prefix"])
def test_an_address_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, address: str
) -> None:
    """A store was made in a directory of that name, and served, where a server's or a copy's was meant."""
    monkeypatch.chdir(tmp_path)
    done = child(*command.format(address).split())
    assert done.returncode == 2
    assert "address" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_seek_to_nowhere_names_the_options_and_no_empty_list(path: Path) -> None:
    """Of several that are given the error shows the values."""
    assert refused("seek", path, "t", "s") == "duelog: --to: expected one of --to, --due and --published\n"
    assert "--to=['earliest', " in refused("seek", path, "t", "s", "--to", "earliest", "--due", FUTURE_MS)


@pytest.mark.parametrize(
    "command", ["audit s4://b/x", "drain file:///b --to x", "export data s3://b/x", "stats s3://b"]
)
def test_a_url_in_place_of_a_directory_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """An export went into a directory named `s3:`, and others said how a store is made."""
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "data").close()
    assert "expected a directory; the URL of a copy to read is s3://bucket/prefix" in refused(*command.split())
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_report_is_written_to_no_url(tmp_path: Path) -> None:
    """It ended with a traceback."""
    make_store(tmp_path / "data").close()
    assert "expected a directory" in refused("audit", tmp_path / "data", "--output", "s3://b/x")
