"""What does the work of Linux's calls where there are none."""

import ctypes
import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from duelog.store.files import system_calls
from duelog.store.files.system_calls import reserve, sync_all
from tests.disaster.running import module


def test_a_store_needs_no_call_that_linux_alone_has(tmp_path: Path) -> None:
    """The suite of the engine passes without them, too: see without_linux.py."""
    done = subprocess.run(
        module("tests.store.files.without_linux", str(tmp_path / "s")), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("later commit, later none, later relaxed\n", 0), done.stderr


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Descriptors of 300 files, each with something that is not on disk."""
    descriptors = [os.open(tmp_path / str(number), os.O_WRONLY | os.O_CREAT) for number in range(300)]
    for descriptor in descriptors:
        os.write(descriptor, b"x")
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("case", ["side by side", "no calls", "another is at it", "one file"])
def test_files_are_flushed_side_by_side_else_one_after_the_other(
    opened: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """More than one call takes; singly where the kernel has no asynchronous I/O."""
    singly: list[int] = []
    monkeypatch.setattr(system_calls, "sync_data", singly.append)
    if case == "no calls":
        monkeypatch.setattr(system_calls, "_submission", lambda: None)
    elif case == "side by side" and system_calls._submission() is None:
        pytest.skip("the system has no asynchronous I/O")
    files = opened[:1] if case == "one file" else opened
    with system_calls._one_syncs if case == "another is at it" else memoryview(b""):
        sync_all(files)
    assert singly == ([] if case == "side by side" else files)
    assert not system_calls._one_syncs.locked()


def test_a_file_that_cannot_be_flushed_is_an_error(opened: list[int]) -> None:
    """Here the second of three is not open."""
    closed = os.dup(opened[0])
    os.close(closed)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        sync_all([opened[0], closed, opened[1]])


@pytest.mark.parametrize("result", [0, -errno.EIO])
def test_a_flush_waits_for_its_own_ends_alone(opened: list[int], monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    """An interrupt, ends of a call that was interrupted before, then one after the other, the last with an error."""
    ends, submitted = [-1, 0], list[int]()

    def call(number: int, context: object, *rest: Any) -> int:
        if number == 1:
            submitted[:] = [system_calls._Iocb.from_address(place).data for place in rest[1]]
            ends.extend(submitted)
            return len(submitted)
        ticket = ends.pop(0)
        if ticket < 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        rest[2][0] = system_calls._Event(ticket, 0, result if ticket == submitted[-1] else 0, 0)
        return 1

    monkeypatch.setattr(system_calls, "_submission", lambda: (call, None, 1, 2))
    monkeypatch.setattr(system_calls, "sync_data", None)
    if result:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            sync_all(opened[:3])
    else:
        sync_all(opened[:3])
    assert not ends


def test_space_is_reserved_by_zeros_behind_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What LMDB has in a lock file stays."""
    monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "f"
    path.write_bytes(b"kept")
    descriptor = os.open(path, os.O_RDWR)
    try:
        reserve(descriptor, 3 << 20)
        reserve(descriptor, 2)
    finally:
        os.close(descriptor)
    assert path.read_bytes() == b"kept".ljust(3 << 20, b"\0")
    assert path.stat().st_blocks * 512 >= 3 << 20
