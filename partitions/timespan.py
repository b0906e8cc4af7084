"""Due-time arithmetic: which time partition a due time lies in, and what its directory is called.

A partition is the half-open interval ``[start_ms, start_ms + span_ms)`` with ``start_ms`` a multiple of
``span_ms`` counted from the Unix epoch, UTC. Any span from 1 ms to 2**32 - 1 ms (49.7 days) is allowed: a due
time is stored as a 32-bit offset from its partition's start. A span that divides a day starts at round hours;
one that does not (30 days, 7 hours) keeps its own grid, the same on every machine and after every restart.

Due times are ``0 <= due_ms < DUE_LIMIT_MS``, the start of the year 10000, so that every partition has a name
with a four-digit year. Pure functions; nothing here reads a clock, a time zone or a disk.
"""

import re
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt

from ..store.codec.run import MAX_DUE_SPAN_MS
from ..store.errors import InvalidArgument
from ..store.message import MAX_DUE_MS

DUE_LIMIT_MS = MAX_DUE_MS + 1
"""First millisecond of the year 10000: due times are below it."""

SPAN_LIMIT_MS = MAX_DUE_SPAN_MS + 1
"""Partition spans are below it, so that an offset from a partition's start fits 32 bits."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAME = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)(?:\.(\d{3}))?Z", re.ASCII)


def partition_start(due_ms: int, span_ms: int) -> int:
    """Start of the partition that ``due_ms`` lies in.

    Raises InvalidArgument for a due time or span out of range.
    """
    _require_span(span_ms)
    if not 0 <= due_ms < DUE_LIMIT_MS:
        raise InvalidArgument("due_ms", due_ms, f"not in 0 .. {DUE_LIMIT_MS - 1}")
    return due_ms - due_ms % span_ms


def group_by_log(
    owners: npt.NDArray[np.intp] | None, dues: npt.NDArray[np.int64], span_ms: int
) -> tuple[npt.NDArray[np.intp], list[tuple[int, int, int, int]]]:
    """Sort a batch by partition, then by owner, a number from 0 (None: all are of owner 0): its positions, and groups.

    A group is ``(start_ms, owner, start, limit)``: its messages stand at ``positions[start:limit]``. Positions are
    ascending within each group, so append order is kept. O(n) if one group takes all, O(n log n) otherwise. Raises
    InvalidArgument for a span out of range, or for the first due time out of range.
    """
    _require_span(span_ms)
    count = len(dues)
    if not count:
        return np.empty(0, dtype=np.intp), []
    earliest, latest = _require_dues(dues)
    first = earliest - earliest % span_ms
    width = 1 if owners is None else int(owners.max()) + 1
    if width == 1 and latest < first + span_ms:
        return np.arange(count, dtype=np.intp), [(first, 0, 0, count)]
    numbers = (dues - first) // span_ms
    if owners is not None:
        numbers = numbers * width + owners
    if ((latest - first) // span_ms + 1) * width <= 1 << 16:  # numpy sorts 16-bit keys by radix, several times faster
        numbers = numbers.astype(np.uint16)
    order = numbers.argsort(kind="stable")
    ordered = numbers[order]
    cuts = [0, *((ordered[1:] != ordered[:-1]).nonzero()[0] + 1).tolist(), count]
    logs = (divmod(number, width) for number in ordered[cuts[:-1]].tolist())
    groups = zip(logs, cuts, cuts[1:], strict=False)
    return order, [(first + at * span_ms, owner, start, limit) for (at, owner), start, limit in groups]


def group_by_owner(
    owners: npt.NDArray[np.intp] | None, places: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], list[tuple[int, int, int]]]:
    """Places of a batch by owner (None: all are of owner 0), and the (owner, start, limit) of each in them."""
    if owners is None:
        return places, [(0, 0, len(places))]
    found = owners[places]
    order = found.argsort(kind="stable")
    values, starts = np.unique(found[order], return_index=True)
    limits = [*starts[1:].tolist(), len(places)]
    return places[order], list(zip(values.tolist(), starts.tolist(), limits, strict=True))


def directory_name(start_ms: int) -> str:
    """Directory of the partition that starts at ``start_ms``: ``20261120T000000Z``.

    Milliseconds are added only to a start that is not a whole second (``20261120T000000.250Z``). Order by
    ``parse_directory_name``, not by the text: ``.250Z`` sorts before ``Z``.

    >>> directory_name(0), directory_name(1_500)
    ('19700101T000000Z', '19700101T000001.500Z')
    """
    if not 0 <= start_ms < DUE_LIMIT_MS:
        raise InvalidArgument("start_ms", start_ms, f"not in 0 .. {DUE_LIMIT_MS - 1}")
    seconds, millis = divmod(start_ms, 1_000)
    fraction = f".{millis:03d}" if millis else ""
    return f"{_EPOCH + timedelta(seconds=seconds):%Y%m%dT%H%M%S}{fraction}Z"


def parse_directory_name(name: str) -> int:
    """The ``start_ms`` whose ``directory_name`` is ``name``, and no other spelling of it.

    Raises InvalidArgument if ``name`` is not one.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidArgument("name", name, "not of the form 20261120T000000Z or 20261120T000000.250Z")
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    try:
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError as error:
        raise InvalidArgument("name", name, f"no such time: {error}") from None
    start_ms = (moment - _EPOCH) // timedelta(milliseconds=1) + int(match[7] or 0)
    if start_ms < 0:
        raise InvalidArgument("name", name, "before 1970")
    if match[7] == "000":
        raise InvalidArgument("name", name, "a whole second is written without milliseconds")
    return start_ms


def _require_span(span_ms: int) -> None:
    if not 0 < span_ms < SPAN_LIMIT_MS:
        raise InvalidArgument("span_ms", span_ms, f"not in 1 .. {SPAN_LIMIT_MS - 1}")


def _require_dues(dues: npt.NDArray[np.int64]) -> tuple[int, int]:
    """The earliest and the latest of ``dues``, both in range; (0, 0) of none."""
    if not len(dues):
        return 0, 0
    earliest, latest = int(dues.min()), int(dues.max())
    for due_ms in (earliest, latest):
        if not 0 <= due_ms < DUE_LIMIT_MS:
            raise InvalidArgument("due_ms", due_ms, f"not in 0 .. {DUE_LIMIT_MS - 1}")
    return earliest, latest
