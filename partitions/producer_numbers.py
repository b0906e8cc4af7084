"""Records of named producers: which sequence numbers are stored, and under which ids.

The main environment records exactly the numbers whose messages are stored: they are rows of the group of the
write-ahead log that stores these, so after any crash a number is recorded if and only if its message is there. No
record says anything of a number between two others: numbers may be left out, and of a batch that is several groups a
crash may leave the first.

Numbers lie in blocks of 65,536, each a roaring bitmap in a row of its own; consecutive numbers cost one row of some
60 bytes a block. Their ids are records of a second table (store/codec/sent_ids.py): consecutive entries of one log take
one row of a record, so a batch for one log takes one, a scattered batch one a message.

    SEQUENCE := bitmap                     roaring, 64 bits, whole numbers; key: topic id, producer name, block u64
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from pyroaring import BitMap64

from ..store.codec import format as fmt
from ..store.codec.format import Table, trailing_u64
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
from ..store.env.transaction import Transaction
from ..store.log import catalog
from ..store.position import MessageId

BLOCK_BITS = 16


def read(raw: Reads, topic_id: int, producer: str) -> BitMap64:
    """Read the numbers that a producer has stored; a new bitmap each time. O(blocks). Raises CorruptRecord."""
    prefix = fmt.sequence_prefix(topic_id, producer)
    numbers = BitMap64()
    for _, fields in catalog.rows(raw, prefix):
        numbers |= BitMap64.deserialize(fields)
    return numbers


_key = lru_cache(1_024)(fmt.sequence_key)
"""Keys of the blocks that producers are at: each is that of many sends."""


def blocks(topic_id: int, producer: str, numbers: BitMap64) -> list[tuple[bytes, BitMap64]]:
    """Split numbers, which nobody changes any more, by the record that they are united with: (key, numbers)."""
    found: list[tuple[bytes, BitMap64]] = []
    rest = numbers
    while rest:
        block = rest.min() >> BLOCK_BITS
        limit = (block + 1) << BLOCK_BITS
        members = rest if rest.max() < limit else rest & BitMap64(range(block << BLOCK_BITS, limit))
        members.run_optimize()
        found.append((_key(topic_id, producer, block), members))
        if members is rest:
            break
        rest = rest - members
    return found


def split_key(key: bytes) -> tuple[int, str, int]:
    """(topic id, producer name, block) of a key of SEQUENCE."""
    return fmt.leading_u32(key), key[5:-8].decode(), trailing_u64(key)


def remove(transaction: Transaction, topic_id: int, producer: str | None = None) -> None:
    """Forget the numbers of a producer of a topic, None: of all its producers."""
    prefix = fmt.prefix(Table.SEQUENCE, topic_id) if producer is None else fmt.sequence_prefix(topic_id, producer)
    for key, _ in list(catalog.rows(transaction.raw, prefix)):
        transaction.delete(key)


def id_records(
    topic_id: int, producer: str, numbers: Sequence[int], ids: Sequence[MessageId], starts: Mapping[int, int]
) -> Iterator[tuple[bytes, bytes]]:
    """(key, fields) of the records of ids by their numbers, ascending.

    starts: the beginnings of partitions by the ledgers of their logs.
    """
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


def find_ids(raw: Reads, topic_id: int, producer: str, first: int, count: int) -> list[MessageId | None]:
    """Find the ids of `count` numbers from `first` on, None without a record. O(records, and those unapplied).

    Raises CorruptRecord.
    """
    ids: list[MessageId | None] = [None] * count
    prefix = numbered_prefix(topic_id, producer)
    for key, fields in catalog.rows(raw, prefix, numbered_key(topic_id, producer, first)):
        last = trailing_u64(key)
        for begin, row in unpack_numbered(last, fields):
            for number in range(max(begin, first), min(begin + row.length, first + count)):
                ids[number - first] = MessageId(row.ledger_id, row.first_entry + number - begin)
        if last >= first + count - 1:
            break
    return ids
