"""Several processes that do the same until they are told to stop: begun, begun again, ended."""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from types import FrameType

from ..store.errors import DuelogError

_log = logging.getLogger("duelog.worker")

_PAUSE_S = 1.0


class Processes:
    """Children of this process, which has one thread. SIGTERM and SIGINT are passed on to them."""

    def __init__(self, work: Callable[[], object], count: int) -> None:
        """work: what each does, until it is told to stop by a signal."""
        self._work = work
        self._count = count
        self._children: set[int] = set()
        self._stopping = False

    def run(self) -> None:
        """Keep them running until this process is told to stop; then wait until all have ended.

        Raises DuelogError where one has ended by an error after that.
        """
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}
        failed = 0
        try:
            for _ in range(self._count):
                self._begin()
            while self._children:
                child, status = os.wait()
                self._children.discard(child)
                code = os.waitstatus_to_exitcode(status)
                if self._stopping:
                    failed += code != 0
                    continue
                _log.error("process %d has ended with status %d: another takes its place", child, code)
                time.sleep(_PAUSE_S)
                if not self._stopping:
                    self._begin()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if failed:
            raise DuelogError(f"{failed} of {self._count} processes ended with an error")

    def _begin(self) -> None:
        child = os.fork()
        if child:
            self._children.add(child)
            if self._stopping:  # told so meanwhile
                os.kill(child, signal.SIGTERM)
            return
        status = 1
        try:
            os.setpgid(0, 0)  # a Ctrl-C of the terminal comes once, by way of the parent
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._work()
            status = 0
        except DuelogError as error:
            _log.error("%s", error)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _heard(self, number: int, _: FrameType | None) -> None:
        self._stopping = True
        for child in self._children:
            os.kill(child, number)
