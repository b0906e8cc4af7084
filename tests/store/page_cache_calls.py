"""The page cache in tests: a recording stand-in for the kernel's calls, and the pages that are in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

DROP, FETCH = os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED


class Asked(NamedTuple):
    """One call of posix_fadvise."""

    inode: int
    begin: int
    end: int
    advice: int


class Calls(list[Asked]):
    """All calls so far."""

    def ranges(self, file: Path, advice: int) -> list[tuple[int, int]]:
        """The ranges of one file that were asked for."""
        inode = file.stat().st_ino
        return [(call.begin, call.end) for call in self if (call.inode, call.advice) == (inode, advice)]


def record(patch: pytest.MonkeyPatch, also: Callable[[Asked], object] = lambda asked: None) -> Calls:
    """Have calls recorded instead of made; `also` is told of each."""
    calls = Calls()

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        calls.append(Asked(os.fstat(descriptor).st_ino, offset, offset + length, advice))
        also(calls[-1])

    patch.setattr(os, "posix_fadvise", advise)
    return calls


def joined(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    """The range that `ranges` are together; an AssertionError unless each begins where the one before ended."""
    assert all(before[1] == after[0] for before, after in pairwise(ranges)), ranges
    assert all(begin < end for begin, end in ranges), ranges
    return ranges[0][0], ranges[-1][1]


def cached(file: Path, begin: int, end: int) -> float:
    """Which part of the pages of a file between two multiples of a page's size are in memory, from 0 to 1."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), file.stat().st_size) as mapped:
        byte = ctypes.c_char.from_buffer(mapped)
        pages = (end - begin) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(ctypes.addressof(byte) + begin)
        failed = ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(end - begin), found)
        del byte
        assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in found) / pages


def skip_unless_dropped_pages_go(directory: Path) -> None:
    """Skip the test where a file system or kernel keeps what it is asked to drop, or does not say what it has."""
    probe = directory / "probe"
    with probe.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        before = cached(probe, 0, 1 << 20)
        os.posix_fadvise(file.fileno(), 0, 1 << 20, DROP)
    after = cached(probe, 0, 1 << 20)
    probe.unlink()
    if (before, after) != (1.0, 0.0):
        pytest.skip(f"of a file that was dropped {after:.0%} is in memory, and {before:.0%} before")
