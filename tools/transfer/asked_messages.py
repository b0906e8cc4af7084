"""Many messages, checked and sent by asking a store: in pieces that a control socket takes."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

from ... import Message
from ..asking import Ask

_PIECE_BYTES = 768 << 10
"""Of one request: a socket takes lines of 1 MiB and the largest message."""

_DELAYS = 10_000

_FIELDS = ("deliver_at", "deliver_after", "key", "properties", "dedup_key", "dedup_for", "replace")


def first_refused(ask: Ask, topic: str, messages: Sequence[Message]) -> dict[str, Any] | None:
    """The first message whose delay a policy refuses: "at", its place, "asked_ms", "reason"; None: there is none."""
    delayed = [at for at, each in enumerate(messages) if (each.deliver_at, each.deliver_after) != (None, None)]
    for start in range(0, len(delayed), _DELAYS):
        places = delayed[start : start + _DELAYS]
        delays = [[messages[at].deliver_at, messages[at].deliver_after] for at in places]
        refused: dict[str, Any] | None = ask("check_delays", {"topic": topic, "delays": delays})
        if refused is not None:
            return {**refused, "at": places[refused["at"]]}
    return None


def pieces_of(messages: Sequence[Message]) -> Iterator[list[dict[str, object]]]:
    """The messages as `send_messages` takes them, a request's worth at a time."""
    piece: list[dict[str, object]] = []
    size = 0
    for message in messages:
        texts = (
            message.key or "",
            message.dedup_key or "",
            *(text for pair in (message.properties or {}).items() for text in pair),
        )
        takes = 128 + len(message.payload) * 4 // 3 + 12 * sum(map(len, texts))  # JSON escapes a character by 12 bytes
        if piece and size + takes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        given = {name: getattr(message, name) for name in _FIELDS}
        fields = {name: value for name, value in given.items() if value is not None and value is not False}
        piece.append({"payload": base64.b64encode(message.payload).decode(), **fields})
        size += takes
    if piece:
        yield piece
