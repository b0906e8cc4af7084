"""Bodies that lie in main logs, against their checksums: read in short transactions, after the facts."""

from __future__ import annotations

from collections.abc import Iterator

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
            number = 0
            for number, run in enumerate(runs(raw, main.name, ledger_id, start, limit), 1):
                if not isinstance(run, Run):
                    start = run.entry_id + 1
                    continue
                start = run.limit
                if run.kind == RunKind.MESSAGES:
                    found += run.damaged_bodies()
                if number == _RUNS_A_TRANSACTION:
                    break
            if number < _RUNS_A_TRANSACTION:
                start = limit
        yield from found
