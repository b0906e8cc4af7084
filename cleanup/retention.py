"""Which ledgers of a main log retention keeps, by the policies that the store has: for compaction and adoption.

Trimming (trim.py) goes by what is in memory and by whole ledgers from the front. Compaction goes by what is on disk,
and may drop single messages of ledgers that a slow subscription still holds: those count here as if everything had
been acknowledged by now, so that what compaction drops is what trimming would not have kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..store.codec import format as fmt
from ..store.codec.format import LedgerRecord, LedgerState, Relied, Table
from ..store.env.memtable import Reads
from ..store.log import catalog
from ..store.names import TopicName
from ..store.policy.policy_records import effective
from ..store.position import Position


def ledgers_kept(raw: Reads, topic_id: int, now_ms: int) -> set[int]:
    """Ids of the ledgers of a topic's main log whose acknowledged messages are kept to be sought back to.

    O(ledgers of the topic). Raises CorruptRecord.
    """
    name = catalog.topic_name(raw, topic_id)
    if name is None:
        return set()
    policies = effective(raw, TopicName.parse(name))
    if not policies.retention_ms and not policies.retention_bytes:
        return set()
    mark_deletes = [cursor.mark_delete for _, _, cursor in catalog.cursors(raw, topic_id)]
    ledgers = catalog.ledgers(raw, topic_id)
    return kept_of(ledgers, mark_deletes, policies.retention_ms, policies.retention_bytes, now_ms)


def retention_by_topic(raw: Reads) -> dict[int, tuple[int, int]]:
    """The policies `retention_ms` and `retention_bytes` in force, by topic id. Raises CorruptRecord."""
    retention = {}
    for key, name in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME)):
        policies = effective(raw, TopicName.parse(name.decode()))
        retention[fmt.trailing_u32(key)] = (policies.retention_ms, policies.retention_bytes)
    return retention


def kept_of(
    ledgers: Iterable[tuple[int, LedgerRecord]],
    mark_deletes: Sequence[Position],
    retention_ms: int,
    retention_bytes: int,
    now_ms: int,
) -> set[int]:
    """The same of a main log's (ledger id, record), with the mark-delete positions of its subscriptions."""
    passed_bytes = closed_bytes = 0  # of the ledgers after the one that is looked at
    kept = set()
    for ledger_id, record in sorted(ledgers, reverse=True):
        if record.state is LedgerState.TRIMMING:
            continue
        is_open = record.state is LedgerState.OPEN
        last = Position(ledger_id, record.entries - 1)
        passed = not is_open and all(mark_delete >= last for mark_delete in mark_deletes)
        young = is_open or record.closed_ms + retention_ms > now_ms
        newer_bytes = passed_bytes if passed else closed_bytes
        if (retention_ms and young) or newer_bytes < retention_bytes:
            kept.add(ledger_id)
        passed_bytes += record.stored_bytes if passed else 0
        closed_bytes += 0 if is_open else record.stored_bytes
    return kept


def reason_to_keep(raw: Reads, relied_on: Sequence[Relied], now_ms: int) -> str | None:
    """Why bodies whose acknowledgements lie at these positions are to stay by now; None: retention lets them go."""
    for topic_id in {relied.topic_id for relied in relied_on}:
        kept = ledgers_kept(raw, topic_id, now_ms)
        for relied in relied_on:
            if relied.topic_id == topic_id and relied.ledger_id in kept:
                name = catalog.topic_name(raw, topic_id)
                return f"by the retention of {name} messages are kept by now that it drops"
    return None
