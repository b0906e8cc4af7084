"""What a repair does about references to what it discarded: subscriptions go on, topics release, counts are right."""

from __future__ import annotations

from pyroaring import BitMap

from ...cleanup.mend import mend_ledger
from ...delivery.acks import AckSet
from ...partitions import cancellations
from ...partitions.due_column import fired_entries
from ...store.codec import format as fmt
from ...store.codec.format import LedgerRecord, LedgerState, PartitionRecord, PartitionState, Table
from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Run, RunKind
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.log import catalog
from ...store.log.ledger import RunLimits, find_tail
from ...store.log.managed_ledger import LedgerLimits, ManagedLedger
from ...store.log.scan import runs
from .repair_markers import restore_markers
from .repair_report import Account
from .repair_withdrawals import OpenLog


def reconcile(main: Environment, lost: dict[int, BitMap], open_log: OpenLog, account: Account) -> None:
    """Mend the main logs, and acknowledge for every subscription what was discarded. `lost`: by ledger.

    What was quarantined and can be read now is delivered; what cannot is in `lost`, or is found here.
    """
    with main.read() as raw:
        topics = [fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))]
    for topic_id in topics:
        _reconcile_topic(main, topic_id, lost, open_log, account)

    def clear(transaction: Transaction) -> int:
        keys = [key for key, _ in catalog.rows(transaction.raw, fmt.prefix(Table.SET_ASIDE))]
        return sum(transaction.delete(key) for key in keys)

    if cleared := main.write(clear):
        account.say(f"main: {cleared} entries are no longer quarantined")


def _reconcile_topic(
    main: Environment, topic_id: int, lost: dict[int, BitMap], open_log: OpenLog, account: Account
) -> None:
    with main.read() as raw:
        ledgers = [row for row in catalog.ledgers(raw, topic_id) if row[1].state is not LedgerState.TRIMMING]
        cursors = [row for _, _, row in catalog.cursors(raw, topic_id)]
        singly = [
            {ledger_id: BitMap.deserialize(row) for ledger_id, row in catalog.acked(raw, cursor.subscription_id)}
            for cursor in cursors
        ]
        frontiers = [row for _, _, row in catalog.frontiers(raw, topic_id) if row.fired]
    acks = [AckSet(row.mark_delete, rows) for row, rows in zip(cursors, singly, strict=True)]
    holes: dict[int, BitMap] = {}
    discarded: dict[int, BitMap] = {}
    for ledger_id, record in ledgers:
        least = [record.entries if record.state is LedgerState.CLOSED else 0]
        least += [row.marker_entry + 1 for row in frontiers if row.marker_ledger == ledger_id]
        least += [row.next_entry for row in cursors if row.ledger_id == ledger_id]
        least += [max(rows[ledger_id], default=-1) + 1 for rows in singly if ledger_id in rows]
        mended = mend_ledger(main, ledger_id, least_entries=max(least), base_ms=0, dues={}, discard=account.discard)
        holes[ledger_id], discarded[ledger_id] = mended.holes, mended.bodies
        if record.state is LedgerState.CLOSED and mended.entries != record.entries:
            closed: LedgerRecord = record._replace(entries=mended.entries)
            key = fmt.ledger_key(topic_id, ledger_id)
            main.write(lambda transaction: transaction.put(key, closed.pack()))  # noqa: B023 - it has returned
    whole, appended = restore_markers(main, topic_id, holes, open_log, account)
    for ledger_id, entries in holes.items():
        discarded[ledger_id] |= entries - whole.get(ledger_id, BitMap())
    again = max((sum(len(of - _unacknowledged(one, at, of)) for at, of in holes.items()) for one in acks), default=0)
    account.again += min(appended, again)
    for ledger_id in discarded:
        discarded[ledger_id] |= _pointing_at(main, ledger_id, lost)
    owed = sum(len(_unacknowledged_by_any(acks, ledger_id, entries)) for ledger_id, entries in discarded.items())
    account.lost += max(owed - appended, 0)
    for ledger_id, entries in discarded.items():
        if entries:
            account.say(f"main, ledger {ledger_id}: {len(entries)} entries are acknowledged for every subscription")
    _acknowledge(main, topic_id, {ledger: entries for ledger, entries in discarded.items() if entries}, account)


def _unacknowledged(acks: AckSet, ledger_id: int, entries: BitMap) -> BitMap:
    """Those of `entries` that a subscription has not acknowledged."""
    return entries & acks.unacked(ledger_id, entries.min(), entries.max() + 1) if entries else BitMap()


