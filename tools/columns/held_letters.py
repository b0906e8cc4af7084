"""Dead letters that keepers hold, read from a main environment, without a store that is open for writing."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyroaring import BitMap

from ...cleanup.log_claims import acknowledged_by_all
from ...store.codec import format as fmt
from ...store.codec.format import LedgerRecord, LedgerState, Table
from ...store.codec.run import RunKind
from ...store.env.memtable import Reads
from ...store.errors import CorruptEntry
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.log.scan import RunFinder
from ...store.position import Position
from ...topics.dead_letters import DeadLetter, decode_letter
from ...topics.topic_state import KEEPER


class Unreadable(NamedTuple):
    """An entry that a keeper holds and that cannot be read, for a reason."""

    topic: str
    position: Position
    reason: str


def held_letters(raw: Reads) -> Iterator[DeadLetter | Unreadable]:
    """Everything that keepers hold as of a transaction, by topic, oldest first. O(entries that they hold)."""
    for topic_id, _, cursor in catalog.cursors(raw):
        topic = catalog.topic_name(raw, topic_id)
        if not cursor.flags & KEEPER or topic is None:
            continue
        rows = dict(catalog.acked(raw, cursor.subscription_id))
        for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER, topic_id)):
            if LedgerRecord.unpack(fields).state is LedgerState.TRIMMING:
                continue
            ledger_id = fmt.trailing_u64(key)
            held = BitMap()
            held.add_range(0, find_tail(raw, "main", ledger_id))
            held -= acknowledged_by_all([(cursor, rows)], ledger_id, len(held))
            yield from read_letters(raw, topic, ledger_id, held)


def read_letters(raw: Reads, topic: str, ledger_id: int, entries: Iterable[int]) -> Iterator[DeadLetter | Unreadable]:
    """The letters at some entries of a dead-letter topic's ledger; entries that are no letters are passed over."""
    finder = RunFinder(raw, "main")
    for entry_id in entries:
        position = Position(ledger_id, entry_id)
        try:
            run = finder.find(ledger_id, entry_id)
            body = None if run is None or run.kind != RunKind.MESSAGES else run.body(entry_id - run.first_entry)
            letter = None if body is None else decode_letter(topic, position, body)
        except (CorruptEntry, ValueError) as error:
            yield Unreadable(topic, position, error.reason if isinstance(error, CorruptEntry) else str(error))
            continue
        if letter is not None:
            yield letter
