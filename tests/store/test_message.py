"""Messages: the due time that one asks for, and the classes themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.message import MAX_DUE_MS, Message, ReceivedMessage, ScheduledMessage, resolve_due_ms
from duelog.store.position import MessageId

NOW = 1_790_000_000_000

# -- due times ---------------------------------------------------------------------------------


def test_a_message_without_a_delay_has_no_due_time() -> None:
    """None is neither now nor zero."""
    assert resolve_due_ms(Message(b""), NOW) is None


@pytest.mark.parametrize(
    ("at", "due_ms"),
    [
        (0, 0),
        (NOW - 5, NOW - 5),
        (MAX_DUE_MS, MAX_DUE_MS),
        (np.int64(17), 17),
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC), MAX_DUE_MS),
        (datetime(2026, 11, 20, 12, 0, tzinfo=ZoneInfo("Europe/Berlin")), 1_795_172_400_000),
        (datetime(2026, 11, 20, 12, 0, tzinfo=ZoneInfo("Asia/Kathmandu")), 1_795_155_300_000),
        (datetime(2026, 11, 20, 12, 0, tzinfo=timezone(timedelta(hours=-12))), 1_795_219_200_000),
        # the hour that is there twice when clocks go back
        (datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=0), 1_792_888_200_000),
        (datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1), 1_792_891_800_000),
        # finer than a millisecond: up
        (datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC), 1_767_225_600_001),
        (datetime(2026, 1, 1, 0, 0, 0, 1_000, tzinfo=UTC), 1_767_225_600_001),
        (datetime(2026, 1, 1, 0, 0, 0, 1_001, tzinfo=UTC), 1_767_225_600_002),
    ],
)
def test_deliver_at_is_an_instant_in_any_zone(at: Any, due_ms: int) -> None:
    """Ints are taken as they are, aware datetimes by their offset, fractions of a millisecond rounded up."""
    due = resolve_due_ms(Message(b"", deliver_at=at), NOW)
    assert due == due_ms
    assert type(due) is int


@given(
    st.datetimes(
        datetime(1971, 1, 1),
        datetime(9999, 12, 30),
        timezones=st.sampled_from(
            [ZoneInfo(name) for name in ("UTC", "America/St_Johns", "Asia/Tokyo", "Pacific/Chatham", "Europe/Dublin")]
        ),
    )
)
@settings(max_examples=100)
def test_no_datetime_is_early_and_none_late_by_a_millisecond(at: datetime) -> None:
    """0 <= due - instant < 1 ms, compared in exact fractions."""
    due_ms = resolve_due_ms(Message(b"", deliver_at=at), NOW)
    assert due_ms is not None
    delta = at - datetime(1970, 1, 1, tzinfo=UTC)
    exact = Fraction(delta.days * 86_400_000 + delta.seconds * 1000) + Fraction(delta.microseconds, 1000)
    assert 0 <= due_ms - exact < 1


@pytest.mark.parametrize(
    ("after", "delay_ms"),
    [
        (0, 0),
        (0.0, 0),
        (-0.0, 0),
        (3600, 3_600_000),
        (np.int64(2), 2_000),
        (np.float64(0.07), 70),
        (0.07, 70),  # 0.07 * 1000 is 70.00000000000001
        (0.57, 570),
        (1.005, 1005),
        (0.0001, 1),
        (5e-324, 1),
        (1.0000000000000002, 1001),
        (86_400.25, 86_400_250),
        (timedelta(days=1), 86_400_000),
        (timedelta(microseconds=1), 1),
        (timedelta(milliseconds=5), 5),
        (timedelta(milliseconds=5, microseconds=1), 6),
        (timedelta(0), 0),
    ],
)
def test_deliver_after_rounds_up_to_the_millisecond(after: Any, delay_ms: int) -> None:
    """What was asked in whole milliseconds is kept, what is finer rounded up."""
    due = resolve_due_ms(Message(b"", deliver_after=after), NOW)
    assert due == NOW + delay_ms
    assert type(due) is int


@given(st.floats(0, 1e11) | st.floats(0, 10))
@settings(max_examples=200)
def test_no_delay_in_seconds_is_early(after: float) -> None:
    """0 <= delay - asked < 1 ms, where asked is the decimal that the float prints as."""
    due_ms = resolve_due_ms(Message(b"", deliver_after=after), NOW)
    assert due_ms is not None
    assert 0 <= due_ms - NOW - Fraction(Decimal(repr(after))) * 1000 < 1


@given(st.integers(0, 10**9))
def test_a_delay_of_whole_milliseconds_is_kept(ms: int) -> None:
    """Seconds computed as ms / 1000 come back as ms."""
    assert resolve_due_ms(Message(b"", deliver_after=ms / 1000), NOW) == NOW + ms


@given(st.timedeltas(timedelta(0), timedelta(days=10_000)))
def test_no_timedelta_is_early(after: timedelta) -> None:
    """0 <= delay - asked < 1 ms."""
    due_ms = resolve_due_ms(Message(b"", deliver_after=after), NOW)
    assert due_ms is not None
    assert timedelta(0) <= timedelta(milliseconds=due_ms - NOW) - after < timedelta(milliseconds=1)


# -- the classes themselves --------------------------------------------------------------------


def test_only_the_payload_is_positional() -> None:
    """Message(b"x", 5) is a mistake and not a due time."""
    with pytest.raises(TypeError):
        Message(b"x", 5)  # type: ignore[call-arg]


def test_messages_compare_by_value_and_have_no_dict() -> None:
    """They are small records."""
    assert Message(b"a", key="k") == Message(b"a", key="k")
    assert Message(b"a") != Message(b"b")
    received = ReceivedMessage(b"p", None, {}, MessageId(1, 2), MessageId(3, 4), 5, 6, 0, "t", "s")
    scheduled = ScheduledMessage(MessageId(1, 2), b"p", None, {}, 5, 6, "t")
    for value in (Message(b"a"), received, scheduled):
        assert not hasattr(value, "__dict__")
    assert (received.message_id, received.position, received.subscription) == ((1, 2), (3, 4), "s")
