"""Every kind of damage, alone and all at once: the audit finds what was planted and nothing else."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from duelog.tools.audit import Audit, audit_store
from duelog.tools.audit.audit_tables import BEHIND_TIME, CODES, AuditFinding
from tests.audit.histories import damage
from tests.audit.planting import ALONE, PLANTS, Expected, Plant, Victim

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
    """What was planted, and nothing else."""
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
