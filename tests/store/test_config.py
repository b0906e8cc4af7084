"""StoreConfig: defaults, and a refusal that names the field for every bad value; durations in seconds or timedelta."""

import dataclasses
import inspect
import math
import re
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.errors import InvalidArgument, InvalidMessage
from duelog.store.config import Durability, StoreConfig
from duelog.store.duration import MAX_DURATION_MS, duration_ms, duration_seconds

FIELDS = [field.name for field in dataclasses.fields(StoreConfig)]

# field: (lowest, highest)
RANGES: dict[str, tuple[int, int]] = {
    "partition_ms": (1, 2**32 - 1),
    "inline_delay_ms": (0, 2**63 - 1),
    "retention_ms": (0, 2**63 - 1),
    "retention_bytes": (0, 2**63 - 1),
    "ttl_ms": (1, 2**63 - 1),
    "ack_timeout_ms": (1, 2**63 - 1),
    "max_redeliveries": (0, 2**32 - 1),
    "max_message_bytes": (1, 2**30),
    "max_clock_jump_ms": (1, 2**63 - 1),
    "max_in_flight_bytes": (1, 2**63 - 1),
    "wal_bytes": (16 * 1024, 2**30),
    "relaxed_ms": (0, 60_000),
    "bucket_ms": (1, 2**32 - 1),
    "preload_ms": (0, 2**63 - 1),
    "tracker_prune_interval_ms": (0, 86_400_000),
    "fire_batch": (1, 1_000_000),
    "ack_flush_ms": (0, 3_600_000),
    "ledger_max_entries": (1, 2**32 - 1),
    "ledger_max_bytes": (1, 2**63 - 1),
    "ledger_max_age_ms": (1, 2**63 - 1),
    "snapshot_every_entries": (1, 2**32 - 1),
    "snapshot_part_bytes": (1024, 2**30),
    "max_open_partitions": (1, 65_536),
    "map_bytes": (2**20, 2**46),
    "run_entries": (1, 65_535),
    "run_bytes": (1024, 2**30),
    "ship_ms": (1, 3_600_000),
    "ship_bytes": (64 * 1024, 256 * 2**20),
    "lease_ms": (1_000, 3_600_000),
    "replicated_timeout_ms": (1, 3_600_000),
    "replica_keep_bytes": (2**20, 2**63 - 1),
    "replica_retention_ms": (86_400_000, 2**63 - 1),
    "max_local_bytes": (1, 2**63 - 1),
}

OPTIONAL = {"ttl_ms", "ack_timeout_ms", "max_redeliveries", "dead_letter_topic", "background", "control",
            "max_clock_jump_ms", "replica", "lease_ms", "max_local_bytes", "max_open_partitions"}  # fmt: skip


GOOD: list[tuple[str, object]] = [
    *((name, end) for name, ends in RANGES.items() for end in ends),
    *((name, None) for name in sorted(OPTIONAL)),
    *(("tracker_prune_ratio", value) for value in (0, 0.5, 1.0)),
    *(("durability", value) for value in get_args(Durability)),
    *((name, value) for name in ("background", "control") for value in (True, False)),
    *(("replica", value) for value in ("s3://bucket/orders", "file:///copies/orders")),
    *(("dead_letter_topic", value) for value in ("dead", "persistent://shop/mail/dead")),
]

BAD: list[tuple[str, object]] = [
    *((name, value) for name, (lowest, highest) in RANGES.items() for value in (lowest - 1, highest + 1, -(10**30))),
    *((name, value) for name in RANGES for value in (True, 1.0, "1", b"1", [1])),
    *((name, None) for name in FIELDS if name not in OPTIONAL),
    *(("tracker_prune_ratio", value) for value in (-0.1, 1.1, float("nan"), True, "1")),
    *(("durability", value) for value in ("fsync", "Commit", True, ["commit"])),
    *(("cluster", value) for value in ("", "a\nb", 5)),
    *((name, value) for name in ("background", "control") for value in (1, "yes")),
    *(("replica", value) for value in ("", "bucket/x", 7)),
    *(("dead_letter_topic", value) for value in ("", "a/b", "x" * 500, 7)),
]


def make(**settings: Any) -> StoreConfig:
    """A configuration from settings by name, of any type, and the setting that one of them needs."""
    if settings.get("max_local_bytes") is not None:
        settings["replica"] = "file:///copies/orders"
    return StoreConfig(**settings)


def test_every_field_is_explained() -> None:
    """The docstring has a paragraph for each, in order, and no other; docs/configuration.md holds the defaults."""
    assert re.findall(r"^([a-z_]+): ", inspect.getdoc(StoreConfig) or "", re.MULTILINE) == FIELDS


def test_a_config_cannot_be_changed() -> None:
    """The values stay as they were checked."""
    config = StoreConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.fire_batch = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        StoreConfig(1)  # type: ignore[call-arg]


def test_what_is_documented_is_taken_and_other_values_are_refused_by_name() -> None:
    """Ends of ranges, None where it has a meaning, every choice; nothing of another type is converted silently."""
    for name, value in GOOD:
        assert getattr(make(**{name: value}), name) == value
    for name, value in BAD:
        with pytest.raises(InvalidArgument) as caught:
            make(**{name: value})
        assert caught.value.field == name
        assert caught.value.value is value


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
