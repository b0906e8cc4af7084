"""The position of an entry: a ledger of the store and an entry of that ledger.

Owns the value and its text form, ``ledger:entry``. It does not know which environment holds the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast, overload

from .errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]

MAX_ID = 2**63 - 1
"""Largest ledger id and entry id: both go through int64 columns."""

ENTRY_MASK = 2**32 - 1
"""The 32 bits of an entry id; the last value is kept for limits (store/codec/format.py)."""

BEFORE_FIRST = -1
"""Entry id of a mark-delete position before the first entry of its ledger."""

_TEXT = re.compile(r"(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,18})")


class MessageId(NamedTuple):
    """A ledger id and an entry id; ordered by ledger, then by entry.

    >>> str(MessageId(7, 42))
    '7:42'
    >>> MessageId.parse("7:42")
    MessageId(ledger_id=7, entry_id=42)
    """

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str, field: str = "message_id") -> MessageId:
        """Read what ``str()`` of a stored entry's id gives; raises InvalidArgument, of ``field``, on anything else.

        Signs, blanks and leading zeros are refused, so that one id has one text.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidArgument(field, text, "expected ledger:entry, two decimal numbers")
        ledger_id, entry_id = int(match[1]), int(match[2])
        if ledger_id > MAX_ID or entry_id > MAX_ID:
            raise InvalidArgument(field, text, f"a number is over {MAX_ID}")
        return cls(ledger_id, entry_id)

    @property
    def stored(self) -> bool:
        """False of an id that a send gives for a message that was there before, by its key or its number."""
        return True


class FoundId(MessageId):
    """The id of a message that was there when a send found it; equal to the `MessageId`."""

    __slots__ = ()

    @property
    def stored(self) -> bool:
        """False: the send has stored nothing."""
        return False


_new = partial(tuple.__new__, MessageId)


def message_ids(ledgers: Iterable[int], entries: Iterable[int]) -> list[MessageId]:
    """Ids of pairs; a third of the time that calling MessageId for each takes, whose constructor is Python."""
    return list(map(_new, zip(ledgers, entries, strict=False)))


Place: TypeAlias = int | MessageId
"""A MessageId as one number, ledger_id << 32 | entry_id, whose order is the same; as it is where that does not fit."""


def place_of(message_id: MessageId) -> Place:
    """A number for an id, without an object that the garbage collector follows."""
    if type(message_id) is MessageId:
        ledger_id, entry_id = message_id
        if 0 <= entry_id <= ENTRY_MASK:
            return ledger_id << 32 | entry_id
    return message_id


def position_at(place: Place) -> MessageId:
    """The inverse of `place_of`."""
    if type(place) is int:
        return MessageId(place >> 32, place & ENTRY_MASK)
    return cast(MessageId, place)


class MessageIds(Sequence[MessageId]):
    """Many message ids as two columns: a MessageId is made of each at access.

    Equal to any other sequence of the same ids.
    """

    __slots__ = ("_columns", "_count", "_found", "_places", "_segments")

    def __init__(self, segments: Sequence[tuple[int, int, int]], places: npt.NDArray[np.intp] | None = None) -> None:
        """(ledger id, first entry id, count) of consecutive entries, one segment after the other.

        places: a permutation; the first id stands at `places[0]`, the second at `places[1]`. None: in order.
        """
        self._segments = segments
        self._places = places
        self._count = sum(count for _, _, count in segments)
        self._columns: tuple[Int64s, Int64s] | None = None
        self._found: Collection[int] = ()

    @classmethod
    def of(cls, ledgers: Int64s, entries: Int64s, found: Collection[int] = ()) -> MessageIds:
        """Ids by columns of one length, taken over. found: the rows of messages that were there before."""
        ids = cls(())
        ids._columns, ids._count, ids._found = (ledgers, entries), len(ledgers), found
        return ids

    @classmethod
    def run(cls, ledger_id: int, first: int, count: int) -> MessageIds:
        """The ids of consecutive entries of a ledger."""
        return cls([(ledger_id, first, count)])

    @classmethod
    def joined(cls, pieces: Sequence[MessageIds]) -> MessageIds:
        """The ids of several, one after the other."""
        import numpy as np  # noqa: PLC0415 - a command that sends no columns does without

        ledgers, entries = zip(*(piece.columns() for piece in pieces), strict=True)
        starts = accumulate((len(piece) for piece in pieces), initial=0)
        found = {start + row for start, piece in zip(starts, pieces, strict=False) for row in piece._found}
        return cls.of(np.concatenate(ledgers), np.concatenate(entries), found)

    def columns(self) -> tuple[Int64s, Int64s]:
        """Ledger ids and entry ids, not to be written to. O(ids) at first use."""
        if self._columns is None:
            import numpy as np  # noqa: PLC0415 - a command that sends no columns does without

            segments = np.fromiter(chain.from_iterable(self._segments), np.int64).reshape(-1, 3)
            counts = segments[:, 2]
            ledgers: Int64s = np.repeat(segments[:, 0], counts)
            before = np.cumsum(counts) - counts
            entries: Int64s = np.arange(len(ledgers), dtype=np.int64) + np.repeat(segments[:, 1] - before, counts)
            if self._places is not None:
                placed = np.empty_like(ledgers), np.empty_like(entries)
                placed[0][self._places], placed[1][self._places] = ledgers, entries
                ledgers, entries = placed
            self._columns = ledgers, entries
        return self._columns

    def runs(self) -> list[int]:
        """Ledger id, first entry id and count of consecutive ids, one run after the other."""
        if self._columns is None and self._places is None:
            return list(chain.from_iterable(self._segments))
        import numpy as np  # noqa: PLC0415 - a command that sends no columns does without

        ledgers, entries = self.columns()
        firsts = np.flatnonzero(np.append(True, (np.diff(ledgers) != 0) | (np.diff(entries) != 1))[: len(self)])
        counts = np.diff(firsts, append=len(self))
        runs: list[int] = np.stack((ledgers[firsts], entries[firsts], counts), 1).ravel().tolist()
        return runs

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> MessageId: ...

    @overload
    def __getitem__(self, index: slice) -> MessageIds: ...

    def __getitem__(self, index: int | slice) -> MessageId | MessageIds:
        ledgers, entries = self.columns()
        if isinstance(index, slice):
            rows = range(self._count)[index] if self._found else ()
            return MessageIds.of(
                ledgers[index], entries[index], {at for at, row in enumerate(rows) if row in self._found}
            )
        kind = FoundId if index % self._count in self._found else MessageId
        return kind(int(ledgers[index]), int(entries[index]))

    def __iter__(self) -> Iterator[MessageId]:
        return iter(self.to_list())

    def to_list(self) -> list[MessageId]:
        """The ids as a list."""
        if self._columns is None and self._places is None and len(self._segments) <= max(8, self._count // 8):
            return [
                each
                for ledger_id, first, count in self._segments
                for each in message_ids(repeat(ledger_id), range(first, first + count))
            ]
        ledgers, entries = self.columns()
        ids = message_ids(ledgers.tolist(), entries.tolist())
        for row in self._found:
            ids[row] = FoundId(*ids[row])
        return ids

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MessageIds):
            import numpy as np  # noqa: PLC0415 - a command that sends no columns does without

            return all(map(np.array_equal, self.columns(), other.columns()))
        return self.to_list() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self[:3]))
        return f"MessageIds({shown}{', ...' if len(self) > 3 else ''}; {len(self)})"


# "Position" and "message id" are two words for one value (docs/design.md, "Words"): a position is used of a place
# in a ledger (a cursor's mark-delete, a marker), a message id of the message that stands there.
Position = MessageId
