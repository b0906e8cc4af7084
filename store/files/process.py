"""Which process this is, without asking the system each time: a child after fork has another number.

LMDB environments must not be used by a child of the process that opened them (docs/design.md, "What LMDB
demands"), so every call looks; a system call for it would be a tenth of a send. A fork that Python does not hear of,
by a C library, is not noticed.
"""

import os


class _Here:
    """The process that runs now."""

    __slots__ = ("is_fork", "pid")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_fork = False
        """It has what another process had in memory, whose open environments it may not use."""

    def look(self) -> None:
        """Ask the system again, in a child."""
        self.pid = os.getpid()
        self.is_fork = True


here = _Here()
os.register_at_fork(after_in_child=here.look)
