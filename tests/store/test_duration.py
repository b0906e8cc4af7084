"""Durations: seconds or a timedelta, in ms, never shorter than what was said."""

from __future__ import annotations

import math
from datetime import timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.errors import InvalidArgument, InvalidMessage
from duelog.store.duration import MAX_DURATION_MS, duration_ms


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (90, 90_000),
        (0.07, 70),
        (0.0001, 1),
        (1e3, 1_000_000),
        (np.int64(2), 2_000),
        (timedelta(minutes=90), 5_400_000),
        (timedelta(microseconds=1), 1),
        (timedelta(milliseconds=5), 5),
    ],
    ids=repr,
)
def test_seconds_and_timedeltas_are_one_thing(value: Any, ms: int) -> None:
    """A float is the decimal number that it prints as; what is finer than a millisecond is rounded up."""
    assert duration_ms("delay", value) == ms


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
    """As the error that the caller asks for."""
    with pytest.raises(InvalidArgument) as caught:
        duration_ms("ack_timeout", value)
    assert (caught.value.field, repr(caught.value.value)) == ("ack_timeout", repr(value))
    assert str(caught.value).startswith(f"ack_timeout={value!r}: ")
    with pytest.raises(InvalidMessage):
        duration_ms("deliver_after", value, InvalidMessage)
