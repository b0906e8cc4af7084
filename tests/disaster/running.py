"""How tests of this folder start a module of the tests in a process of its own, and where they put what they make."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
"""Runs a module of the tests in a process that finds the installed package first."""


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of the tests."""
    return [sys.executable, "-c", START, str(ROOT), name, *arguments]


def memory() -> str | None:
    """A directory in memory, if there is one with space: where an fsync costs nothing."""
    shm = "/dev/shm"
    return shm if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 256 << 20 else None
