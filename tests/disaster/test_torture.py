"""The torture run's judge: each thing that may go wrong is seen in a log, and a log without it is clean."""

import json
from pathlib import Path

import pytest

from tests.disaster.torture import WRONG, judge

GOOD: list[list[object]] = [
    ["try", "sent", 1_000],
    ["stored", ["sent"]],
    ["try", "moved", 600_000],
    ["stored", ["moved"]],
    ["move", "moved", 1_003],
    ["moved", "moved", 1_003, True],
    ["try", "gone", 2_000],
    ["stored", ["gone"]],
    ["cancel", "gone"],
    ["cancelled", "gone", True],
    ["got", "s1", "sent", "a 1:0", 1_000, 1_000, 0],
    ["got", "s1", "sent", "a 1:0", 1_000, 1_200, 1],
    ["got", "s1", "moved", "a 1:1", 1_003, 1_004, 0],
    ["drained", 9_000],
]


def judged(path: Path, events: list[list[object]]) -> dict[str, int]:
    """Judge a log and return how often each fault was seen."""
    log = path / "log"
    log.write_text("".join(json.dumps(event) + "\n" for event in events) + '["try", "cut o')
    counts = judge(log)
    return {kind: counts[kind] for kind in WRONG if counts[kind]}


def test_a_log_in_which_all_went_well_is_clean(tmp_path: Path) -> None:
    """Redeliveries, reschedules and cancellations are no fault."""
    assert judged(tmp_path, GOOD) == {}


@pytest.mark.parametrize(
    ("kind", "at", "instead"),
    [
        ("lost", 10, []),
        ("lost", 5, [["moved", "moved", 1_003, False]]),
        ("doubled", 11, [["got", "s2", "sent", "a 1:7", 1_000, 1_200, 0]]),
        ("doubled", 11, [["got", "s1", "sent", "a 1:0", 1_000, 1_200, 0]]),
        ("early", 12, [["got", "s1", "moved", "a 1:1", 1_003, 1_002, 0]]),
        ("early", 12, [["got", "s1", "moved", "a 1:1", 1_001, 1_002, 0]]),
        ("came though cancelled", 13, [["got", "s1", "gone", "a 1:2", 2_000, 2_000, 0], GOOD[-1]]),
        ("stuck", 13, [["stuck", "why"], GOOD[-1]]),
        ("raw", 13, [["raw", "OSError"], GOOD[-1]]),
        ("found", 13, [["found", "code", "message"], GOOD[-1]]),
    ],
)
def test_what_went_wrong_is_seen(tmp_path: Path, kind: str, at: int, instead: list[list[object]]) -> None:
    """Each alone, as what it is."""
    events = [*GOOD[:at], *instead, *GOOD[at + 1 :]]
    if kind == "lost" and not instead:
        del events[10]  # both of its deliveries
    assert judged(tmp_path, events) == {kind: 1}
