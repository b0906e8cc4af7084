"""Where an entry stands: a ledger of the store and an entry of that ledger.

Owns the value and its text form, ``ledger:entry``. It does not know which environment holds the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument

MAX_ID = 2**63 - 1
"""Largest ledger id and entry id: both go through int64 columns."""

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
    def parse(cls, text: str) -> MessageId:
        """Read what ``str()`` of a stored entry's id gives; raises InvalidArgument on anything else.

        Signs, blanks and leading zeros are refused, so that one id has one text.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidArgument("message_id", text, "expected ledger:entry, two decimal numbers")
        ledger_id, entry_id = int(match[1]), int(match[2])
        if ledger_id > MAX_ID or entry_id > MAX_ID:
            raise InvalidArgument("message_id", text, f"a number is over {MAX_ID}")
        return cls(ledger_id, entry_id)


_new = partial(tuple.__new__, MessageId)


def message_ids(ledgers: Iterable[int], entries: Iterable[int]) -> list[MessageId]:
    """Ids of pairs; a third of the time that calling MessageId for each takes, whose constructor is Python."""
    return list(map(_new, zip(ledgers, entries, strict=False)))


class MessageIds(Sequence[MessageId]):
    """Many message ids as two columns: a MessageId is made of each when somebody looks at it.

    Equal to any other sequence of the same ids.
    """

    __slots__ = ("_entries", "_ledgers")

    def __init__(self, ledgers: npt.NDArray[np.int64], entries: npt.NDArray[np.int64]) -> None:
        """int64 columns of one length, taken over."""
        self._ledgers = ledgers
        self._entries = entries

    @classmethod
    def run(cls, ledger_id: int, first: int, count: int) -> MessageIds:
        """The ids of consecutive entries of a ledger."""
        entries = np.arange(first, first + count, dtype=np.int64)
        return cls(np.full(count, ledger_id, dtype=np.int64), entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> MessageId: ...

    @overload
    def __getitem__(self, index: slice) -> MessageIds: ...

    def __getitem__(self, index: int | slice) -> MessageId | MessageIds:
        if isinstance(index, slice):
            return MessageIds(self._ledgers[index], self._entries[index])
        return MessageId(int(self._ledgers[index]), int(self._entries[index]))

    def __iter__(self) -> Iterator[MessageId]:
        return iter(self.to_list())

    def to_list(self) -> list[MessageId]:
        """All of them as a list."""
        return message_ids(self._ledgers.tolist(), self._entries.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MessageIds):
            return np.array_equal(self._ledgers, other._ledgers) and np.array_equal(self._entries, other._entries)
        return self.to_list() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self[:3]))
        return f"MessageIds({shown}{', ...' if len(self) > 3 else ''}; {len(self)})"


# "Position" and "message id" are two words for one value (docs/design.md, Words): a position is used of a place
# in a ledger (a cursor's mark-delete, a marker), a message id of the message that stands there.
Position = MessageId
