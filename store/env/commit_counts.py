"""What the commits of one environment have done since it was opened."""

from __future__ import annotations


class CommitCounts:
    """Figures of an environment's commits: `requests` / `commits` says how many writers shared one."""

    __slots__ = ("commits", "entries", "longest_ns", "requests", "total_ns")

    def __init__(self) -> None:
        self.commits = 0
        self.requests = 0
        self.entries = 0
        """Entries appended to ledgers."""
        self.total_ns = 0
        self.longest_ns = 0

    def add(self, requests: int, entries: int, elapsed_ns: int) -> None:
        """Count one commit. REQUIRES: the leader of the commit calls it."""
        self.commits += 1
        self.requests += requests
        self.entries += entries
        self.total_ns += elapsed_ns
        self.longest_ns = max(self.longest_ns, elapsed_ns)
