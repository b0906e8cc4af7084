"""What is pending in a store, partition log by partition log in order of entry id, for draining it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...engine import Engine
from ...markers.lookup import unfired
from ...store.codec.body import decode_body
from ...store.codec.format import PartitionState
from ...store.env.environment import Environment
from ...store.errors import CorruptEntry
from ...store.log.scan import RunFinder
from ...store.message import MAX_DUE_MS
from ...store.names import TopicName
from ...store.position import MessageId


class PendingEntry(NamedTuple):
    """One entry that has not fired. reason: why its body cannot be read.

    addressee: the only subscription it is for. expires: it has a time to live of its own.
    """

    message_id: MessageId
    due_ms: int
    payload: bytes
    key: str | None
    properties: dict[str, str]
    addressee: str | None = None
    expires: bool = False
    reason: str = ""


def pending_entries(engine: Engine, topic: TopicName, at_once: int) -> Iterator[list[PendingEntry]]:
    """Entries of a topic's partition logs that have not fired and are not cancelled, `at_once` of one log at a time.

    In order of entry id within a log. 12 bytes of memory an entry of one log, and the bodies of one list.
    """
    state = engine.topics.get(topic)
    for partition in engine.storage.partitions.held(lambda partition: partition.state is PartitionState.OPEN):
        log = partition.log(state.topic_id)
        if log is None:
            continue
        entries, dues = unfired(
            engine.storage.main, partition, state.topic_id, log.ledger_id, log.ledger.entries, 0, MAX_DUE_MS + 1
        )
        order = np.argsort(entries)
        entries, dues = entries[order], dues[order]
        for at in range(0, len(entries), at_once):
            window = slice(at, at + at_once)
            found = list(zip(entries[window].tolist(), dues[window].tolist(), strict=True))
            yield list(_bodies(partition.environment, log.ledger_id, found))


def _bodies(environment: Environment, ledger_id: int, wanted: Sequence[tuple[int, int]]) -> Iterator[PendingEntry]:
    with environment.read() as raw:
        finder = RunFinder(raw, environment.name)
        for entry_id, due_ms in wanted:
            message_id = MessageId(ledger_id, entry_id)
            try:
                run = finder.find(ledger_id, entry_id)
                body = None if run is None else run.body(entry_id - run.first_entry)
                if body is None:
                    raise ValueError("its body is gone")
                _, payload, key, properties, extra = decode_body(body)
            except (CorruptEntry, ValueError) as error:
                yield PendingEntry(message_id, due_ms, b"", None, {}, reason=str(error))
                continue
            addressee, expires = (extra or {}).get("addressee"), "ttl" in (extra or {})
            yield PendingEntry(
                message_id,
                due_ms,
                payload,
                key,
                properties or {},
                None if addressee is None else str(addressee),
                expires,
            )
