"""Every kind of damage, alone and all at once: the audit finds what was planted and nothing else."""

import json
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from duelog import DelayedStore, ManualClock, Policies, StoreConfig
from duelog.tools.audit import Audit, audit_store
from duelog.tools.audit.audit_tables import BEHIND_TIME, CODES, AuditFinding
from duelog.tools.audit.exported import audit_export
from duelog.tools.transfer.parquet_export import export_store
from tests.audit import planting
from tests.audit.histories import damage
from tests.audit.planting import ALONE, PLANTS, Expected, Plant, Victim
from tests.tools.arrow.every_table import fill
from tests.tools.command_line import PAST_MS, json_of

SEED = 20_261_121


@pytest.fixture
def victim(healthy: tuple[Path, int], tmp_path: Path) -> Victim:
    """A copy of it to be damaged."""
    shutil.copytree(healthy[0], tmp_path / "store")
    return Victim(tmp_path / "store", SEED)


def unmatched(findings: list[AuditFinding], expected: list[Expected]) -> tuple[list[AuditFinding], list[Expected]]:
    """Findings that were not planted, and what was planted and not found."""
    left = damage(findings)
    missed = []
    for want in expected:
        found = next((each for each in left if _is(each, want)), None)
        if found is None:
            missed.append(want)
        else:
            left.remove(found)
    return left, missed


def _is(found: AuditFinding, want: Expected) -> bool:
    return found.code == want.code and want.address in found.address and found.entries == want.entries


def audit(victim: Victim, now_ms: int) -> Audit:
    """The audit of the damaged store, by the time at its end."""
    return audit_store(victim.path, as_of_ms=now_ms, patience_s=0)


def test_the_undamaged_store_has_no_finding(healthy: tuple[Path, int]) -> None:
    """Nor when everything in it is long overdue."""
    path, now_ms = healthy
    assert damage(audit_store(path, as_of_ms=now_ms).findings) == []
    assert damage(audit_store(path, as_of_ms=now_ms + 10**10, verify=False).findings) == []


@pytest.mark.parametrize("plant", PLANTS + ALONE, ids=lambda plant: plant.__name__)
def test_each_kind_of_damage_is_found_alone(healthy: tuple[Path, int], victim: Victim, plant: Plant) -> None:
    """The one that was planted, and nothing else."""
    expected = plant(victim)
    assert expected
    assert unmatched(audit(victim, healthy[1]).findings, expected) == ([], [])


def test_all_kinds_of_damage_at_once_are_found(healthy: tuple[Path, int], victim: Victim) -> None:
    """Planted in an order drawn from a fixed seed: each is found, and nothing else."""
    plants = sorted(PLANTS, key=lambda plant: plant.__name__)
    random.Random(SEED).shuffle(plants)
    expected = [want for plant in plants for want in plant(victim)]
    assert {want.code for want in expected} | {"damaged-main"} == set(CODES) - BEHIND_TIME  # no kind is without a plant
    assert unmatched(audit(victim, healthy[1]).findings, expected) == ([], [])


VISIBLE: list[Plant] = [
    planting.lost_where_markers_were_trimmed,
    planting.closed_over_what_had_not_fired,
    planting.doubled_marker,
    planting.dangling_marker_of_no_entry,
    planting.dangling_marker_of_another_log,
    planting.stray_marker,
    planting.damaged_body,
    planting.damaged_run,
    planting.missing_run,
    planting.missing_end,
    planting.wrong_holders,
    planting.released_and_not_deleted,
]
"""Damage that can be exported."""


def test_the_audit_of_an_export_is_that_of_its_store(healthy: tuple[Path, int], tmp_path: Path) -> None:
    """Closed partitions, lateness, and what holds them; the export has no open ones."""
    path, now_ms = healthy
    export_store(path, tmp_path / "export")
    there = audit_store(path, as_of_ms=now_ms)
    found = json_of("audit", "--from-parquet", tmp_path / "export", "--as-of", now_ms)
    assert damage(found["findings"]) == []
    assert found["lateness"] == [row._asdict() for row in there.lateness]
    closed = [row for row in there.partitions if row.state == "closed"]
    assert [row["messages"] for row in found["partitions"]] == [row.messages for row in closed]
    assert sum(row["pending"] for row in found["retention"]) == 0
    ours = audit_export(tmp_path / "export", as_of_ms=now_ms)
    first_day = [row for row in there.retention if row.day_ms == there.retention[0].day_ms]
    assert [row for row in ours.retention if row.day_ms == first_day[0].day_ms] == first_day


def test_an_export_says_what_retention_keeps(tmp_path: Path) -> None:
    """By the policies that the store had; the audit of it says the same as that of the store."""
    clock, path = ManualClock(PAST_MS), tmp_path / "store"
    config = StoreConfig(partition_ms=1_000, ledger_max_entries=1, background=False)
    with DelayedStore.open(path, config, clock=clock) as store:
        store.set_policies(Policies(retention_ms=5_000), topic="t")
        with store.topic("t").subscribe("s") as consumer:
            store.topic("t").send(b"x", deliver_after=0.5)
            clock.advance(2_000)
            consumer.ack(consumer.receive(1), durable=True)
            store.tick()
    export_store(path, tmp_path / "export")
    for as_of_ms, why in ((PAST_MS + 6_000, "retention keeps it until"), (PAST_MS + 9_000, "does not keep it")):
        (held,) = audit_export(tmp_path / "export", as_of_ms=as_of_ms).held
        assert why in held.explanation
        assert audit_store(path, as_of_ms=as_of_ms).held == [held]


def test_damage_that_was_exported_is_found(healthy: tuple[Path, int], tmp_path: Path) -> None:
    """All kinds at once, and nothing else."""
    shutil.copytree(healthy[0], tmp_path / "store")
    victim = Victim(tmp_path / "store", SEED)
    expected = [want for plant in VISIBLE for want in plant(victim)]
    export_store(victim.path, tmp_path / "export")
    assert unmatched(audit_export(tmp_path / "export", as_of_ms=healthy[1]).findings, expected) == ([], [])


def test_an_export_has_the_dead_letter_table_of_its_store(tmp_path: Path) -> None:
    """Counted by where they came from and why; an export of an earlier version, without letters, has none."""
    made = fill(tmp_path / "store")
    export_store(made.path, tmp_path / "export")
    there = audit_store(made.path, as_of_ms=made.now_ms).dead_letters
    assert audit_export(tmp_path / "export", as_of_ms=made.now_ms).dead_letters == there
    assert [row.letters for row in there] == [3]
    manifest = tmp_path / "export" / "MANIFEST.json"
    fields = json.loads(manifest.read_bytes())
    for name in ("attempts", "dead_letters"):
        (tmp_path / "export" / fields["tables"].pop(name)).unlink()
    manifest.write_text(json.dumps(fields))
    assert audit_export(tmp_path / "export").dead_letters == []
