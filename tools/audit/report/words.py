"""Numbers and times in words for readers of a page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = ((604_800_000, "week"), (86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second"))


def moment(ms: int, *, with_time: bool = True) -> str:
    """A time in UTC, to the minute or to the day.

    >>> moment(1_795_251_600_000), moment(1_795_251_600_000, with_time=False)
    ('2026-11-21 09:00', '2026-11-21')
    """
    try:
        when = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return str(ms)
    return f"{when:%Y-%m-%d %H:%M}" if with_time else f"{when:%Y-%m-%d}"


def duration(ms: int) -> str:
    """A round length of time.

    >>> duration(500), duration(1_000), duration(300_000), duration(86_400_000)
    ('500 ms', '1 second', '5 minutes', '1 day')
    """
    for unit_ms, name in _UNITS:
        if ms >= unit_ms:
            count = ms // unit_ms
            return f"{count} {name}{'' if count == 1 else 's'}"
    return f"{ms} ms"


def share(part: int, whole: int) -> str:
    """A percentage that is 0 % or 100 % only when it is.

    >>> share(1, 3), share(999_999, 1_000_000), share(1, 1_000_000), share(0, 5)
    ('33 %', '99.9 %', 'under 0.1 %', '0 %')
    """
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    percent = 100 * part / whole
    if percent >= 99:
        return f"{min(percent, 99.9):.1f} %"
    if percent < 0.1:
        return "under 0.1 %"
    return f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def plural(number: int, noun: str) -> str:
    """A number and its noun.

    >>> plural(1, "message"), plural(2_000, "message")
    ('1 message', '2,000 messages')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_topic(name: str) -> str:
    """A topic's name without what is the same for most of them.

    >>> short_topic("persistent://public/default/mails"), short_topic("persistent://shop/mail/out")
    ('mails', 'shop/mail/out')
    """
    return name.removeprefix("persistent://").removeprefix("public/default/")
