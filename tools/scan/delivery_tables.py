"""What became of deliveries, as rows: messages of which some failed (attempts), and dead letters that are held.

Of attempts those that count: of messages that their subscription has not acknowledged. What is in flight is not among
them; the store's delivery log has it, for the case that the process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...cleanup.log_claims import acknowledged_by_all
from ...store.env.memtable import Reads
from ...store.log import catalog
from .held_letters import Unreadable, held_letters

ATTEMPTS = pa.schema(
    [
        ("topic", pa.string()),
        ("topic_id", pa.int64()),
        ("subscription", pa.string()),
        ("subscription_id", pa.int64()),
        ("ledger_id", pa.int64()),  # with entry_id: where the message, or its marker, stands in the topic's main log
        ("entry_id", pa.int64()),
        ("failed", pa.int64()),  # deliveries that ended without an acknowledgement
        ("first_ms", pa.int64()),  # when the first of them ended
        ("last_ms", pa.int64()),
    ]
)
DEAD_LETTERS = pa.schema(
    [
        ("dead_letter_topic", pa.string()),
        ("ledger_id", pa.int64()),  # with entry_id: where it lies in the dead-letter topic's main log
        ("entry_id", pa.int64()),
        (
            "topic",
            pa.string(),
        ),  # with subscription: where it came from; null, as all down to dead_ms: unreadable
        ("subscription", pa.string()),
        ("message_ledger", pa.int64()),  # with message_entry: the message's id there
        ("message_entry", pa.int64()),
        ("due_ms", pa.int64()),
        ("publish_ms", pa.int64()),
        ("key", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("payload", pa.binary()),
        ("cause", pa.string()),  # why it died
        ("attempts", pa.int64()),  # how often it was delivered
        ("first_ms", pa.int64()),  # when the first of these deliveries ended
        ("last_ms", pa.int64()),
        ("dead_ms", pa.int64()),
        ("reason", pa.string()),  # why it cannot be read; null: it can
    ]
)

Row = dict[str, Any]


def attempts(raw: Reads, store: Path) -> Iterator[Row]:
    """A row for each message and subscription, by subscription and position."""
    for topic_id, name, cursor in catalog.cursors(raw):
        acknowledged = dict(catalog.acked(raw, cursor.subscription_id))
        for ledger_id, rows in catalog.attempts(raw, cursor.subscription_id):
            done = acknowledged_by_all([(cursor, acknowledged)], ledger_id, max(rows) + 1)
            for entry_id, (failed, first_ms, last_ms) in sorted(rows.items()):
                if entry_id not in done:
                    yield {
                        "topic": catalog.topic_name(raw, topic_id),
                        "topic_id": topic_id,
                        "subscription": name,
                        "subscription_id": cursor.subscription_id,
                        "ledger_id": ledger_id,
                        "entry_id": entry_id,
                        "failed": failed,
                        "first_ms": first_ms,
                        "last_ms": last_ms,
                    }


def dead_letters(raw: Reads, store: Path) -> Iterator[Row]:
    """A row for each letter that is held, by dead-letter topic and position."""
    for letter in held_letters(raw):
        if isinstance(letter, Unreadable):
            topic, (ledger_id, entry_id), reason = letter
            yield {"dead_letter_topic": topic, "ledger_id": ledger_id, "entry_id": entry_id, "reason": reason}
            continue
        yield {
            "dead_letter_topic": letter.dead_letter_topic,
            "ledger_id": letter.position.ledger_id,
            "entry_id": letter.position.entry_id,
            "topic": letter.topic,
            "subscription": letter.subscription,
            "message_ledger": letter.message_id.ledger_id,
            "message_entry": letter.message_id.entry_id,
            "due_ms": letter.due_ms,
            "publish_ms": letter.publish_ms,
            "key": letter.key,
            "properties": letter.properties,
            "payload": letter.payload,
            "cause": letter.reason,
            "attempts": letter.attempts,
            "first_ms": letter.first_ms,
            "last_ms": letter.last_ms,
            "dead_ms": letter.dead_ms,
        }
