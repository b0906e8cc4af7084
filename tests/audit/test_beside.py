"""A process that writes the store while an audit runs, or has not applied its write-ahead log, makes no finding."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock
from duelog.store.errors import AlreadyOpen
from duelog.tools.audit import audit_store, partition_audit
from duelog.tools.audit.partition_audit import PartitionResult, PartitionTask, audit_environment
from duelog.tools.audit.store_audit import run_here
from tests.audit.histories import CONFIG, SLOW, damage
from tests.duelog.writing_process import HOUR_MS, WritingProcess

_COMPACT = """
import sys
from pathlib import Path
from duelog.tools.compact_store import compact_store
report = compact_store(Path(sys.argv[1]), min_dead_ratio=0.1)
assert {each.outcome for each in report.partitions} >= {"adopted"}, report
"""

_DRAIN = """
import sys
from duelog import DelayedStore, ManualClock
from tests.audit.histories import CONFIG, SLOW, damage, TRIMMED
clock = ManualClock(int(sys.argv[2]) + 10**9)
with DelayedStore.open(sys.argv[1], CONFIG, clock=clock) as store:
    store.tick()
    for name in (*SLOW, *TRIMMED):
        for subscription in store.topic(name).subscriptions():
            with store.topic(name).subscribe(subscription) as consumer:
                while batch := consumer.receive(1000, timeout=0):
                    consumer.ack(batch)
    clock.advance(10**9)
    store.tick()
    assert not list(store.partitions())
"""


class Meanwhile:
    """A runner that has another process do something before the first partition is read."""

    def __init__(self, program: str, *arguments: object) -> None:
        self._command = [sys.executable, "-c", program, *map(str, arguments)]

    def __call__(self, tasks: list[PartitionTask]) -> Iterable[PartitionResult]:
        root = Path(__file__).parents[2]
        subprocess.run(self._command, check=True, cwd=root, env={"PYTHONPATH": str(root), "PATH": ""})
        return run_here(tasks)


@pytest.fixture
def store(healthy: tuple[Path, int], tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(healthy[0], tmp_path / "store")


def test_partitions_that_are_compacted_meanwhile_are_read_anew(healthy: tuple[Path, int], store: Path) -> None:
    """With as many messages as before, in their newer generations."""
    before = audit_store(store, as_of_ms=healthy[1])
    after = audit_store(store, as_of_ms=healthy[1], run=Meanwhile(_COMPACT, store), patience_s=0)
    assert damage(after.findings) == []
    assert [row.messages for row in after.partitions] == [row.messages for row in before.partitions]
    generations = [
        (old.generation, new.generation) for old, new in zip(before.partitions, after.partitions, strict=True)
    ]
    assert (1, 2) in generations


def test_partitions_that_are_deleted_meanwhile_are_left_out(healthy: tuple[Path, int], store: Path) -> None:
    """Nor is what pointed into them a finding."""
    found = audit_store(store, as_of_ms=healthy[1], run=Meanwhile(_DRAIN, store, healthy[1]), patience_s=0)
    assert damage(found.findings) == []
    assert [row.state for row in found.partitions] == ["open"] * 4


def test_an_open_partition_that_closes_and_goes_while_it_is_read_is_no_finding(
    healthy: tuple[Path, int], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was opened is read to its end, though its file has no name any more; the others are left out."""
    drain = [Meanwhile(_DRAIN, store, healthy[1])]

    def read(*arguments: Any) -> Any:
        found = audit_environment(*arguments)
        if drain:
            drain.pop()([])
        return found

    monkeypatch.setattr(partition_audit, "audit_environment", read)
    audit = audit_store(store, as_of_ms=healthy[1], patience_s=0)
    assert damage(audit.findings) == []
    assert [(row.state, row.file_bytes) for row in audit.partitions] == [("open", 0)]
    assert list((store / "partitions").iterdir()) == []


def test_the_process_that_has_the_store_open_is_told_to_let_another_one_audit(
    healthy: tuple[Path, int], store: Path
) -> None:
    """LMDB lets a process open an environment once only."""
    with DelayedStore.open(store, CONFIG, clock=ManualClock(healthy[1])) as opened:
        assert opened.topic(SLOW[0]).exists()
        for verify in (True, False):
            with pytest.raises(AlreadyOpen, match="this process has"):
                audit_store(store, verify=verify)


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
