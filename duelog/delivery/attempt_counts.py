"""Which messages of one subscription were delivered without being acknowledged, how often, and when.

A count is the number of deliveries that failed: the consumer gave the message back, held it past the acknowledgement
timeout, left with it, or the process died with it in flight. Messages of which no delivery failed take nothing, in
memory and on disk. The caller holds the subscription's lock, and writes what `changes` gives into the transaction of
its acknowledgements.

Records are made of blocks of a ledger (store/codec/format.py). One of a message that was acknowledged meanwhile
is without effect, and is removed when its block is written.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pyroaring import BitMap

from duelog.store.codec.format import ATTEMPTS_BLOCK_BITS, FailedDeliveries, pack_attempts
from duelog.store.errors import BrokenInvariant
from duelog.store.position import Position

from .delivery_log import DeliveryLog

Blocks = dict[tuple[int, int], bytes | None]
"""By ledger id and block what is to be stored, or None where the record is to be deleted."""


class Failed(NamedTuple):
    """A message of which a delivery ended without an acknowledgement."""

    times: int
    """How many did."""
    batch: int
    """In which batch it was handed out again, the last time; -1: it was not."""
    first_ms: int
    last_ms: int
    """When the first and the last of these deliveries ended."""


class AttemptCounts:
    """The failed deliveries of one subscription. Not thread-safe."""

    def __init__(self, log: DeliveryLog | None = None, subscription_id: int = 0) -> None:
        """log: is told what is handed out; None: a crash is not to count."""
        self.failed: dict[int, dict[int, Failed]] = {}
        """By ledger id and entry id; to be changed here alone."""
        self._dirty: set[tuple[int, int]] = set()
        self._log = log
        self._subscription_id = subscription_id

    def load(
        self, rows: Iterable[tuple[int, Mapping[int, FailedDeliveries]]], is_acked: Callable[[Position], bool]
    ) -> None:
        """Take over stored records (`catalog.attempts`), but for messages that are acknowledged."""
        for ledger_id, of_block in rows:
            for entry_id, row in of_block.items():
                if is_acked(Position(ledger_id, entry_id)):
                    self._dirty.add((ledger_id, entry_id >> ATTEMPTS_BLOCK_BITS))
                else:
                    self.failed.setdefault(ledger_id, {})[entry_id] = Failed(row.times, -1, row.first_ms, row.last_ms)

    # -- asking ------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        return bool(self._dirty)

    def __len__(self) -> int:
        return sum(map(len, self.failed.values()))

    def times(self, ledger_id: int, entry_id: int) -> int:
        failed = self.failed.get(ledger_id, {}).get(entry_id)
        return 0 if failed is None else failed.times

    # -- changes -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Deliveries begin anew, with nothing handed out; the counts stay."""
        for of_ledger in self.failed.values():
            of_ledger.update((entry_id, failed._replace(batch=-1)) for entry_id, failed in of_ledger.items())

    def handed_out(self, entries: Mapping[int, BitMap], again: Sequence[tuple[int, int]], batch: int) -> None:
        """A batch was handed out, entries by ledger id. again: positions in it of which a delivery failed before."""
        for ledger_id, entry_id in again:
            self.failed[ledger_id][entry_id] = self.failed[ledger_id][entry_id]._replace(batch=batch)
        self.log_held(entries)

    def log_held(self, entries: Mapping[int, BitMap]) -> None:
        """Tell the delivery log of entries that consumers hold, by ledger id, each with its count."""
        if self._log is None:
            return
        for ledger_id, of_ledger in entries.items():
            known: dict[int, int] = {}
            if failed := self.failed.get(ledger_id):
                few = of_ledger if len(of_ledger) < len(failed) else failed
                known = {each: failed[each].times + 1 for each in few if each in failed and each in of_ledger}
                self._note(ledger_id, known)
            if first := of_ledger - BitMap(known) if known else of_ledger:
                self._log.note(self._subscription_id, ledger_id, first, 1)

    def log_unwritten(self) -> None:
        """Tell the delivery log of counts that are not on disk yet."""
        for ledger_id, block in self._dirty:
            self._note(ledger_id, {each: failed.times for each, failed in self._of_block(ledger_id, block).items()})

    def _note(self, ledger_id: int, counts: Mapping[int, int]) -> None:
        if self._log is None:
            return
        by_times: dict[int, BitMap] = {}
        for entry_id, times in counts.items():
            by_times.setdefault(times, BitMap()).add(entry_id)
        for times, of_times in by_times.items():
            self._log.note(self._subscription_id, ledger_id, of_times, times)

    def note_failed(self, ledger_id: int, entries: BitMap, now_ms: int) -> None:
        """A delivery of each of these entries ended at `now_ms` without an acknowledgement."""
        of_ledger = self.failed.setdefault(ledger_id, {})
        for entry_id in entries:
            failed = of_ledger.get(entry_id)
            times, batch, first_ms = (0, -1, now_ms) if failed is None else failed[:3]
            of_ledger[entry_id] = Failed(times + 1, batch, first_ms, now_ms)
            self._dirty.add((ledger_id, entry_id >> ATTEMPTS_BLOCK_BITS))

    def forget(self, ledger_id: int, entries: BitMap) -> None:
        of_ledger = self.failed.get(ledger_id)
        if of_ledger is None:
            return
        for entry_id in entries if len(entries) <= len(of_ledger) else [key for key in of_ledger if key in entries]:
            if of_ledger.pop(entry_id, None) is not None:
                self._dirty.add((ledger_id, entry_id >> ATTEMPTS_BLOCK_BITS))
        if not of_ledger:
            del self.failed[ledger_id]

    def forget_through(self, position: Position) -> None:
        for ledger_id in [ledger_id for ledger_id in self.failed if ledger_id <= position.ledger_id]:
            entries = self.failed[ledger_id]
            whole = ledger_id < position.ledger_id
            self.forget(ledger_id, BitMap(each for each in entries if whole or each <= position.entry_id))

    def clear(self) -> None:
        """No delivery of any message failed: the subscription has gone elsewhere."""
        for ledger_id in list(self.failed):
            self.forget(ledger_id, BitMap(self.failed[ledger_id]))
        if self._log is not None:
            self._log.forget(self._subscription_id)

    # -- persisting --------------------------------------------------------------------------------

    def changes(self) -> Blocks:
        """Return the blocks to write; `wrote` says that they were."""
        found: Blocks = {}
        for ledger_id, block in self._dirty:
            rows = self._of_block(ledger_id, block)
            packed = {
                entry_id: FailedDeliveries(row.times, row.first_ms, row.last_ms) for entry_id, row in rows.items()
            }
            found[ledger_id, block] = pack_attempts(packed) if packed else None
        return found

    def wrote(self, changes: Blocks) -> None:
        """These blocks are on disk; those that have changed since are still to be written."""
        if changes:
            now = self.changes()
            self._dirty.difference_update([block for block, rows in changes.items() if now.get(block, rows) == rows])

    def _of_block(self, ledger_id: int, block: int) -> dict[int, Failed]:
        of_ledger = self.failed.get(ledger_id, {})
        start, limit = block << ATTEMPTS_BLOCK_BITS, (block + 1) << ATTEMPTS_BLOCK_BITS
        entries = range(start, limit) if len(of_ledger) > limit - start else of_ledger
        return {each: of_ledger[each] for each in entries if start <= each < limit and each in of_ledger}

    def _check(self) -> None:
        """Raise BrokenInvariant if a message is counted of which no delivery failed."""
        for of_ledger in self.failed.values():
            if not of_ledger or any(failed.times < 1 for failed in of_ledger.values()):
                raise BrokenInvariant("a message of which no delivery failed is counted")
