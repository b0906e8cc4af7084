"""What `check` looks at in deduplication keys: a record is of a message that was sent with that key.

Of messages in open partitions; what is left of others has no effect. A message with a key and no record is no finding:
its record may have been written after the transaction began in which the main environment is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, Table
from duelog.store.codec.sent_ids import KeyRecord, dedup_key_of
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore
from duelog.store.log import catalog
from duelog.store.log.scan import RunFinder

from .check_survey import Survey
from .finding import Finding, error


def check_keys(survey: Survey) -> Iterator[Finding]:
    """Every record of a key whose message may be pending: O(keys), each a look into its partition."""
    by_start: dict[int, list[tuple[str, int, KeyRecord]]] = {}
    for key, fields in catalog.rows(survey.raw, fmt.prefix(Table.KEY)):
        record = KeyRecord.unpack(fields)
        known = survey.records.get(record.start_ms)
        if known is not None and known.state is PartitionState.OPEN:
            topic_id, name = fmt.split_named_key(key, "replace")
            by_start.setdefault(record.start_ms, []).append((name, topic_id, record))
    for start_ms, rows in by_start.items():
        partition = survey.partitions.get(start_ms)
        if partition is None or partition.state is not PartitionState.OPEN:
            continue  # it was closed meanwhile
        try:
            with survey.partitions.lease(partition), partition.environment.read() as raw:
                finder = RunFinder(raw, partition.name)
                for name, topic_id, record in rows:
                    if not _is_of(finder, record, name):
                        message = f"is recorded as that of {record.message_id}, which was not sent with it"
                        yield error("key", f"topic {topic_id}, key {name!r}", message)
        except (DamagedStore, CorruptRecord):
            continue  # a finding of check_partitions


def _is_of(finder: RunFinder, record: KeyRecord, name: str) -> bool:
    """Whether an entry was sent with a key, as far as it can be read."""
    try:
        run = finder.find(record.ledger_id, record.entry_id)
        body = None if run is None else run.body(record.entry_id - run.first_entry)
    except CorruptEntry:
        return True  # a finding of its own
    return run is not None and (body is None or dedup_key_of(body) == name)
