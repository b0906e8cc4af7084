"""Lengths of time as callers give them, in the engine's unit, milliseconds.

One rule for the whole face: a parameter whose name ends in ``_ms`` takes an int of milliseconds, every other one takes
seconds, int or float; and each of them takes a ``timedelta``, which says its unit itself.
"""

import math
import operator
import re
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from decimal import Context, Decimal
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from .errors import InvalidArgument

Duration: TypeAlias = float | timedelta
"""A length of time: seconds, or a ``timedelta``."""

MAX_DURATION_MS = 253_402_300_799_999
"""Longest duration: from the epoch to the last instant that a ``datetime`` can show."""

T = TypeVar("T")


class Milliseconds:
    """The type of a setting in ms for type checkers: set to an int or a ``timedelta``, read as an int.

    There is none of it when a program runs: a dataclass puts ints into such fields (`take_plain`).
    """

    if TYPE_CHECKING:

        def __get__(self, settings: object, owner: type) -> int: ...

        def __set__(self, settings: object, value: int | timedelta) -> None: ...


class OptionalMilliseconds:
    """The type of a setting in ms that may be None: see `Milliseconds`."""

    if TYPE_CHECKING:

        def __get__(self, settings: object, owner: type) -> int | None: ...

        def __set__(self, settings: object, value: int | timedelta | None) -> None: ...


_EXACT = Context(prec=40)


def duration_ms(field: str, value: Duration, error: type[InvalidArgument] = InvalidArgument) -> int:
    """A duration in ms, rounded up, 0 to ``MAX_DURATION_MS``. Raises ``error`` naming ``field`` and the value.

    A float of seconds is taken as the decimal number that it prints as: 0.07 is 70 ms, not 71.
    """
    if isinstance(value, timedelta):
        ms = timedelta_ms(value)
        negative = value.days < 0
    elif isinstance(value, bool):
        raise error(field, value, "expected seconds or a timedelta")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise error(field, value, "not a finite number of seconds")
        negative = value < 0
        if value.is_integer():
            ms = int(value) * 1000
        else:
            ms = math.ceil(_EXACT.multiply(Decimal(float.__repr__(value)), 1000))
    else:
        try:
            ms = operator.index(value) * 1000
        except TypeError:
            raise error(field, value, "expected seconds or a timedelta") from None
        negative = ms < 0
    if negative:
        raise error(field, value, "negative")
    if ms > MAX_DURATION_MS:
        raise error(field, value, "longer than from 1970 to 9999-12-31T23:59:59.999Z")
    return ms


def plain_setting(name: str, value: T | timedelta) -> T | timedelta | int:
    """A setting as it is given, but for durations in ms as a ``timedelta``, and integers of another class, as numpy's.

    The first go by `duration_ms`, the second become an int. Raises InvalidArgument.
    """
    if isinstance(value, timedelta):
        return duration_ms(name, value) if name.endswith("_ms") else value
    if hasattr(value, "__index__") and not isinstance(value, bool):
        with suppress(TypeError):  # so says numpy's bool
            return operator.index(value)
    return value


def take_plain(settings: object) -> None:
    """Put `plain_setting` in the place of each field of a dataclass, a frozen one too."""
    for field in fields(settings):  # type: ignore[arg-type]
        object.__setattr__(settings, field.name, plain_setting(field.name, getattr(settings, field.name)))


def timedelta_ms(value: timedelta) -> int:
    """A ``timedelta`` in ms, rounded up."""
    return value.days * 86_400_000 + value.seconds * 1000 - (-value.microseconds // 1000)


# -- as people write them: `1h30m`, `90s`, `500ms`, ISO 8601 (`PT1H30M`), plain seconds.
# Years and months are refused: none of them has one length.

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
        numbers: list[str | None] = [None] * 4 + [stripped]
    else:
        match = _ISO.fullmatch(stripped) or _UNITS.fullmatch(stripped)
        numbers = [] if match is None else list(match.groups())
    given = [(Decimal(number), unit) for number, unit in zip(numbers, _SECONDS, strict=False) if number]
    if not given or any(number % 1 for number, _ in given[:-1]):
        raise InvalidArgument(field, text, _EXPECTED)
    seconds = sum((number * _SECONDS[unit] for number, unit in given), Decimal(0))
    return int(seconds) if seconds == seconds.to_integral_value() else float(seconds)
