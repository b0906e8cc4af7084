"""Due-time arithmetic of partitions, against plain Python."""

from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.partitions.timespan import (
    DUE_LIMIT_MS,
    SPAN_LIMIT_MS,
    directory_name,
    group_by_log,
    parse_directory_name,
    partition_start,
)
from duelog.store.errors import InvalidArgument

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SPANS = [1, 7, 1_000, HOUR_MS, DAY_MS, 30 * DAY_MS, SPAN_LIMIT_MS - 1]

dues = st.integers(0, DUE_LIMIT_MS - 1)
spans = st.sampled_from(SPANS) | st.integers(1, SPAN_LIMIT_MS - 1)


def utc_ms(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0) -> int:
    """Epoch milliseconds of a time in UTC."""
    return int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()) * 1_000


@given(dues, spans)
def test_a_due_time_lies_in_exactly_the_partition_of_its_start(due_ms: int, span_ms: int) -> None:
    """A start is a multiple of the span, not after the due time and less than a span before it."""
    start_ms = partition_start(due_ms, span_ms)
    assert start_ms % span_ms == 0
    assert start_ms <= due_ms < start_ms + span_ms
    assert partition_start(start_ms, span_ms) == start_ms


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int]:
    """Due times around a few partitions that are near, or as far apart as the range allows."""
    span_ms = draw(spans)
    near = st.integers(0, min(5 * span_ms, DUE_LIMIT_MS) - 1)
    return draw(st.lists(near, max_size=40) | st.lists(near | dues, max_size=40)), span_ms


def grouped(batch: npt.NDArray[np.int64], span_ms: int) -> list[tuple[int, list[int]]]:
    """The start of each partition and the positions of its messages."""
    order, groups = group_by_log(None, batch, span_ms)
    assert [start for _, _, start, _ in groups] == [0, *(limit for *_, limit in groups)][: len(groups)]
    assert not any(owner for _, owner, _, _ in groups)
    return [(start_ms, order[start:limit].tolist()) for start_ms, _, start, limit in groups]


@given(batches())
def test_groups_hold_every_position_once_in_append_order(case: tuple[list[int], int]) -> None:
    """Grouping a batch agrees with a plain dictionary of lists, sorted by start."""
    batch, span_ms = case
    expected: dict[int, list[int]] = {}
    for position, due_ms in enumerate(batch):
        expected.setdefault(due_ms - due_ms % span_ms, []).append(position)
    assert grouped(np.array(batch, dtype=np.int64), span_ms) == sorted(expected.items())


def test_partitions_2_to_the_16_apart_are_not_taken_for_one() -> None:
    """Grouping sorts near partitions by a short number; farther ones must not wrap around onto them."""
    assert grouped(np.array([65_536, 0, 1, 131_072, 0], dtype=np.int64), 1) == [
        (0, [1, 4]),
        (1, [2]),
        (65_536, [0]),
        (131_072, [3]),
    ]


def test_directory_names_are_utc_times_with_milliseconds_only_where_needed() -> None:
    """The name is the start in UTC; a fraction appears for starts off the second, always of three digits."""
    start_ms = utc_ms(2026, 11, 20)
    assert directory_name(start_ms) == "20261120T000000Z"
    assert directory_name(start_ms + 250) == "20261120T000000.250Z"
    assert directory_name(start_ms + 7) == "20261120T000000.007Z"
    assert directory_name(0) == "19700101T000000Z"
    assert directory_name(utc_ms(2028, 2, 29, 23, 59, 59)) == "20280229T235959Z"
    assert directory_name(DUE_LIMIT_MS - 1) == "99991231T235959.999Z"


@given(dues)
def test_a_directory_name_gives_its_start_back(start_ms: int) -> None:
    """parse_directory_name is the inverse of directory_name over the whole range."""
    assert parse_directory_name(directory_name(start_ms)) == start_ms


@given(st.text(alphabet="0123456789TZ.", min_size=14, max_size=21))
@settings(max_examples=50)
def test_a_start_has_only_one_name(name: str) -> None:
    """Whatever parses is exactly what would have been written."""
    try:
        start_ms = parse_directory_name(name)
    except InvalidArgument:
        return
    assert directory_name(start_ms) == name


@pytest.mark.parametrize(
    "name",
    ["", "20261120", "20261120T000000", "20261120T000000z", " 20261120T000000Z", "20261120T000000Z\n",
     "20261120T000000.000Z", "20261120T000000.25Z", "20261131T000000Z", "20270229T000000Z", "20261120T240000Z",
     "20261120T000060Z", "19691231T235959Z", "00000101T000000Z",
     "٢٠٢٦1120T000000Z"],  # noqa: RUF001 - digits that are not ASCII, on purpose
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    """A name that is no partition's says so, with the name."""
    with pytest.raises(InvalidArgument) as caught:
        parse_directory_name(name)
    assert caught.value.value == name


@pytest.mark.parametrize("span_ms", [0, -1, SPAN_LIMIT_MS])
def test_a_span_out_of_range_is_refused(span_ms: int) -> None:
    """No arithmetic is done with a span that does not fit the 32-bit offsets."""
    with pytest.raises(InvalidArgument, match="span_ms"):
        group_by_log(None, np.zeros(1, dtype=np.int64), span_ms)
    with pytest.raises(InvalidArgument, match="span_ms"):
        partition_start(0, span_ms)


@pytest.mark.parametrize("due_ms", [-1, DUE_LIMIT_MS])
def test_a_due_time_out_of_range_is_refused(due_ms: int) -> None:
    """Before 1970 and from the year 10000 on there are no partitions, wherever in a batch the time stands."""
    batch = np.array([5, due_ms, 6], dtype=np.int64)
    with pytest.raises(InvalidArgument, match="due_ms") as caught:
        group_by_log(None, batch, DAY_MS)
    assert caught.value.value == due_ms
    with pytest.raises(InvalidArgument, match="due_ms"):
        partition_start(due_ms, DAY_MS)
    with pytest.raises(InvalidArgument, match="start_ms"):
        directory_name(due_ms)
