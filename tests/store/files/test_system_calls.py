"""What does the work of Linux's calls where there are none."""

import os
import subprocess
from pathlib import Path

import pytest

from duelog.store.files.system_calls import reserve
from tests.disaster.running import module


def test_a_store_needs_no_call_that_linux_alone_has(tmp_path: Path) -> None:
    """The suite of the engine passes without them, too: see without_linux.py."""
    done = subprocess.run(
        module("tests.store.files.without_linux", str(tmp_path / "s")), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("later commit, later none, later relaxed\n", 0), done.stderr


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
