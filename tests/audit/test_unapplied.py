"""An audit beside a process that has not applied its write-ahead log yet."""

from __future__ import annotations

from pathlib import Path

from duelog.tools.audit import audit_store
from tests.audit.histories import damage
from tests.duelog.writing_process import HOUR_MS, WritingProcess


def test_what_has_fired_and_is_not_applied_is_not_missing(tmp_path: Path) -> None:
    """The markers are in the main environment, the messages in the write-ahead log alone."""
    with WritingProcess(tmp_path / "store", ledger_max_entries=2) as writer:
        writer.do("subscribe", "a", "mailer")
        writer.send("a", "x", 0, 0, 1_000, HOUR_MS)
        assert writer.do("advance", 1_500) == 1  # the partition is loaded
        writer.send("a", "x", 0, 0, 0, 0, 500, 600, 60_000)  # ledgers that the log alone knows
        assert writer.do("advance", 1_000) == 2
        writer.do("drain", "a", "mailer")
        writer.send("a", "x", 0, 0, 0, 0, 0)
        audit = audit_store(tmp_path / "store")
        assert damage(audit.findings) == []
        assert [(row.messages, row.pending) for row in audit.partitions] == [(4, 1), (1, 1)]
        assert [row.backlog for row in audit.subscriptions] == [5]
