"""Durations: seconds or a timedelta, in ms, never shorter than what was said."""

from __future__ import annotations

import math
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.errors import InvalidArgument, InvalidMessage
from duelog.store.duration import MAX_DURATION_MS, duration_ms, duration_seconds


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (90, 90_000),
        (-0.0, 0),
        (0.07, 70),  # 0.07 * 1000 is 70.00000000000001
        (np.float64(0.57), 570),
        (1.005, 1005),
        (5e-324, 1),
        (1.0000000000000002, 1001),
        (86_400.25, 86_400_250),
        (0.0001, 1),
        (1e3, 1_000_000),
        (np.int64(2), 2_000),
        (timedelta(minutes=90), 5_400_000),
        (timedelta(microseconds=1), 1),
        (timedelta(milliseconds=5, microseconds=1), 6),
    ],
    ids=repr,
)
def test_seconds_and_timedeltas_are_one_thing(value: Any, ms: int) -> None:
    """A float is the decimal number that it prints as; what is finer than a millisecond is rounded up."""
    assert duration_ms("delay", value) == ms


@given(st.floats(0, 1e11) | st.floats(0, 10) | st.integers(0, 10**9).map(lambda ms: ms / 1000))
def test_seconds_are_rounded_up_by_less_than_a_millisecond(seconds: float) -> None:
    """From the decimal that the float prints as, so that whole milliseconds are kept."""
    exact = Fraction(Decimal(repr(seconds))) * 1_000
    assert duration_ms("delay", seconds) == math.ceil(exact)


@given(st.timedeltas(timedelta(0), timedelta(days=400_000)))
def test_a_timedelta_is_rounded_up_to_the_millisecond(value: timedelta) -> None:
    """By less than one."""
    exact = Fraction(value // timedelta(microseconds=1), 1_000)
    assert duration_ms("delay", value) == math.ceil(exact)


@pytest.mark.parametrize(
    "value",
    [None, True, "1", b"1", [1], -1, -0.5, math.nan, math.inf, timedelta(microseconds=-1), MAX_DURATION_MS, 1e300],
    ids=repr,
)
def test_what_is_no_duration_is_refused_by_field_and_value(value: Any) -> None:
    """The error is the one that the caller asks for."""
    with pytest.raises(InvalidArgument) as caught:
        duration_ms("ack_timeout", value)
    assert (caught.value.field, repr(caught.value.value)) == ("ack_timeout", repr(value))
    assert str(caught.value).startswith(f"ack_timeout={value!r}: ")
    with pytest.raises(InvalidMessage):
        duration_ms("deliver_after", value, InvalidMessage)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0", 0), ("0.25", 0.25), ("30s", 30), ("5m", 300), ("2h", 7_200), ("1d", 86_400), ("1w", 604_800),
     ("500ms", 0.5), ("1.5h", 5_400), ("1h30m", 5_400), ("1d2h", 93_600), ("1s500ms", 1.5), (" 5m ", 300),
     ("PT1H30M", 5_400), ("P1DT1.5S", 86_401.5), ("P2W", 1_209_600), ("PT0S", 0)],
)  # fmt: skip
def test_a_duration_is_seconds_or_numbers_with_units_or_iso_8601(text: str, seconds: float) -> None:
    """Whole seconds are an int, as commands print them."""
    found = duration_seconds("after", text)
    assert (found, type(found)) == (seconds, type(seconds))


@pytest.mark.parametrize(
    "text",
    ["", "s", "5 minutes", "-5", "1e3", "nan", "inf", "5M", "5.", "1,5", "1h 30m", "30m1h", "1h1h", "1.5h3m", "1h30",
     "P", "PT", "P1DT", "P1Y", "P1M", "pt1h", "PT1.5H3M", "1\N{ARABIC-INDIC DIGIT TWO}s", "9" * 40],
)  # fmt: skip
def test_a_duration_of_another_form_is_refused_with_its_text(text: str) -> None:
    """The error names the field and what was given; months and years have no length."""
    with pytest.raises(InvalidArgument) as raised:
        duration_seconds("after", text)
    assert (raised.value.field, raised.value.value) == ("after", text)


@given(st.tuples(*[st.integers(0, 99)] * 5).filter(any))
def test_both_forms_of_one_duration_are_the_same(parts: tuple[int, ...]) -> None:
    """Weeks, days, hours, minutes and seconds, in short and in ISO 8601."""
    short = "".join(f"{number}{unit}" for number, unit in zip(parts, "wdhms", strict=True) if number)
    date = "".join(f"{number}{unit}" for number, unit in zip(parts[:2], "WD", strict=True) if number)
    clock = "".join(f"{number}{unit}" for number, unit in zip(parts[2:], "HMS", strict=True) if number)
    assert duration_seconds("x", short) == duration_seconds("x", f"P{date}{'T' if clock else ''}{clock}")
