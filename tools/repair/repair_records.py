"""Small records of an environment, whole again where one of the two places in which each stands is whole.

A record that is damaged or gone is made anew from its copy, a damaged copy from its record. What neither tells is
removed: its key is left to modules that may tell it from something else (repair_catalog.py and its neighbours). Records
of snapshots are not looked at: a snapshot that is not whole is removed, and made again from its log.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ...check.check_records import verify_record
from ...cleanup.mend import Discarded
from ...store.codec.format import Table, copied_key, copy_key
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.errors import CorruptRecord
from .repair_report import Account

_SNAPSHOTS = (Table.SNAPSHOT_PART, Table.SNAPSHOT_META)


class _Found(NamedTuple):
    """What stands under a key: the fields, or what is wrong with the value."""

    fields: bytes | None
    value: bytes
    reason: str


def mend_records(environment: Environment, account: Account) -> list[bytes]:
    """Mend the records of an environment; the keys of those that are lost, which are removed. O(small records)."""
    found = _read(environment)
    lost: list[bytes] = []
    anew: dict[bytes, bytes] = {}
    for key, record in found.items():
        if key[0] == Table.COPY:
            original = found.get(copied_key(key))
            if original is None and record.fields is None:
                lost.append(copied_key(key))
            elif original is None or original.fields is None or record.fields is None:
                fields = record.fields if original is None or original.fields is None else original.fields
                if fields is not None:
                    anew[copied_key(key)] = fields
        elif record.fields is None and (copy_key(key) not in found or found[copy_key(key)].fields is None):
            lost.append(key)
    for key in lost:
        record = found.get(key) or found[copy_key(key)]
        account.discard(Discarded(environment.name, 0, None, record.reason, key + record.value))

    originals = {copied_key(key) if key[0] == Table.COPY else key for key in found}
    account.count("records", len(originals), len(lost))

    def work(transaction: Transaction) -> None:
        for key in lost:
            transaction.delete(key)
        for key, fields in anew.items():
            transaction.put(key, fields)

    if lost or anew:
        environment.write(work)
    for table, count in sorted(Counter(_table(key) for key in anew).items()):
        account.say(f"{environment.name}: {count} {table} records made anew, one of the two places told the other")
    for table, count in sorted(Counter(_table(key) for key in lost).items()):
        account.say(f"{environment.name}: {count} {table} records could not be read and have no copy")
    return lost


def _read(environment: Environment) -> dict[bytes, _Found]:
    found = {}
    with environment.read() as raw:
        for view, value in raw.cursor():
            key = bytes(view)
            if key[0] == Table.RUN:
                break
            if key[0] in _SNAPSHOTS:
                continue
            try:
                found[key] = _Found(verify_record(key, value), b"", "")
            except (CorruptRecord, ValueError) as error:
                found[key] = _Found(None, bytes(value), str(error))
    return found


def _table(key: bytes) -> str:
    return Table(key[0]).name if key[0] in {int(table) for table in Table} else f"table {key[0]:#04x}"
