"""What a crash had in flight is counted as delivered: from the delivery log into the records, at the next opening."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from pyroaring import BitMap

from duelog.store.codec.attempt_rows import BLOCK_BITS, FailedDeliveries, attempts_key, pack_attempts, unpack_attempts
from duelog.store.codec.format import CursorRecord
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import StoreFull
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail

from .delivery_log import log_files, read_log

_LOGGER = logging.getLogger("duelog.attempts")

Handed = dict[int, dict[int, BitMap]]
"""By ledger id and times: the entries that were handed out for the so-many-th time."""


def recount(path: Path, store_id: bytes, main: Environment, now_ms: int) -> None:
    """Count what was handed out before a crash and is not acknowledged, and remove the log of it.

    Each such message has at least as many failed deliveries as it was handed out; that the last of them ended is put
    at `now_ms`. In one transaction. Where the disk is full the log stays, for the opening after this one.
    """
    files = log_files(path)
    if not files:
        return
    found: dict[int, Handed] = {}
    for file in files:
        for subscription_id, ledger_id, times, entries in read_log(file, store_id):
            if not times:
                found.pop(subscription_id, None)
                continue
            of_ledger = found.setdefault(subscription_id, {}).setdefault(ledger_id, {})
            of_ledger[times] = of_ledger.get(times, BitMap()) | entries

    def work(transaction: Transaction) -> int:
        cursors = [record for _, _, record in catalog.cursors(transaction.raw) if record.subscription_id in found]
        return sum(_count(transaction, cursor, found[cursor.subscription_id], now_ms) for cursor in cursors)

    try:
        counted = main.write(work) if found else 0
        if counted:
            main.sync()
            _LOGGER.info("%d messages were in flight when the store was left: counted as delivered", counted)
    except StoreFull:
        return
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _count(transaction: Transaction, cursor: CursorRecord, handed: Handed, now_ms: int) -> int:
    """Raise the counts of one subscription; how many messages are unacknowledged."""
    acked = dict(catalog.acked(transaction.raw, cursor.subscription_id))
    count = 0
    for ledger_id, by_times in handed.items():
        there = BitMap(range(find_tail(transaction.raw, "main", ledger_id)))
        if ledger_id < cursor.ledger_id:
            continue
        if ledger_id == cursor.ledger_id:
            there.remove_range(0, cursor.next_entry)
        if ledger_id in acked:
            there -= BitMap.deserialize(acked[ledger_id])
        times_of = {entry: times for times in sorted(by_times) for entry in by_times[times] & there}
        blocks: dict[int, dict[int, int]] = {}
        for entry_id, times in times_of.items():
            blocks.setdefault(entry_id >> BLOCK_BITS, {})[entry_id] = times
        for block, of_block in blocks.items():
            key = attempts_key(cursor.subscription_id, ledger_id, block)
            fields = transaction.get(key)
            rows = {} if fields is None else unpack_attempts(block, fields)
            for entry_id, times in of_block.items():
                known = rows.get(entry_id, FailedDeliveries(0, now_ms, now_ms))
                if times > known.times:
                    rows[entry_id] = FailedDeliveries(times, known.first_ms, now_ms)
            transaction.put(key, pack_attempts(rows))
        count += len(times_of)
    return count
