"""Where the second place of a small record is: each stands twice, written and removed in the same transaction.

Nothing but a transaction writes copies, and nothing but `check` and `repair` reads them. So that one page that went bad
does not take both, they lie under keys of their own, after all other small records.
"""

from __future__ import annotations

from .format import Table

NOT_COPIED = frozenset((Table.PARTITION_INFO, Table.ORIGIN, Table.SNAPSHOT_PART, Table.SNAPSHOT_META))
"""Tables whose records stand once: what they say can be told from where they lie, or be made again from the log."""


def copy_key(key: bytes) -> bytes:
    """Key of the copy of the record under `key`."""
    return bytes((Table.COPY,)) + key


def copied_key(key: bytes) -> bytes:
    """Key of the record that the copy under `key` is of."""
    return key[1:]
