"""The ids of the messages of named producers by their numbers: records of the main environment.

Their form is in store/codec/sent_ids.py. They are rows of the group that stores the messages. What is consecutive takes
one row of a record, so a batch for one log takes one, a scattered one a row a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..store.codec.format import trailing_u64
from ..store.codec.sent_ids import (
    IN_MAIN,
    MOST_ROWS,
    NumberedRow,
    numbered_key,
    numbered_prefix,
    pack_numbered,
    unpack_numbered,
)
from ..store.env.memtable import Reads
from ..store.log import catalog
from ..store.position import MessageId


def records(
    topic_id: int, producer: str, numbers: Sequence[int], ids: Sequence[MessageId], starts: Mapping[int, int]
) -> Iterator[tuple[bytes, bytes]]:
    """(key, fields) of the records of some numbers, ascending; `starts`: of partitions by the ledgers of their logs."""
    rows: list[NumberedRow] = []
    last = -1
    for number, (ledger_id, entry_id) in zip(numbers, ids, strict=True):
        count, _, ledger, first = rows[-1] if rows else (0, 0, 0, 0)
        if rows and number == last + 1 and ledger_id == ledger and entry_id == first + count:
            rows[-1] = rows[-1]._replace(length=count + 1)
        else:
            if rows and (number != last + 1 or len(rows) == MOST_ROWS):
                yield numbered_key(topic_id, producer, last), pack_numbered(rows)
                rows = []
            rows.append(NumberedRow(1, starts.get(ledger_id, IN_MAIN), ledger_id, entry_id))
        last = number
    if rows:
        yield numbered_key(topic_id, producer, last), pack_numbered(rows)


def find(raw: Reads, topic_id: int, producer: str, first: int, count: int) -> list[MessageId | None]:
    """The ids of `count` numbers from `first` on, None where there is no record. O(records, and those unapplied).

    Raises CorruptRecord.
    """
    found: list[MessageId | None] = [None] * count
    prefix = numbered_prefix(topic_id, producer)
    for key, fields in catalog.rows(raw, prefix, numbered_key(topic_id, producer, first)):
        last = trailing_u64(key)
        for begin, row in unpack_numbered(last, fields):
            for number in range(max(begin, first), min(begin + row.length, first + count)):
                found[number - first] = MessageId(row.ledger_id, row.first_entry + number - begin)
        if last >= first + count - 1:
            break
    return found
