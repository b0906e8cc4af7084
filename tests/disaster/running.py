"""How tests of this folder have things done in a process of its own, and where they put what they make."""

import faulthandler
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
"""Runs a module of the tests in a process that finds the installed package first."""
_SECONDS = 60
"""How long a forked child may take."""


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of the tests."""
    return [sys.executable, "-c", START, str(ROOT), name, *arguments]


def memory() -> str | None:
    """A directory in memory, if there is one with space: where an fsync costs nothing."""
    shm = "/dev/shm"
    return shm if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 256 << 20 else None


def forked(work: Callable[[], object], report: Path) -> tuple[Any, str]:
    """(what `work` returns, "") from a child process; (None, how it died) if a signal killed it."""
    report.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            signal.alarm(_SECONDS)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            report.write_text(json.dumps(work()))
            os._exit(0)
        except BaseException:
            report.with_suffix(".error").write_text(traceback.format_exc())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None, signal.Signals(os.WTERMSIG(status)).name
    if os.WEXITSTATUS(status):
        raise AssertionError(report.with_suffix(".error").read_text())
    return json.loads(report.read_text()), ""
