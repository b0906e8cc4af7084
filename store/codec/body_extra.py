"""The part `extra` of a message's body (body.py): which schedule the message is of.

    schedule = [name, nominal_ms]

It goes along where a message is sent anew: postponed, as a dead letter, and requeued.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..message import Occurrence

_SCHEDULE = "schedule"


def occurrence_extra(occurrence: Occurrence | None) -> dict[str, object]:
    """The part of ``extra`` that says which schedule a message is of."""
    return {} if occurrence is None else {_SCHEDULE: list(occurrence)}


def occurrence_of(extra: Mapping[str, object] | None) -> Occurrence | None:
    """Which schedule a message is of. Raises ValueError."""
    facts = None if extra is None else extra.get(_SCHEDULE)
    if facts is None:
        return None
    if type(facts) is not list or [type(fact) for fact in facts] != [str, int]:
        raise ValueError(f"schedule {facts!r} of a body is malformed")
    return Occurrence(*facts)
