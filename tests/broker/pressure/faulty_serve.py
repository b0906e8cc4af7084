"""`duelog` on a machine that fails while files say so.

    python faulty_serve.py FOLDER ARGUMENTS...     as `duelog ARGUMENTS...`

FOLDER/disk: nothing can be written to the log nor flushed. FOLDER/clock: the clock is set back by an hour; it is looked
at twice a second.
"""

import errno
import os
import sys
import time
from typing import Any

from duelog.store import clock
from duelog.tools.cli.main import main


def failing(real: Any, flag: str) -> Any:
    """Wrap a call so that it fails."""

    def call(*arguments: Any) -> Any:
        if os.path.exists(flag):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    return call


if __name__ == "__main__":
    folder, now_ns = sys.argv.pop(1), time.time_ns
    clock.MAX_WAIT_S = 0.5
    time.time_ns = lambda: now_ns() - (3_600 * 10**9 if os.path.exists(f"{folder}/clock") else 0)
    for name in ("fsync", "fdatasync", "pwritev"):
        setattr(os, name, failing(getattr(os, name), f"{folder}/disk"))
    main()
