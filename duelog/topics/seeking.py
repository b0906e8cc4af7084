"""Where in a main log a time is, where it begins and ends, going there, and which messages have outlived their time."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias

import numpy as np
from pyroaring import BitMap

from duelog.delivery.acks import AckSet
from duelog.markers.reader import MainLogReader
from duelog.store.codec.run import Run
from duelog.store.env.environment import Environment
from duelog.store.errors import CorruptEntry, InvalidArgument
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.log.scan import runs
from duelog.store.message import ReceivedMessage, at_ms
from duelog.store.position import BEFORE_FIRST, MessageId, Position, position_at

from .inline import InlineMessages
from .topic_state import SubscriptionState, TopicState

_AT_ONCE = 64
"""Messages read in one go in search of a publish time: payloads may be large."""


@dataclass(frozen=True, slots=True)
class PublishedAt:
    """The first message of a main log that was published at `time` (epoch ms or an aware datetime) or later."""

    time: datetime | int


SeekTarget: TypeAlias = MessageId | ReceivedMessage | PublishedAt | datetime | int | str
"""Where to go in a log, see `Subscription.seek`."""


def due_at(main: Environment, log: ManagedLedger, time_ms: int) -> Position:
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


def published_at(reader: MainLogReader, time_ms: int, now_ms: int) -> Position:
    """The first position whose message was published at `time_ms` or later, of those that may be read at `now_ms`.

    The end of them when there is none. O(messages of the ledgers closed after that time, up to the one found): a
    delayed message stands where its marker does, after messages published later.
    """
    log, nothing = reader.log, AckSet(Position(0, BEFORE_FIRST))
    start = Position(log.first_ledger, 0)
    for ledger in log.ledgers():
        if ledger.closed and ledger.closed_ms < time_ms:  # all that is in it was published before
            start = Position(ledger.ledger_id, ledger.entries)
    while True:
        batch, following, _ = reader.read(start, _AT_ONCE, nothing, now_ms)
        for place, publish_ms in zip(batch.places, batch.publish_ms, strict=True):
            if publish_ms >= time_ms:
                return position_at(place)
        if not batch:
            return following
        start = following


def position_of(main: Environment, inline: InlineMessages, topic: TopicState, to: SeekTarget, now_ms: int) -> Position:
    """The position that `Subscription.seek` is asked for. Raises InvalidArgument."""
    log = topic.log
    if isinstance(to, PublishedAt):
        return published_at(inline.onlooker(topic), at_ms("time", to.time), now_ms)
    if to == "earliest":
        return Position(log.first_ledger, 0)
    if to == "latest":
        return log.end
    if isinstance(to, ReceivedMessage):
        to = to.position
    if isinstance(to, MessageId):
        return _existing(log, to)
    if isinstance(to, str):
        raise InvalidArgument("to", to, 'expected "earliest", "latest", a position, an id or a time')
    return due_at(main, log, at_ms("to", to))


def go_to(
    topic: TopicState, subscription: SubscriptionState, position: Position, not_due: Mapping[int, BitMap], now_ms: int
) -> Position:
    """Have a subscription go to a position, or to the nearest that the log has; where that is. REQUIRES: its lock.

    not_due: what waits inline, by ledger id. What of it is acknowledged stays so: it was due before the clock was set
    back, or falls due meanwhile, or was cleared.
    """
    acks = subscription.acks
    not_due = {
        ledger_id: unacked for ledger_id, entries in not_due.items() if (unacked := acks.unacked_of(ledger_id, entries))
    }
    position = max(min(position, topic.log.latest(now_ms)), Position(topic.log.first_ledger, 0))
    subscription.seek(Position(position.ledger_id, position.entry_id - 1), not_due, topic.log)
    return position


def _existing(log: ManagedLedger, position: Position) -> Position:
    """The position, which the log has, or had before it was trimmed, or is its end. Raises InvalidArgument."""
    entries = log.entries_of(position.ledger_id)
    if entries is None and position.ledger_id > log.first_ledger:
        raise InvalidArgument("to", position, "the topic's main log has no such ledger")
    if entries is not None and position.entry_id > entries:
        raise InvalidArgument("to", position, f"the ledger has {entries} entries")
    return position


def _unacknowledged(main: Environment, log: ManagedLedger, acks: AckSet) -> Generator[tuple[Run, BitMap], None, None]:
    """Runs from the first unacknowledged entry to the end of the log, and the unacknowledged entry ids of each."""
    marked, last = acks.mark_delete
    ledger_id: int | None = marked
    while ledger_id is not None:
        entries = log.entries_of(ledger_id)
        if entries:
            with main.read() as raw:
                for run in runs(raw, main.name, ledger_id, last + 1 if ledger_id == marked else 0, entries):
                    if not isinstance(run, CorruptEntry):
                        yield run, acks.unacked(ledger_id, run.first_entry, min(run.limit, entries))
        ledger_id = log.following(ledger_id)


def first_due(main: Environment, log: ManagedLedger, acks: AckSet, now_ms: int) -> int | None:
    """When the oldest message was due that is due and not acknowledged; None: there is none.

    The first in the log, or one that waited inline before it. O(runs up to it), in most cases one.
    """
    found: list[int] = []
    with closing(_unacknowledged(main, log, acks)) as rest:
        for run, unacked in rest:
            dues = run.dues()[np.array(unacked, dtype=np.int64) - run.first_entry]
            dues = dues[dues <= now_ms]
            if len(dues):
                found.append(int(dues.min()))
            if found and not run.early:
                break
    return min(found, default=None)


def expired(
    main: Environment, log: ManagedLedger, acks: AckSet, before_ms: int, *, thorough: bool = False
) -> Iterator[tuple[int, BitMap]]:
    """(ledger id, entries) that were due at `before_ms` or earlier and are not acknowledged, oldest first.

    Ends at the first run with something unacknowledged and nothing old, but for one that waits inline: what is in the
    log was due in about the order in which it lies. thorough: at the end of the log.
    """
    with closing(_unacknowledged(main, log, acks)) as rest:
        for run, unacked in rest:
            if not unacked:
                continue
            old = unacked & BitMap((np.flatnonzero(run.dues() <= before_ms) + run.first_entry).tolist())
            if old:
                yield run.ledger_id, old
            elif not run.early and not thorough:
                return
