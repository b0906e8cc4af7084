"""Why a time partition is still there: not over, not fired, or kept by what may still be read of it.

`duelog audit` answers the same of a store on disk (docs/audit.md); this is what the process knows that has it open.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from duelog.partitions.partition import Partition
from duelog.partitions.timespan import directory_name
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.errors import InvalidArgument
from duelog.store.log import catalog
from duelog.store.log.managed_ledger import LedgerInfo
from duelog.store.position import Position

from .engine import Engine
from .topics.topic_state import TopicState


class Keeper(NamedTuple):
    """One reason why a partition is kept. topic, subscription: "" where the reason concerns none.

    reason: "not over", "pending", "unreadable", "subscription", "open ledger", "retention" or "next tick". behind:
    messages not fired, or entries that the subscription has not passed.
    """

    reason: str
    topic: str
    subscription: str
    behind: int
    explanation: str


def keepers(engine: Engine, start_ms: int) -> list[Keeper]:
    """Every reason there is; without any the next tick deletes it. Raises InvalidArgument: there is no such one."""
    partition = engine.storage.partitions.get(start_ms)
    if partition is None:
        raise InvalidArgument("start_ms", start_ms, "no time partition begins there")
    if partition.state is PartitionState.OPEN:
        reasons = list(_open(engine, partition))
        if partition.end_ms > engine.clock.now_ms():
            reasons.insert(0, Keeper("not over", "", "", 0, "messages may still fall due in it"))
    else:
        reasons = list(_closed(engine, partition))
    return reasons or [Keeper("next tick", "", "", 0, "nothing keeps it: the next tick goes on with it")]


def _open(engine: Engine, partition: Partition) -> Iterator[Keeper]:
    with engine.storage.partitions.lease(partition):
        logs = partition.logs()
        for log in logs:
            topic = engine.topics.by_id(log.topic_id)
            count = engine.figures.pending_in(partition, log)
            if topic is not None and count:
                yield Keeper("pending", str(topic.name), "", count, f"{count:,} messages have not fired")


def _closed(engine: Engine, partition: Partition) -> Iterator[Keeper]:
    with engine.storage.main.read() as raw:
        frontiers = [
            (topic_id, record)
            for topic_id, start_ms, record in catalog.frontiers(raw)
            if start_ms == partition.start_ms
        ]
        quarantined = [
            (fmt.leading_u64(key), fmt.trailing_u32(key))
            for _, record in frontiers
            for key, _ in catalog.rows(raw, fmt.quarantine_key(record.ledger_id, 0)[:-4])
        ]
    for ledger_id, entry_id in quarantined:
        where = f"entry {entry_id} of ledger {ledger_id} in {directory_name(partition.start_ms)}"
        yield Keeper("unreadable", "", "", 1, f"{where} is quarantined: `duelog repair` discards it")
    for topic_id, record in frontiers:
        topic = engine.topics.by_id(topic_id)
        if topic is not None and not record.released:
            yield from _topic(topic, record)


def _topic(topic: TopicState, frontier: FrontierRecord) -> Iterator[Keeper]:
    name, ledgers = str(topic.name), topic.log.ledgers()
    ledger = next((each for each in ledgers if each.ledger_id == frontier.marker_ledger), None)
    if ledger is None:
        return  # trimmed: the next tick releases it
    slow = list(_slow(topic, ledgers, ledger))
    yield from slow
    if slow:
        return
    where = f"its last message is in ledger {ledger.ledger_id} of the main log"
    if not ledger.closed:
        yield Keeper("open ledger", name, "", 0, f"{where}, which is still written to: it is closed by size or age")
    else:
        yield Keeper("retention", name, "", 0, f"{where}, which every subscription has passed: retention keeps it")


def _slow(topic: TopicState, ledgers: list[LedgerInfo], last: LedgerInfo) -> Iterator[Keeper]:
    for name, state in sorted(topic.subscriptions.items()):
        with state.lock:
            mark = state.acks.mark_delete
        if mark >= Position(last.ledger_id, last.entries - 1):
            continue
        after = [each for each in ledgers if mark.ledger_id <= each.ledger_id <= last.ledger_id]
        behind = sum(each.entries for each in after)
        if after and after[0].ledger_id == mark.ledger_id:
            behind -= mark.entry_id + 1
        why = f"has acknowledged up to {mark.ledger_id}:{mark.entry_id}; the last message is in ledger {last.ledger_id}"
        yield Keeper("subscription", str(topic.name), name, max(behind, 0), why)
