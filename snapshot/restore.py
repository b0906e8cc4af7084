"""From a snapshot to a delay index: the newest one that can be used, less what has fired since.

When a snapshot may be used. Let (C, T) be its frontier and `tail` its tail, (C', T') the frontier recorded now in the
main environment. It is used only if

    C <= C',  T <= T',  tail <= the log's tail now,  and  C' = C or T' >= tail.

The first three fail only where an environment has gone back (a power cut with durability "none") or a copied
directory was put in place. The last always holds for a snapshot of this log's past: C moves only in `take`, which
sets T to all entries absorbed by then, and a copy covers no more than were absorbed before.

What is then left to fire. Call S the entries of the snapshot: those below `tail` after C that had not been
cancelled; of those below `tail` at or before C none was left to fire. An entry e below `tail` is now

- fired, if e < T' and e's key <= C' (the meaning of the frontier). If C' = C, nothing of S is at or before C'. Else
  T' >= tail > e, so exactly those of S at or before C' have fired. Either way dropping from S all at or before C'
  drops all that has fired of it, and nothing else;
- late, if e >= T' and its key <= C'. There is none but what was admitted since: with C' = C, whatever is at or before
  C had fired when the copy was made; else e < tail <= T';
- left in the index otherwise, and after C', so after C, so in S unless it was cancelled.

Hence the index is S less what is at or before C', and the owner replays the due column from `tail` on, by the
frontier recorded now. A bucket that ends at or before C' goes whole; only the one that C' lies in has its due times
read. What was cancelled, or admitted, since the copy is the owner's to take out and put in, by the frontier recorded
now: both are recorded, and taking out or putting in twice does no harm.

A snapshot that cannot be used is passed over for the one before it, and the last for full replay.
"""

from array import array
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ..partitions.index.delay_index import DelayIndex, DueOf
from ..partitions.index.window import Dues
from ..store.codec.format import Table
from ..store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from ..store.env.environment import Environment
from .snapshot_format import Metadata, SavedBucket, Unusable, read_metadata, read_part, snapshot_ids

_READ_ENTRIES = 1 << 18
"""Due times read at a time from the bucket that the frontier lies in."""


class Restored(NamedTuple):
    """An index that covers the entries below `tail`, and the id of the snapshot that it came from."""

    pending: DelayIndex
    tail: int
    snapshot_id: int


def restore_steps(
    environment: Environment,
    frontier: FrontierRecord,
    tail: int,
    due_of: DueOf,
    *,
    start_ms: int,
    bucket_ms: int,
    refused: Callable[[int, Unusable], object],
) -> Generator[None, None, Restored | None]:
    """Restore the index of `frontier`'s log; None where no snapshot can be used.

    frontier: as recorded now in the main environment. tail: entries of the log, all committed. refused: hears of each
    snapshot that cannot be used, by id. Each step reads a part, of 1 MiB by default, in about a ms. On top come the due
    times of the bucket that the frontier lies in: some 8 us each where they are scattered.
    """
    ledger_id = frontier.ledger_id
    with environment.read() as raw:
        found = snapshot_ids(raw, Table.SNAPSHOT_META, ledger_id)
    for snapshot_id in reversed(found):
        try:
            with environment.read() as raw:
                metadata = read_metadata(raw, ledger_id, snapshot_id)
            require_usable(metadata, frontier, tail, start_ms, bucket_ms)
            moved = (metadata.due_ms, metadata.entry_id) != (frontier.due_ms, frontier.entry_id)
            around = BitMap()
            later: list[SavedBucket] = []
            for number in range(len(metadata.parts)):
                for bucket_start_ms, saved in read_part(environment, ledger_id, snapshot_id, metadata, number):
                    if not moved or bucket_start_ms > frontier.due_ms:
                        later.append((bucket_start_ms, saved))
                    elif bucket_start_ms + bucket_ms > frontier.due_ms:
                        around |= saved.bitmap()
                yield
        except Unusable as error:
            refused(snapshot_id, error)
            continue
        around_ms = frontier.due_ms - frontier.due_ms % bucket_ms
        left, dues = _after_frontier(around, frontier, due_of)
        if dues is None:
            later.append((around_ms, left))
        index = DelayIndex.from_buckets(later, due_of, start_ms=start_ms, bucket_ms=bucket_ms)
        if dues is not None:
            index.restore_window(np.frombuffer(left.to_array(), dtype=np.uint32), dues, around_ms + bucket_ms)
        return Restored(index, metadata.tail, snapshot_id)
    return None


def covered_by_snapshots(environment: Environment, ledger_id: int) -> int:
    """Number of entries that a log has had, by snapshots with readable metadata; 0: there is none. O(log n) each."""
    covered = 0
    with environment.read() as raw:
        for snapshot_id in snapshot_ids(raw, Table.SNAPSHOT_META, ledger_id):
            with suppress(Unusable):
                covered = max(covered, read_metadata(raw, ledger_id, snapshot_id).tail)
    return covered


def require_usable(metadata: Metadata, now: FrontierRecord, tail: int, start_ms: int, bucket_ms: int) -> None:
    """Refuse a snapshot that is not of this log's past; see the head of this module. Raises Unusable."""
    if metadata.start_ms != start_ms:
        raise Unusable(f"of the partition at {metadata.start_ms}, this is {start_ms}")
    if metadata.bucket_ms != bucket_ms:
        raise Unusable(f"made with bucket_ms={metadata.bucket_ms}, now it is {bucket_ms}")
    if metadata.tail > tail:
        raise Unusable(f"covers {metadata.tail} entries, the log has {tail}")
    before, after = (metadata.due_ms, metadata.entry_id), (now.due_ms, now.entry_id)
    if before > after or metadata.absorbed_end > now.absorbed_end:
        raise Unusable(f"its frontier {before}, {metadata.absorbed_end} is ahead of {after}, {now.absorbed_end}")
    if before != after and now.absorbed_end < metadata.tail:
        raise Unusable(
            f"covers {metadata.tail} entries, of which firing has passed some and absorbed only {now.absorbed_end}"
        )


def _after_frontier(ids: BitMap, now: FrontierRecord, due_of: DueOf) -> tuple[BitMap, Dues | None]:
    """Read the entries after C, and their due times; None: they are many.

    One whose due time cannot be read stays: the index quarantines it.
    """
    kept = BitMap()
    known: list[Dues] = [np.empty(0, dtype=np.int64)]
    entries = np.frombuffer(ids.to_array(), dtype=np.uint32)
    for at in range(0, len(entries), _READ_ENTRIES):
        some = entries[at : at + _READ_ENTRIES]
        dues = due_of(some)
        after = ~now.passes(some, dues) | (dues == UNREADABLE_DUE)
        kept |= BitMap(array("I", some[after].tobytes()))
        if len(kept) <= _READ_ENTRIES:
            known.append(dues[after])
    return kept, np.concatenate(known) if len(kept) <= _READ_ENTRIES else None
