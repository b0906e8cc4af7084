"""Dead letters that are held, counted by where they came from and why: read in short transactions, after the facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ....store.env.environment import Environment
from ....topics.dead_letters import DeadLetter
from ....topics.subscription_state import KEEPER
from ...scan.held_letters import read_letters
from ..tables import DeadLetterRow
from .facts import StoreFacts

_LETTERS_A_TRANSACTION = 1_000


def dead_letter_rows(main: Environment, facts: StoreFacts) -> list[DeadLetterRow]:
    """A row for each topic, subscription and reason. What cannot be read is not counted. O(letters)."""
    held = _held(main, facts)
    return counted((letter.topic, letter.subscription, letter.reason, letter.dead_ms) for letter in held)


def counted(letters: Iterable[tuple[str, str, str, int]]) -> list[DeadLetterRow]:
    """The rows of letters, of which topic, subscription, reason and time of death are given.

    Of a reason counts what stands before its first colon: of an exception's type and text, the type.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    for topic, subscription, reason, dead_ms in letters:
        found.setdefault((topic, subscription, reason.partition(": ")[0]), []).append(dead_ms)
    return [DeadLetterRow(*key, len(times), min(times), max(times)) for key, times in sorted(found.items())]


def _held(main: Environment, facts: StoreFacts) -> Iterator[DeadLetter]:
    for topic in facts.topics.values():
        for _, cursor in topic.subscriptions:
            for ledger in topic.ledgers if cursor.flags & KEEPER else ():
                acknowledged = facts.acknowledged_of([cursor], ledger)
                left = (each for each in range(ledger.entries) if each not in acknowledged)
                while some := list(islice(left, _LETTERS_A_TRANSACTION)):
                    yield from _read(main, topic.name, ledger.ledger_id, some)


def _read(main: Environment, name: str, ledger_id: int, entries: list[int]) -> list[DeadLetter]:
    with main.read() as raw:
        return [each for each in read_letters(raw, name, ledger_id, entries) if isinstance(each, DeadLetter)]
