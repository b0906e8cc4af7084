"""The page cache in tests: a recording stand-in for the kernel's calls, and the pages that are in memory."""

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