def _unacknowledged_by_any(acks: list[AckSet], ledger_id: int, entries: BitMap) -> BitMap:
    """Those of `entries` that some subscription has not acknowledged; all where there is no subscription."""
    found = BitMap() if acks else entries
    for each in acks:
        found = found | _unacknowledged(each, ledger_id, entries)
    return found


def _pointing_at(main: Environment, ledger_id: int, lost: dict[int, BitMap]) -> BitMap:
    """Entries of a main-log ledger whose markers point at what was discarded."""
    found = BitMap()
    if not lost:
        return found
    with main.read() as raw:
        for run in runs(raw, main.name, ledger_id):
            if isinstance(run, Run) and run.kind == RunKind.MARKERS and run.target in lost:
                targets = run.targets().tolist()
                found.update(run.first_entry + at for at, entry in enumerate(targets) if entry in lost[run.target])
    return found


def _acknowledge(main: Environment, topic_id: int, discarded: dict[int, BitMap], account: Account) -> None:
    with main.read() as raw:
        log = ManagedLedger.load(raw, main.name, topic_id, RunLimits(), LedgerLimits(1 << 31, 1 << 62, 1 << 62))
        cursors = list(catalog.cursors(raw, topic_id))
        acked = {row.subscription_id: dict(catalog.acked(raw, row.subscription_id)) for _, _, row in cursors}
    for _, name, record in cursors:
        acks = AckSet.load(record.mark_delete, acked[record.subscription_id])
        last = log.ledgers()[-1]
        if record.ledger_id > last.ledger_id:
            acks.reset(log.end._replace(entry_id=last.entries - 1))
            account.say(f"topic {topic_id}: subscription {name} is at the end of the log")
        acks.trim_to(log.first_ledger, log)
        for ledger_id, entries in discarded.items():
            acks.ack(ledger_id, entries, log)
        changes = acks.take_changes()
        if not changes:
            continue

        def write(transaction: Transaction) -> None:
            mark = changes.mark_delete  # noqa: B023 - it has returned before the next
            moved = record._replace(ledger_id=mark.ledger_id, next_entry=mark.entry_id + 1)  # noqa: B023
            transaction.put(fmt.cursor_key(topic_id, name), moved.pack())  # noqa: B023
            for ledger_id, row in changes.acked.items():  # noqa: B023
                key = fmt.acked_key(record.subscription_id, ledger_id)  # noqa: B023
                if row is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, row)

        main.write(write)


def recount(main: Environment, environment: Environment, start_ms: int, account: Account) -> None:
    """Count again what a partition's logs have fired and its references."""
    actions: list[str] = []

    def work(transaction: Transaction) -> None:
        actions.clear()
        raw = transaction.raw
        topics = {fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))}
        references = 0
        for topic_id, start, frontier in list(catalog.frontiers(raw)):
            if start != start_ms or topic_id not in topics:
                continue
            ledger_id = frontier.ledger_id
            fired = _fired(transaction, environment, frontier)
            changed = frontier._replace(fired=fired)
            if frontier.fired and not _has_markers(transaction, topic_id, ledger_id):
                changed = changed._replace(marker_ledger=0, marker_entry=0)
            if changed != frontier and (fired != frontier.fired or not changed.marker_ledger):
                transaction.put(fmt.frontier_key(topic_id, start_ms), changed.pack())
                actions.append(f"{environment.name}, ledger {ledger_id}: {fired} have fired, not {frontier.fired}")
            references += not frontier.released
        key = fmt.partition_key(start_ms)
        fields = transaction.get(key)
        record = None if fields is None else PartitionRecord.unpack(fields)
        if record is not None and record.state is PartitionState.CLOSED and record.references != references:
            transaction.put(key, record._replace(references=references).pack())
            actions.append(f"{environment.name}: {references} topics hold it, not {record.references}")

    main.write(work)
    for action in actions:
        account.say(action)


def _fired(transaction: Transaction, environment: Environment, frontier: FrontierRecord) -> int:
    ledger_id = frontier.ledger_id
    admitted = cancellations.members(transaction.raw, Table.ADMITTED, ledger_id)
    with environment.read() as raw:
        tail = find_tail(raw, environment.name, ledger_id)
    passed, _ = fired_entries(environment, frontier, tail, admitted)
    return len(passed - cancellations.members(transaction.raw, Table.CANCELLED, ledger_id))


def _has_markers(transaction: Transaction, topic_id: int, ledger_id: int) -> bool:
    for main_ledger, _ in catalog.ledgers(transaction.raw, topic_id):
        for run in runs(transaction.raw, "main", main_ledger):
            if isinstance(run, Run) and run.kind == RunKind.MARKERS and run.target == ledger_id:
                return True
    return False
