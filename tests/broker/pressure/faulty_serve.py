"""`duelog` on a machine that fails once a file is there.

    python faulty_serve.py disk|clock FILE ARGUMENTS...     as `duelog ARGUMENTS...`

disk: nothing can be written to the log nor flushed any more. clock: it is set back by an hour.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import Any

from duelog.tools.cli.main import main


def failing(real: Any, flag: str) -> Any:
    """A call that fails."""

    def call(*arguments: Any) -> Any:
        if os.path.exists(flag):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    return call


def set_back(real: Any, flag: str) -> Any:
    """A clock that was set back."""
    return lambda: real() - (3_600 * 10**9 if os.path.exists(flag) else 0)


if __name__ == "__main__":
    kind, flag = sys.argv.pop(1), sys.argv.pop(1)
    if kind == "clock":
        time.time_ns = set_back(time.time_ns, flag)
    else:
        for name in ("fsync", "fdatasync", "pwritev"):
            setattr(os, name, failing(getattr(os, name), flag))
    main()
