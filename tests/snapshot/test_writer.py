"""Writing snapshots: what is on disk after every step, and what is left of those before."""

from __future__ import annotations

from duelog.snapshot.snapshot_format import SnapshotState, inspect_snapshots
from duelog.snapshot.writer import remove_snapshots, write_snapshot, write_snapshots
from duelog.store.env.environment import Environment
from duelog.store.files import failpoints
from tests.snapshot.logs import LEDGER, Log, drained, scattered

PART_BYTES = 1_024


def states(environment: Environment) -> list[tuple[int, int, str]]:
    """(ledger, snapshot id, state) of everything there is, parts read."""
    found = inspect_snapshots(environment, read_parts=True)
    return [(info.ledger_id, info.snapshot_id, info.state.value) for info in found]


def test_a_snapshot_says_what_was_written(environment: Environment) -> None:
    """Parts, bytes, entries and tail are those that can be read."""
    log = Log(scattered(1_000))
    log.fire(100)
    written = write_snapshot(environment, log.cut(), PART_BYTES, 77)
    (info,) = inspect_snapshots(environment, read_parts=True)
    assert info.metadata is not None
    assert (info.state, info.parts, info.metadata.created_ms) == (SnapshotState.COMPLETE, written.parts, 77)
    assert (written.entries, written.tail, written.stored_bytes) == (900, 1_000, info.metadata.stored_bytes)
    assert written.parts > 1


def test_metadata_comes_after_every_part_and_the_one_before_goes_last(environment: Environment) -> None:
    """At every step whatever has metadata is complete, and there always is one once there was one."""
    log = Log(scattered(500))
    write_snapshot(environment, log.cut(), PART_BYTES, 1)
    log.fire(100)
    seen: list[list[tuple[int, int, str]]] = []
    for name in ("snapshot.part", "snapshot.meta", "commit.after"):
        failpoints.arm(name, lambda: seen.append(states(environment)))
    written = write_snapshot(environment, log.cut(), PART_BYTES, 1)
    assert len(seen) > written.parts
    for found in seen:
        assert all(state in ("complete", "torn") for _, _, state in found)
        assert any(state == "complete" for _, _, state in found)
    assert seen[0] == [(LEDGER, 1, "complete"), (LEDGER, 2, "torn")]
    assert [(LEDGER, 1, "complete"), (LEDGER, 2, "complete")] in seen
    assert states(environment) == [(LEDGER, 2, "complete")]


def test_hundreds_of_small_logs_share_a_few_commits(environment: Environment) -> None:
    """Snapshots of small logs are grouped up to the size of a part; each is restored for itself."""
    logs = [Log(scattered(20, seed=number), ledger_id=number) for number in range(1, 301)]
    before = environment.counts.commits
    steps = write_snapshots(environment, (log.cut() for log in logs), 1 << 20, 1)
    written = list(filter(None, steps))
    assert [done.ledger_id for done in written] == list(range(1, 301))
    assert environment.counts.commits - before <= 4
    assert all(log.restore(environment) is not None for log in logs)
    for _ in write_snapshots(environment, (log.cut() for log in logs), 1 << 20, 1):
        pass
    assert environment.counts.commits - before <= 12
    assert states(environment) == [(number, 2, "complete") for number in range(1, 301)]


def test_transactions_of_parts_are_bounded(environment: Environment) -> None:
    """No transaction holds more than one part's worth of bitmaps, whatever the group."""
    logs = [Log(scattered(count, seed=count, span_ms=200), ledger_id=count) for count in (300, 900, 10, 20, 700)]
    parts: list[int] = []

    def count_parts() -> None:
        parts.append(sum(info.stored_bytes for info in inspect_snapshots(environment)))

    failpoints.arm("snapshot.part", count_parts)
    for _ in write_snapshots(environment, [log.cut() for log in logs], PART_BYTES, 1):
        pass
    grown = [after - before for before, after in zip([0, *parts], parts, strict=False)]
    assert max(grown) <= PART_BYTES + 200  # metadata of the group before is in between


def test_removing_leaves_no_key(environment: Environment) -> None:
    """Every part, torn ones too, and all metadata go; a second time there is nothing to commit."""
    for number in (1, 2, 3):
        log = Log(scattered(300), ledger_id=number)
        write_snapshot(environment, log.cut(), PART_BYTES, 1)
        next(write_snapshots(environment, [log.cut()], PART_BYTES, 1))
    assert remove_snapshots(environment) > 6
    assert states(environment) == []
    before = environment.counts.commits
    assert remove_snapshots(environment) == 0
    assert environment.counts.commits == before


def test_an_empty_index_has_a_snapshot_without_parts(environment: Environment) -> None:
    """Everything has fired: metadata alone says so, and saves the replay."""
    log = Log(scattered(100))
    log.fire(100)
    written = write_snapshot(environment, log.cut(), PART_BYTES, 1)
    assert (written.parts, written.entries) == (0, 0)
    restored = log.restored(environment)
    assert (restored.tail, drained(restored)) == (100, [])
