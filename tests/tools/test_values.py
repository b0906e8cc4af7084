"""Times and properties as people write them."""

from __future__ import annotations

import pytest

from duelog.errors import InvalidArgument
from duelog.tools.values import iso_time, properties_of, time_ms


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1795251600000", 1_795_251_600_000),
        ("2026-11-21T09:00:00Z", 1_795_251_600_000),
        ("2026-11-21T10:00:00+01:00", 1_795_251_600_000),
        ("2026-11-21T09:00:00.0001Z", 1_795_251_600_001),
        ("20261121T090000Z", 1_795_251_600_000),
        ("0", 0),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
    ],
)
def test_a_time_is_milliseconds_or_iso_8601_with_a_zone(text: str, ms: int) -> None:
    """A duration finer than a millisecond is rounded up, so that nothing is early."""
    assert time_ms("at", text) == ms


@pytest.mark.parametrize(
    "text",
    ["", "tomorrow", "2026-11-21", "2026-11-21T09:00:00", "-1", "1969-12-31T23:59:59Z", "253402300800000", "9" * 30,
     "2026-13-01T00:00Z", "9999-12-31T23:59:59.9999Z", "1.5"],
)  # fmt: skip
def test_a_time_without_a_zone_or_out_of_range_is_refused(text: str) -> None:
    """The error names the field and what was given."""
    with pytest.raises(InvalidArgument) as raised:
        time_ms("at", text)
    assert (raised.value.field, raised.value.value) == ("at", text)


def test_times_are_shown_as_they_are_read() -> None:
    """`iso_time` is the inverse of `time_ms`."""
    for ms in (0, 1, 999, 1_795_251_600_000, 253_402_300_799_999):
        assert time_ms("at", iso_time(ms)) == ms


@pytest.mark.parametrize(
    ("pairs", "said"),
    [(["shop"], "name=value"), (["=7"], "name=value"), ([""], "name=value"), (["a=1", "a=2"], "twice")],
)
def test_a_property_needs_a_name_of_its_own_and_a_value(pairs: list[str], said: str) -> None:
    """An argument that is no name=value is refused, and of one name neither value is taken silently."""
    with pytest.raises(InvalidArgument, match=said):
        properties_of(pairs)
    assert properties_of(["a=", "b=c=d"]) == {"a": "", "b": "c=d"}
