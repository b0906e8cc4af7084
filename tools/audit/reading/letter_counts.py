"""Dead letters that are held, counted by where they came from and why: read in short transactions, after the facts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ....store.codec.run import RunKind
from ....store.env.environment import Environment
from ....store.errors import CorruptEntry
from ....store.log.scan import RunFinder
from ....store.position import Position
from ....topics.dead_letters import DeadLetter, decode_letter
from ....topics.subscription_state import KEEPER
from ..tables import DeadLetterRow
from .facts import StoreFacts

_LETTERS_A_TRANSACTION = 1_000


def dead_letter_rows(main: Environment, facts: StoreFacts) -> list[DeadLetterRow]:
    """A row for each topic, subscription and reason. What cannot be read is not counted. O(letters)."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for letter in _held(main, facts):
        found.setdefault((letter.topic, letter.subscription, letter.reason), []).append(letter.dead_ms)
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
    found = []
    with main.read() as raw:
        finder = RunFinder(raw, main.name)
        for entry_id in entries:
            try:
                run = finder.find(ledger_id, entry_id)
                body = None if run is None or run.kind != RunKind.MESSAGES else run.body(entry_id - run.first_entry)
                letter = None if body is None else decode_letter(name, Position(ledger_id, entry_id), body)
            except (CorruptEntry, ValueError):
                continue
            if letter is not None:
                found.append(letter)
    return found
