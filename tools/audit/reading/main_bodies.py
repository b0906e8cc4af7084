"""Bodies that lie in main logs, against their checksums: read in short transactions, after the facts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ....store.codec.run import Run, RunKind
from ....store.env.environment import Environment
from ....store.log.scan import runs
from ..tables import AuditFinding, finding
from .facts import StoreFacts

_RUNS_A_TRANSACTION = 512


def main_body_findings(main: Environment, facts: StoreFacts) -> Iterator[AuditFinding]:
    """Damaged messages of main logs. What was trimmed meanwhile is not looked at. O(bytes)."""
    for topic in facts.topics.values():
        for ledger in topic.ledgers:
            if ledger.messages:
                for entry_id, reason in _damaged(main, ledger.ledger_id, ledger.entries):
                    address = f"main, ledger {ledger.ledger_id}, entry {entry_id}"
                    yield finding("corrupt-entry", address, reason, 1)


def _damaged(main: Environment, ledger_id: int, limit: int) -> Iterator[tuple[int, str]]:
    start = 0
    while start < limit:
        found: list[tuple[int, str]] = []
        with main.read() as raw:
            some = list(islice(runs(raw, main.name, ledger_id, start, limit), _RUNS_A_TRANSACTION))
            for run in some:
                if isinstance(run, Run) and run.kind == RunKind.MESSAGES:
                    found += run.damaged_bodies()
            last = some[-1] if len(some) == _RUNS_A_TRANSACTION else None
            start = limit if last is None else last.limit if isinstance(last, Run) else last.entry_id + 1
        yield from found
