"""Subscriptions under repair: records that are lost, and entries that were discarded.

One whose record is lost begins as early as the rest allows, rather twice than never: that is the first ledger that its
topic keeps; what its acknowledgements say stays acknowledged. The key of a damaged record names the subscription; where
the record is gone its acknowledgements tell its topic, and it gets a name that says so. A topic whose subscriptions
have acknowledged nothing singly and lose their records without a copy has lost them unseen: that is why there are
copies.

What points at a discarded entry is acknowledged for every subscription, so that they go on.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap

from ...cleanup.mend import mend_ledger
from ...delivery.acks import AckSet
from ...store.codec import format as fmt
from ...store.codec.format import CursorRecord, LedgerRecord, LedgerState, Table
from ...store.codec.run import RunLimits
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.env.transaction import Transaction
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.log.managed_ledger import LedgerLimits, ManagedLedger
from .repair_catalog import RECOVERED, kept_ledgers, main_ledgers, topic_ids
from .repair_fired import OpenLog, marker_runs, restore_markers
from .repair_report import Account


def mend_cursors(main: Environment, lost: Iterable[bytes], account: Account) -> None:
    """Make subscriptions anew whose records are lost. lost: keys of records that cannot be read."""
    lost = list(lost)
    named = [key for key in lost if key[0] == Table.CURSOR]

    def work(transaction: Transaction) -> None:
        raw = transaction.raw
        known = {row.subscription_id for _, _, row in catalog.cursors(raw)}
        orphans: dict[int, set[int]] = {}
        for key, _ in catalog.rows(raw, fmt.prefix(Table.ACKED)):
            if fmt.leading_u32(key) not in known:
                orphans.setdefault(fmt.leading_u32(key), set()).add(fmt.trailing_u64(key))
        owners = main_ledgers(raw)
        topics = {number: {owners[each] for each in of if each in owners} for number, of in orphans.items()}
        for key in named:
            topic_id = fmt.leading_u32(key)
            if catalog.topic_name(raw, topic_id) is None:
                continue
            numbers = [number for number, of in topics.items() if of == {topic_id}]
            alone = len(numbers) == 1 and sum(fmt.leading_u32(other) == topic_id for other in named) == 1
            if alone:
                topics.pop(numbers[0])
            _begin(transaction, topic_id, key, numbers[0] if alone else None, account)
        for number, of in topics.items():
            for topic_id in sorted(of)[:1]:
                _begin(transaction, topic_id, fmt.cursor_key(topic_id, f"{RECOVERED}-{number}"), number, account)
        _drop_acked(transaction, account)

    account.write(main, work)
    with main.read() as raw:
        for key in lost:
            if key[0] == Table.ACKED:
                _report_acked(raw, key, account)


def _begin(transaction: Transaction, topic_id: int, key: bytes, number: int | None, account: Account) -> None:
    """Write a cursor before the first ledger that is kept."""
    raw = transaction.raw
    kept = kept_ledgers(raw, topic_id)
    entries = sum(find_tail(raw, "main", ledger_id) for ledger_id in kept)
    acked = 0
    if number is not None:
        acked = sum(len(BitMap.deserialize(fields)) for _, fields in catalog.acked(raw, number))
    else:
        number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
    transaction.put(key, CursorRecord(number, 0, min(kept, default=0), 0, 0).pack())
    account.report.again += entries - acked
    fate = f"begins at the start again, {acked} of {entries} entries stay acknowledged"
    name = fmt.split_named_key(key, "replace")[1]
    account.subscription(catalog.topic_name(raw, topic_id) or str(topic_id), name, fate)


def _drop_acked(transaction: Transaction, account: Account) -> None:
    """Remove what subscriptions acknowledged and failed at of which nothing else is left, not even a topic."""
    known = {row.subscription_id for _, _, row in catalog.cursors(transaction.raw)}
    for table, what in (
        (Table.ACKED, "acknowledgements"),
        (Table.ATTEMPTS, "failed deliveries"),
        (Table.PAUSE, "ends of pauses"),
    ):
        rows = catalog.rows(transaction.raw, fmt.prefix(table))
        bad = [key for key, _ in rows if fmt.leading_u32(key) not in known]
        for key in bad:
            transaction.delete(key)
        if bad:
            account.say(f"main: removed {len(bad)} records of the {what} of subscriptions that are gone")


def _report_acked(raw: Reads, key: bytes, account: Account) -> None:
    """Say what the loss of acknowledged entries means: they are delivered again."""
    number, ledger_id = fmt.leading_u32(key), fmt.trailing_u64(key)
    for topic_id, name, row in catalog.cursors(raw):
        if row.subscription_id == number and row.ledger_id <= ledger_id:
            start = row.next_entry if row.ledger_id == ledger_id else 0
            most = max(find_tail(raw, "main", ledger_id) - start, 0)
            account.report.again += most
            fate = f"up to {most} entries of ledger {ledger_id} that it had acknowledged may come again"
            account.subscription(catalog.topic_name(raw, topic_id) or str(topic_id), name, fate)


def reconcile(main: Environment, lost: dict[int, BitMap], open_log: OpenLog, account: Account) -> None:
    """Mend the main logs, and acknowledge for every subscription what was discarded. `lost`: by ledger.

    What was quarantined and can be read now is delivered; what cannot is in `lost`, or is found here.
    """
    with main.read() as raw:
        topics = topic_ids(raw)
    for topic_id in sorted(topics):
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
        ledgers = kept_ledgers(raw, topic_id)
        cursors = [row for _, _, row in catalog.cursors(raw, topic_id)]
        singly = [
            {ledger_id: BitMap.deserialize(row) for ledger_id, row in catalog.acked(raw, cursor.subscription_id)}
            for cursor in cursors
        ]
        frontiers = [row for _, _, row in catalog.frontiers(raw, topic_id) if row.fired]
    acks = [AckSet(row.mark_delete, rows) for row, rows in zip(cursors, singly, strict=True)]
    holes: dict[int, BitMap] = {}
    discarded: dict[int, BitMap] = {}
    found = 0
    for ledger_id, record in ledgers.items():
        least = [record.entries if record.state is LedgerState.CLOSED else 0]
        least += [row.marker_entry + 1 for row in frontiers if row.marker_ledger == ledger_id]
        least += [row.next_entry for row in cursors if row.ledger_id == ledger_id]
        least += [max(rows[ledger_id], default=-1) + 1 for rows in singly if ledger_id in rows]
        mended = mend_ledger(main, ledger_id, least_entries=max(least), base_ms=0, dues={}, discard=account.discard)
        holes[ledger_id], discarded[ledger_id] = mended.holes, mended.bodies
        found += mended.entries
        if record.state is LedgerState.CLOSED and mended.entries != record.entries:
            closed: LedgerRecord = record._replace(entries=mended.entries)
            key = fmt.ledger_key(topic_id, ledger_id)
            main.write(lambda transaction: transaction.put(key, closed.pack()))  # noqa: B023 - it has returned
    whole, appended = restore_markers(main, topic_id, holes, open_log, account)
    for ledger_id, entries in holes.items():
        discarded[ledger_id] |= entries - whole.get(ledger_id, BitMap())
    account.count("entries of main logs", found, sum(map(len, discarded.values())))
    again = max((sum(len(of - _unacknowledged(one, at, of)) for at, of in holes.items()) for one in acks), default=0)
    account.report.again += min(appended, again)
    for ledger_id in discarded:
        discarded[ledger_id] |= _pointing_at(main, ledger_id, lost)
    owed = 0
    for ledger_id, entries in discarded.items():  # all of them where there is no subscription
        owed += len(BitMap.union(*(_unacknowledged(each, ledger_id, entries) for each in acks)) if acks else entries)
    account.report.lost += max(owed - appended, 0)
    for ledger_id, entries in discarded.items():
        if entries:
            account.say(f"main, ledger {ledger_id}: {len(entries)} entries are acknowledged for every subscription")
    _acknowledge(main, topic_id, {ledger: entries for ledger, entries in discarded.items() if entries}, account)


def _unacknowledged(acks: AckSet, ledger_id: int, entries: BitMap) -> BitMap:
    """Those of `entries` that a subscription has not acknowledged."""
    return entries & acks.unacked(ledger_id, entries.min(), entries.max() + 1) if entries else BitMap()


def _pointing_at(main: Environment, ledger_id: int, lost: dict[int, BitMap]) -> BitMap:
    """Entries of a main-log ledger whose markers point at what was discarded."""
    found = BitMap()
    with main.read() as raw:
        for run in marker_runs(raw, [ledger_id] if lost else []):
            targets = enumerate(run.targets().tolist())
            found.update(run.first_entry + at for at, entry in targets if entry in lost.get(run.target, ()))
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
