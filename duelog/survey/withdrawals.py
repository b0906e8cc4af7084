"""Cancellations and admissions: what was rescheduled fires under one of its two ids, and not under both.

A conditional entry names the entry that it replaces. The transaction that admits it cancels that one, unless it has
fired. So an admitted entry whose predecessor could still fire has lost a cancellation, exactly. The other way round is
not exact: an entry that was never admitted, because the process ended in between, looks like one whose admission is
lost once its predecessor is cancelled for another reason. So that is gone by only where an admission cannot be read.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from duelog.partitions.cancellations import BLOCK_BITS, members
from duelog.partitions.due_column import dues_of
from duelog.store.codec.format import Table
from duelog.store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from duelog.store.codec.run import Run, RunKind, UInt32s
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.errors import CorruptRecord
from duelog.store.log.scan import runs

from ..upkeep.schedule import schedule_rows, unpack_schedule

ByLedger = dict[int, BitMap]
"""Entries by the ledger id of their log."""


class Conditional(NamedTuple):
    """A conditional entry, and the one that it replaces."""

    ledger_id: int
    entry_id: int
    old_ledger: int
    old_entry: int


class Conditionals:
    """Every conditional entry that was met: 12 bytes each. One that replaces nothing names a ledger 0."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, npt.NDArray[np.uint64], UInt32s]] = []

    def add(self, run: Run) -> None:
        if run.kind == RunKind.MESSAGES and run.conditional:
            ledgers, entries = run.replaced()
            self._runs.append((run.ledger_id, run.first_entry, ledgers.copy(), entries.copy()))

    def add_all(self, environment: Environment, ledgers: Iterable[int]) -> None:
        """Take in all runs of some logs. O(headers)."""
        with environment.read() as raw:
            for ledger_id in ledgers:
                for run in runs(raw, environment.name, ledger_id):
                    if isinstance(run, Run):
                        self.add(run)

    def __iter__(self) -> Iterator[Conditional]:
        for ledger_id, first, ledgers, entries in self._runs:
            for at, (old_ledger, old_entry) in enumerate(zip(ledgers.tolist(), entries.tolist(), strict=True)):
                yield Conditional(ledger_id, first + at, old_ledger, old_entry)


class Withdrawn:
    """Cancelled and admitted entries as one transaction of the main environment has them."""

    def __init__(self, raw: Reads) -> None:
        self._raw = raw
        self._known: dict[tuple[Table, int], BitMap] = {}

    def of(self, table: Table, ledger_id: int) -> BitMap:
        """Members of CANCELLED or ADMITTED of a log. Raises CorruptRecord."""
        found = self._known.get((table, ledger_id))
        if found is None:
            found = self._known[table, ledger_id] = members(self._raw, table, ledger_id)
        return found


def lost_admissions(
    withdrawn: Withdrawn,
    conditionals: Conditionals,
    certain: ByLedger,
    unknown: Collection[tuple[int, int]] = (),
) -> ByLedger:
    """Entries that were admitted by what else there is. One for each entry replaced.

    certain: entries that have markers, or that schedules wait for. unknown: ledger and block of admissions that cannot
    be read: an entry there was admitted if the one that it replaces is cancelled.
    """
    found: ByLedger = {}
    suspects: dict[tuple[int, int], Conditional] = {}
    for each in conditionals:
        if each.entry_id in withdrawn.of(Table.ADMITTED, each.ledger_id):
            continue
        if each.entry_id in certain.get(each.ledger_id, ()):
            found.setdefault(each.ledger_id, BitMap()).add(each.entry_id)
        elif (
            (each.ledger_id, each.entry_id >> BLOCK_BITS) in unknown
            and each.old_entry in withdrawn.of(Table.CANCELLED, each.old_ledger)
            and each.entry_id not in withdrawn.of(Table.CANCELLED, each.ledger_id)
        ):
            suspects[each.old_ledger, each.old_entry] = each
    for each in conditionals if suspects else ():
        if each.entry_id in withdrawn.of(Table.ADMITTED, each.ledger_id):
            suspects.pop((each.old_ledger, each.old_entry), None)
    for each in suspects.values():
        found.setdefault(each.ledger_id, BitMap()).add(each.entry_id)
    return found


def waited_for(raw: Reads) -> ByLedger:
    """The occurrences that schedules wait for: recorded in the transaction that admits them."""
    found: ByLedger = {}
    for _, fields in schedule_rows(raw):
        try:
            waiting = unpack_schedule(fields).next_id
        except CorruptRecord:  # a finding of its own
            continue
        if waiting is not None:
            found.setdefault(waiting.ledger_id, BitMap()).add(waiting.entry_id)
    return found


def lost_cancellations(
    withdrawn: Withdrawn, conditionals: Conditionals, fired: Callable[[int, UInt32s], BitMap | None]
) -> ByLedger:
    """Entries whose successors are admitted, and that could fire all the same.

    fired: of a log's entries those that have fired, or None where the log is not there.
    """
    suspects: ByLedger = {}
    for each in conditionals:
        if each.entry_id in withdrawn.of(Table.ADMITTED, each.ledger_id) and (
            each.old_entry not in withdrawn.of(Table.CANCELLED, each.old_ledger)
        ):
            suspects.setdefault(each.old_ledger, BitMap()).add(each.old_entry)
    found: ByLedger = {}
    for ledger_id, entries in suspects.items():
        done = fired(ledger_id, np.array(entries, dtype=np.uint32))
        if done is not None and entries - done:
            found[ledger_id] = entries - done
    return found


def passed_of(environment: Environment, frontier: FrontierRecord | None, ledger_id: int, entries: UInt32s) -> BitMap:
    """Those of a log's entries that its frontier has passed, or that cannot be read."""
    dues = dues_of(environment, ledger_id, entries)
    passed = dues == UNREADABLE_DUE
    if frontier is not None:
        passed |= frontier.has_fired(entries, dues)
    return BitMap(entries[passed])
