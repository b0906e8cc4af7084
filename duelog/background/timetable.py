"""When something recurs: a cron expression in a time zone, or an interval.

Cron expressions are cronsim's (those of Debian's cron, with a seconds field in front if there are six), and so is what
happens when clocks change: a job at a fixed time of day that the clock skips runs right after the gap, one whose time
comes twice runs once; one that runs every so many minutes follows the real time. An interval is real time always.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from duelog.store.duration import duration_ms
from duelog.store.errors import BrokenInvariant, InvalidArgument
from duelog.store.message import MAX_DUE_MS

MIN_INTERVAL_MS = 1_000
"""Shortest interval: each occurrence costs two commits."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Timetable:
    """Either `cron` or `interval_ms`; `timezone` is an IANA name, that of the cron expression."""

    cron: str | None
    interval_ms: int | None
    timezone: str

    @classmethod
    def make(cls, cron: str | None, interval: float | timedelta | None, timezone: str) -> Timetable:
        """Check what a caller gives. Raises InvalidArgument naming `cron`, `interval` or `timezone`."""
        if (cron is None) == (interval is None):
            raise InvalidArgument("cron", cron, f"expected one of cron and interval, interval={interval!r}")
        if not isinstance(timezone, str):
            raise InvalidArgument("timezone", timezone, "expected a str such as Europe/Rome")
        try:
            ZoneInfo(timezone)
        except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError with its own text
            raise InvalidArgument("timezone", timezone, f"not a time zone: {error}") from None
        except KeyError:
            raise InvalidArgument("timezone", timezone, "unknown; expected an IANA name such as Europe/Rome") from None
        if interval is not None:
            interval_ms = duration_ms("interval", interval)
            if interval_ms < MIN_INTERVAL_MS:
                raise InvalidArgument("interval", interval, f"shorter than {MIN_INTERVAL_MS} ms")
            return cls(None, interval_ms, timezone)
        if not isinstance(cron, str):
            raise InvalidArgument("cron", cron, "expected a str such as '0 9 * * MON-FRI'")
        table = cls(cron, None, timezone)
        table.after(0, 0)
        return table

    def after(self, now_ms: int, anchor_ms: int) -> int:
        """The first occurrence after `now_ms`; intervals are counted from `anchor_ms`, an occurrence or the start.

        Raises InvalidArgument: the expression cannot be read, or has no occurrence any more.
        """
        if self.interval_ms is not None:
            due_ms = anchor_ms + ((now_ms - anchor_ms) // self.interval_ms + 1) * self.interval_ms
            if due_ms > MAX_DUE_MS:
                raise InvalidArgument("interval", self.interval_ms, "no occurrence before the year 10000")
            return due_ms
        if self.cron is None:
            raise BrokenInvariant("a timetable has neither an expression nor an interval")
        moment = (_EPOCH + timedelta(milliseconds=now_ms)).astimezone(ZoneInfo(self.timezone))
        try:
            # In an hour that comes twice, seen from its second half, the first is one of its first half.
            return next(due_ms for due_ms in map(_epoch_ms, CronSim(self.cron, moment)) if due_ms > now_ms)
        except CronSimError as error:
            raise InvalidArgument("cron", self.cron, str(error)) from None
        except (StopIteration, OverflowError):
            raise InvalidArgument("cron", self.cron, "has no occurrence") from None


def _epoch_ms(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)
