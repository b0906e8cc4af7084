"""Lengths of time as people write them: `1h30m`, `90s`, `500ms`, ISO 8601 (`PT1H30M`), plain seconds.

Owns the text forms; what a length of time may be is for those who take it. Years and months are refused: none of them
has one length.
"""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import InvalidArgument

_NUMBER = r"\d{1,15}(?:\.\d{1,9})?"
_SECONDS = {
    "w": Decimal(604_800), "d": Decimal(86_400), "h": Decimal(3_600), "m": Decimal(60), "s": Decimal(1),
    "ms": Decimal("0.001"),
}  # fmt: skip
"""Seconds of each unit, the longest first, as a text has them."""

_PLAIN = re.compile(_NUMBER, re.ASCII)
_UNITS = re.compile("".join(f"(?:({_NUMBER}){unit})?" for unit in _SECONDS), re.ASCII)
_ISO = re.compile(
    rf"P(?:({_NUMBER})W)?(?:({_NUMBER})D)?(?:T(?=\d)(?:({_NUMBER})H)?(?:({_NUMBER})M)?(?:({_NUMBER})S)?)?", re.ASCII
)

_EXPECTED = "expected seconds, numbers with w, d, h, m, s or ms (90s, 1h30m, 500ms), or ISO 8601 (PT1H30M)"


def duration_seconds(field: str, text: str) -> float:
    """A length of time in seconds, exact to a nanosecond; an int where it is whole.

    Units stand once each, the longest first; only the last number may have a fraction. Raises InvalidArgument with
    `field` and the text.

    >>> duration_seconds("after", "1h30m"), duration_seconds("after", "PT1H30M"), duration_seconds("after", "0.25")
    (5400, 5400, 0.25)
    """
    stripped = text.strip()
    if _PLAIN.fullmatch(stripped):
        found: list[str | None] = [None] * 4 + [stripped]
    else:
        match = _ISO.fullmatch(stripped) or _UNITS.fullmatch(stripped)
        found = [] if match is None else list(match.groups())
    given = [(Decimal(number), unit) for number, unit in zip(found, _SECONDS, strict=False) if number]
    if not given or any(number % 1 for number, _ in given[:-1]):
        raise InvalidArgument(field, text, _EXPECTED)
    seconds = sum((number * _SECONDS[unit] for number, unit in given), Decimal(0))
    return int(seconds) if seconds == seconds.to_integral_value() else float(seconds)
