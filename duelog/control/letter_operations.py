"""The operations on dead letters; a part of `Operations`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duelog.store.errors import InvalidArgument

from ..topics.dead_letters import DeadLetter
from .asked_store import Store
from .json_values import letter_json


class LetterOperations:
    """List, requeue and purge. What is moved or dropped is read into memory first, as all of it is or none."""

    _store: Store

    def dead_letters(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        reason: str | None = None,
        key: str | None = None,
        older_than: float | None = None,
    ) -> Iterator[dict[str, object]]:
        """As `DelayedStore.dead_letters`."""
        found = self._store.dead_letters(topic, subscription, reason=reason, key=key, older_than=older_than)
        return map(letter_json, found)

    def requeue_dead_letters(
        self,
        ids: Sequence[str] | None = None,
        delay: float = 0,
        topic: str | None = None,
        subscription: str | None = None,
        reason: str | None = None,
        key: str | None = None,
        older_than: float | None = None,
    ) -> int:
        """Deliver again those of these ids among what the others leave, None: all of that; how many."""
        found = self._store.dead_letters(topic, subscription, reason=reason, key=key, older_than=older_than)
        return self._store.requeue_dead_letters(_chosen(found, ids), delay=delay)

    def purge_dead_letters(
        self,
        ids: Sequence[str] | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        reason: str | None = None,
        key: str | None = None,
        older_than: float | None = None,
    ) -> int:
        """Drop them for good; how many."""
        found = self._store.dead_letters(topic, subscription, reason=reason, key=key, older_than=older_than)
        return self._store.purge_dead_letters(_chosen(found, ids))


def _chosen(held: Iterator[DeadLetter], ids: Sequence[str] | None) -> list[DeadLetter]:
    """The letters of some ids. Raises InvalidArgument for an id that none has."""
    if ids is None:
        return list(held)
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidArgument("ids", ids, "expected a list of ids, or null")
    wanted = set(map(str, ids))
    found = [letter for letter in held if str(letter.message_id) in wanted]
    known = {str(letter.message_id) for letter in found}
    for each in ids:
        if str(each) not in known:
            raise InvalidArgument("ID", each, "no dead letter has this id")
    return found
