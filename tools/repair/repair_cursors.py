"""Subscriptions under repair: one whose record is lost begins as early as the rest allows, rather twice than never.

That is the first ledger that its topic keeps; what its acknowledgements say stays acknowledged. The key of a damaged
record names the subscription; where the record is gone its acknowledgements tell its topic, and it gets a name that
says so. A topic whose subscriptions have acknowledged nothing singly and lose their records without a copy has lost
them unseen: that is why there are copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import lmdb
from pyroaring import BitMap

from ...store.codec import format as fmt
from ...store.codec.format import CursorRecord, LedgerState, Table
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.log import catalog
from ...store.log.ledger import find_tail
from .repair_catalog import RECOVERED
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
        owners = {fmt.trailing_u64(key): fmt.leading_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.LEDGER))}
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
    kept = [row for row in catalog.ledgers(raw, topic_id) if row[1].state is not LedgerState.TRIMMING]
    entries = sum(find_tail(raw, "main", ledger_id) for ledger_id, _ in kept)
    acked = 0
    if number is not None:
        acked = sum(len(BitMap.deserialize(fields)) for _, fields in catalog.acked(raw, number))
    else:
        number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
    transaction.put(key, CursorRecord(number, 0, kept[0][0] if kept else 0, 0, 0).pack())
    account.again += entries - acked
    fate = f"begins at the start again, {acked} of {entries} entries stay acknowledged"
    name = fmt.split_named_key(key, "replace")[1]
    account.subscription(catalog.topic_name(raw, topic_id) or str(topic_id), name, fate)


def _drop_acked(transaction: Transaction, account: Account) -> None:
    """Remove what was acknowledged by subscriptions of which nothing else is left, not even a topic."""
    known = {row.subscription_id for _, _, row in catalog.cursors(transaction.raw)}
    bad = [
        key for key, _ in catalog.rows(transaction.raw, fmt.prefix(Table.ACKED)) if fmt.leading_u32(key) not in known
    ]
    for key in bad:
        transaction.delete(key)
    if bad:
        account.say(f"main: removed the acknowledgements of {len(bad)} ledgers that are gone")


def _report_acked(raw: lmdb.Transaction, key: bytes, account: Account) -> None:
    """Say what the loss of acknowledged entries means: they are delivered again."""
    number, ledger_id = fmt.leading_u32(key), fmt.trailing_u64(key)
    for topic_id, name, row in catalog.cursors(raw):
        if row.subscription_id == number and row.ledger_id <= ledger_id:
            start = row.next_entry if row.ledger_id == ledger_id else 0
            most = max(find_tail(raw, "main", ledger_id) - start, 0)
            account.again += most
            fate = f"up to {most} entries of ledger {ledger_id} that it had acknowledged may come again"
            account.subscription(catalog.topic_name(raw, topic_id) or str(topic_id), name, fate)
