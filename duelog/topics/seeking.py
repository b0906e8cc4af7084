"""Where in a main log a time is, where it begins and ends, and which messages have outlived their time to live."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple, TypeAlias

import numpy as np
from pyroaring import BitMap

from duelog.delivery.acks import AckSet
from duelog.store.env.environment import Environment
from duelog.store.errors import CorruptEntry, InvalidArgument
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.log.scan import runs
from duelog.store.message import ReceivedMessage, at_ms
from duelog.store.position import MessageId, Position

SeekTarget: TypeAlias = MessageId | ReceivedMessage | datetime | int | str
"""Where to go in a log, see `Subscription.seek`."""


def position_at(main: Environment, log: ManagedLedger, time_ms: int) -> Position:
    """The first position of the log whose message was due at `time_ms` or later; the end when there is none.

    A time before everything that is kept is the beginning. O(runs before it). When a ledger was closed says nothing
    of what is in it: short delays wait there, and a sender may have looked at the clock before others.
    """
    for ledger in log.ledgers():
        with main.read() as raw:
            for run in runs(raw, main.name, ledger.ledger_id, 0, ledger.entries):
                if isinstance(run, CorruptEntry):
                    continue
                later = np.flatnonzero(run.dues() >= time_ms)
                if len(later):
                    return Position(run.ledger_id, run.first_entry + int(later[0]))
    return log.end


class LogPositions(NamedTuple):
    """Where a topic's main log begins and ends now."""

    first: Position | None
    """The first entry that is kept; None: nothing may be read."""
    last: Position | None
    """The last entry that may be read: neither it nor one that it waits for is due later; None: there is none."""
    next: Position
    """Where the next entry will be, if its ledger is not closed before; all that is there lies before it."""


def log_positions(log: ManagedLedger, waiting: Callable[[], Mapping[int, BitMap]], now_ms: int) -> LogPositions:
    """The positions of a log at `now_ms`; `waiting` gives the entries that are not due then, by ledger id."""
    limit = log.visible(now_ms)
    not_due = waiting()  # afterwards: what was appended meanwhile is behind the limit
    ids = (limit.view.tail.ledger_id, *(info.ledger_id for info in reversed(limit.view.closed)))
    for ledger_id in ids:
        due = BitMap(range(limit.entries_of(ledger_id) or 0)) - not_due.get(ledger_id, BitMap())
        if due:
            return LogPositions(Position(ids[-1], 0), Position(ledger_id, due.max()), log.end)
    return LogPositions(None, None, log.end)


def position_of(main: Environment, log: ManagedLedger, to: SeekTarget) -> Position:
    """The position that `Subscription.seek` is asked for. Raises InvalidArgument."""
    if to == "earliest":
        return Position(log.first_ledger, 0)
    if to == "latest":
        return log.end
    if isinstance(to, ReceivedMessage):
        to = to.position
    if isinstance(to, MessageId):
        return _existing(log, to)
    if isinstance(to, str):
        raise InvalidArgument("to", to, 'expected "earliest", "latest", a position or a time')
    return position_at(main, log, at_ms("to", to))


def _existing(log: ManagedLedger, position: Position) -> Position:
    """The position, which the log has, or had before it was trimmed, or is its end. Raises InvalidArgument."""
    entries = log.entries_of(position.ledger_id)
    if entries is None and position.ledger_id > log.first_ledger:
        raise InvalidArgument("to", position, "the topic's main log has no such ledger")
    if entries is not None and position.entry_id > entries:
        raise InvalidArgument("to", position, f"the ledger has {entries} entries")
    return position


def expired(main: Environment, log: ManagedLedger, acks: AckSet, before_ms: int) -> Iterator[tuple[int, BitMap]]:
    """(ledger id, entries) that were due at `before_ms` or earlier and are not acknowledged, oldest first.

    Ends at the first run with something unacknowledged and nothing old, but for one that waits inline: what is in the
    log was due in about the order in which it lies.
    """
    marked, last = acks.mark_delete
    ledger_id: int | None = marked
    while ledger_id is not None:
        entries = log.entries_of(ledger_id)
        if entries:
            with main.read() as raw:
                for run in runs(raw, main.name, ledger_id, last + 1 if ledger_id == marked else 0, entries):
                    if isinstance(run, CorruptEntry):
                        continue
                    limit = min(run.limit, entries)
                    unacked = acks.unacked(ledger_id, run.first_entry, limit)
                    if not unacked:
                        continue
                    old = np.flatnonzero(run.dues()[: limit - run.first_entry] <= before_ms)
                    unacked &= BitMap((old + run.first_entry).tolist())
                    if unacked:
                        yield ledger_id, unacked
                    elif not run.early:
                        return
        ledger_id = log.following(ledger_id)
