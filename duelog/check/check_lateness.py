"""Messages behind their time: due and not fired, or fired late. Warnings, no damage.

Apart from `check`, since nothing of it is to be repaired: for `duelog check`, which looks at a store from outside.
"""

from __future__ import annotations

from collections.abc import Iterator

from duelog.markers.lookup import unfired
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec.format import PartitionState
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.log import catalog

from ..survey.contents import kept_ledgers, marker_runs, topic_names
from .finding import Finding, warning

LATE_MS = 60_000
"""A message is late, or overdue, when it fires, or has not fired, so long after it was due; `duelog audit` too."""


def check_lateness(main: Environment, partitions: PartitionSet, now_ms: int) -> Iterator[Finding]:
    """Findings by topic. O(due times of partitions that have begun, and markers in the main logs).

    Raises what reading a damaged store raises.
    """
    with main.read() as raw:
        names = topic_names(raw)
        begun = [
            start_ms
            for start_ms, record in catalog.partitions(raw)
            if record.state is PartitionState.OPEN and start_ms <= now_ms
        ]
        late = {topic_id: _late(raw, topic_id) for topic_id in names}
    overdue: dict[int, tuple[int, int]] = {}
    for partition in partitions.held(lambda partition: partition.start_ms in begun):
        for log in partition.logs():
            tail = log.ledger.entries
            _, dues = unfired(main, partition, log.topic_id, log.ledger_id, tail, 0, now_ms - LATE_MS + 1)
            if len(dues):
                count, since_ms = overdue.get(log.topic_id, (0, now_ms))
                overdue[log.topic_id] = count + len(dues), min(since_ms, int(dues[0]))
    for topic_id, name in sorted(names.items(), key=lambda pair: pair[1]):
        if topic_id in overdue:
            count, since_ms = overdue[topic_id]
            message = f"{count} messages are due and have not fired, the oldest since {since_ms}"
            advice = "open the store; where a process has it open, its log and `store.suspended()` say what keeps them"
            yield warning("overdue", name, message, advice)
        count, timed = late[topic_id]
        if count:
            message = f"{count} of {timed} messages in the main log fired more than {LATE_MS // 1000} s late"
            advice = "no process had the store open when they were due, or firing stood still; see `duelog audit`"
            yield warning("late", name, message, advice)


def _late(raw: Reads, topic_id: int) -> tuple[int, int]:
    """How many messages of a topic fired late, of those in its main log whose firing has a time."""
    late = timed = 0
    for run in marker_runs(raw, kept_ledgers(raw, topic_id)):
        fired_ms = run.fired_ms()
        if fired_ms is not None:
            timed += run.count
            late += int((run.dues() <= fired_ms - LATE_MS).sum())
    return late, timed
