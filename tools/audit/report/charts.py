"""Charts of a page, as HTML and inline SVG: bars over time, bars in a list. No script, nothing loaded.

Only bars are SVG, stretched to the width there is; every text is HTML, so that it keeps its size on a phone. Colours
are classes (`c-...`), which the page's style gives for light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ..tables import DAY_MS, HOUR_MS
from .words import moment

MOST_BINS = 60
_WIDTHS_MS = (HOUR_MS, 3 * HOUR_MS, 6 * HOUR_MS, DAY_MS, 7 * DAY_MS, 28 * DAY_MS, 91 * DAY_MS, 364 * DAY_MS)


class Series(NamedTuple):
    """Counts by the start of their time, drawn in one colour."""

    name: str
    colour: str
    counts: dict[int, int]


def bin_width_ms(starts: Sequence[int], finest_ms: int) -> int:
    """The width at which these times make no more than MOST_BINS bars, a multiple of what they were counted by."""
    span = max(starts) - min(starts) + finest_ms
    for width in _WIDTHS_MS:
        if width >= finest_ms and span <= width * MOST_BINS:
            return width
    return -(-span // (MOST_BINS * DAY_MS)) * DAY_MS


def time_bars(series: Sequence[Series], finest_ms: int, label: str) -> str:
    """Stacked bars over time; `label` says what the chart shows, for screen readers."""
    starts = [start for each in series for start, count in each.counts.items() if count]
    if not starts:
        return ""
    width = bin_width_ms(starts, finest_ms)
    first = min(starts) // width * width
    number = (max(starts) - first) // width + 1
    bins = [[0] * len(series) for _ in range(number)]
    for column, each in enumerate(series):
        for start, count in each.counts.items():
            bins[(start - first) // width][column] += count
    highest = max(map(sum, bins))
    bars = "".join(
        _stack(at, counts, highest, series, moment(first + at * width)) for at, counts in enumerate(bins) if any(counts)
    )
    ends = (
        (first, first + (number - 1) * width)
        if number < 12
        else (first, first + number // 2 * width, first + (number - 1) * width)
    )
    axis = "".join(f"<span>{moment(each, with_time=width < DAY_MS)}</span>" for each in dict.fromkeys(ends))
    shown = [each for each in series if any(each.counts.values())]
    legend = "".join(f'<span><i class="c-{each.colour}"></i>{escape(each.name)}</span>' for each in shown)
    narrow = f' style="max-width:{5 * number}rem"' if number < 12 else ""
    return (
        f'<figure class="chart"><div class="top"><span>{highest:,}</span>'
        f'<span class="unit">most in one bar, a bar is {_width_text(width)}</span></div>'
        f'<svg{narrow} viewBox="0 0 {number} 100" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'{bars}</svg><div class="axis"{narrow}>{axis}</div><div class="legend">{legend}</div></figure>'
    )


def _stack(at: int, counts: Sequence[int], highest: int, series: Sequence[Series], when: str) -> str:
    top = 100.0
    parts = [
        f"<g><title>{when}: {', '.join(f'{n:,} {s.name}' for n, s in zip(counts, series, strict=True) if n)}</title>"
    ]
    for count, each in zip(counts, series, strict=True):
        if count:
            height = max(100.0 * count / highest, 0.6)
            top -= height
            parts.append(f'<rect class="c-{each.colour}" x="{at + 0.08:.2f}" y="{max(top, 0):.2f}" width="0.84" '
                         f'height="{height:.2f}"/>')  # fmt: skip
    return "".join((*parts, "</g>"))


def _width_text(width_ms: int) -> str:
    if width_ms == HOUR_MS:
        return "an hour"
    if width_ms < DAY_MS:
        return f"{width_ms // HOUR_MS} hours"
    return "a day" if width_ms == DAY_MS else f"{width_ms // DAY_MS} days"


class Bar(NamedTuple):
    """One bar of a list: what it is, how long, and the text after it."""

    name: str
    length: int
    text: str
    colour: str


def list_bars(bars: Sequence[Bar]) -> str:
    """Bars below each other, their names before them."""
    if not bars:
        return ""
    longest = max(bar.length for bar in bars) or 1
    rows = "".join(
        f'<div class="bar"><span class="name">{escape(bar.name)}</span><span class="track">'
        f'<i class="c-{bar.colour}" style="width:{max(100 * bar.length / longest, 0.4 if bar.length else 0):.1f}%"></i>'
        f'</span><span class="value">{escape(bar.text)}</span></div>'
        for bar in bars
    )
    return f'<div class="bars">{rows}</div>'
