"""An audit written down: as one JSON value, as a Parquet file for each table, as a page for people.

Names and columns of the tables are those of audit_tables.py. Parquet needs pyarrow, which the extra `arrow` brings; the
rest needs nothing.

The page is for readers new to duelog: every section says what it shows and what is good. Self-contained: no script, no
font, no image is loaded, so that it can be mailed and opened anywhere. Text of the store (topics, subscriptions,
reasons) is escaped. Light and dark by the reader's setting; it fits a phone: of a chart only the bars are SVG,
stretched to the width there is, and every text is HTML. Colours are classes (`c-...`) of STYLE.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from ...store.errors import short_names
from ...store.files.directory import write_file
from ..fleet import Outcome
from ..output import cell_text, printable, size_text
from ..values import iso_time, path_segment
from .audit_tables import CODES, DAY_MS, ERROR, HOUR_MS, TABLES, Audit, AuditFinding, RetentionRow

PARQUET_MISSING = "Parquet was left out: pyarrow is not installed (pip install 'duelog[arrow]')"


def as_json(audit: Audit) -> dict[str, Any]:
    """The audit as values that `json` takes: times in epoch ms, one list of rows for each table."""
    head: dict[str, Any] = {
        "store": audit.store,
        "source": audit.source,
        "as_of_ms": audit.as_of_ms,
        "taken_ms": audit.taken_ms,
        "group": audit.group,
        "group_ms": audit.group_ms if audit.group is not None else None,
        "disk_bytes": sum(audit.disk.values()),
        **{f"disk_{part}_bytes": size for part, size in audit.disk.items()},
    }
    return head | {name: [row._asdict() for row in getattr(audit, name)] for name in TABLES}


def write_report(audit: Audit, output: Path) -> bool:
    """Write audit.json, audit.html and <table>.parquet into `output`, made if need be; what has these names goes.

    False: Parquet was left out, as pyarrow is not there. Raises OSError.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_file(output / "audit.json", (json.dumps(as_json(audit)) + "\n").encode())
    write_file(output / "audit.html", page(audit).encode())
    try:
        import pyarrow  # noqa: F401 - whether it is there is the question
    except ImportError:
        return False
    for name, kind in TABLES.items():
        write_table(getattr(audit, name), kind, output / f"{name}.parquet")
    return True


def fleet_as_json(outcomes: Sequence[Outcome[Audit]]) -> dict[str, Any]:
    """The audits of several stores, and why others could not be audited."""
    unreadable = [{"store": each.name, "reason": each.reason} for each in outcomes if each.result is None]
    return {"stores": [as_json(each.result) for each in outcomes if each.result], "unreadable": unreadable}


def write_fleet_report(outcomes: Sequence[Outcome[Audit]], output: Path) -> bool:
    """Write the report of each store into `output`/store=<its path>, and each table of all of them into `output`.

    Those tables have the column `store` before the others, audit.json also says what could not be audited.
    False: Parquet was left out, as pyarrow is not there. Raises OSError.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_file(output / "audit.json", (json.dumps(fleet_as_json(outcomes)) + "\n").encode())
    found = [(each.name, each.result) for each in outcomes if each.result is not None]
    with_parquet = True
    for store, audit in found:
        with_parquet = write_report(audit, output / f"store={path_segment(store)}")
    for name, kind in TABLES.items() if with_parquet and found else ():
        rows = [(store, *row) for store, audit in found for row in getattr(audit, name)]
        write_table(rows, kind, output / f"{name}.parquet", more=("store",))
    return with_parquet


def write_table(
    rows: Sequence[tuple[object, ...]], kind: type[tuple[object, ...]], path: Path, *, more: tuple[str, ...] = ()
) -> None:
    """Rows of one of the tables as a Parquet file, an empty one with its columns too; `more`: texts before them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {int: pa.int64(), str: pa.string(), bool: pa.bool_()}
    hints = dict.fromkeys(more, str) | get_type_hints(kind)
    schema = pa.schema([(name, types[hint]) for name, hint in hints.items()])
    pq.write_table(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema), path)


STYLE = """
:root{--bg:#f6f6f4;--card:#fff;--text:#1c1f23;--soft:#5d646d;--line:#e2e2de;--blue:#2f6fb5;--green:#3b8e5d;
--amber:#c8862a;--grey:#a4a9b0;--red:#b93a32;--bad:#fbeae8;--so:#fcf3e2;--good:#e8f4ec}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1e2125;--text:#e6e7e9;--soft:#a0a7b0;--line:#33373d;
--blue:#5b9be0;--green:#5bb583;--amber:#dda350;--grey:#6d747d;--red:#e4756c;--bad:#3a2322;--so:#382e1c;--good:#1d3226}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:0 0 .3rem}
p{margin:.3rem 0 .7rem}
.soft{color:var(--soft);font-size:.92rem}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:1rem 1.1rem;margin:1rem 0}
section>p:first-of-type{max-width:46rem}
.verdict{font-size:1.1rem;font-weight:600;border-radius:.6rem;padding:.8rem 1.1rem;margin:1rem 0;
border-left:.4rem solid}
.verdict.good{background:var(--good);border-color:var(--green)}
.verdict.so-so{background:var(--so);border-color:var(--amber)}
.verdict.bad{background:var(--bad);border-color:var(--red)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:.8rem 1rem}
.tiles b{display:block;font-size:1.45rem;line-height:1.2;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.88rem;line-height:1.3;display:block}
.finding{border-left:.25rem solid;padding:.1rem 0 .1rem .8rem;margin:.9rem 0}
.finding.bad{border-color:var(--red)}
.finding.so-so{border-color:var(--amber)}
.finding p{margin:.15rem 0;overflow-wrap:anywhere}
.finding .address{margin-top:.6rem}
.address,td:first-child{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.85rem}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
ul{margin:.4rem 0;padding-left:1.2rem}
.chart{margin:.8rem 0 0}
.chart .top,.chart .axis{display:flex;justify-content:space-between;gap:1rem;color:var(--soft);font-size:.82rem}
.chart svg{display:block;width:100%;height:11rem;border-bottom:1px solid var(--soft);border-top:1px dashed var(--line)}
.chart .axis{min-width:15rem}
.chart .axis span:last-child{text-align:right}
.chart .axis span:nth-child(2):not(:last-child){text-align:center}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin-top:.5rem;font-size:.88rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin-right:.4em}
.c-blue{fill:var(--blue);background:var(--blue)}
.c-green{fill:var(--green);background:var(--green)}
.c-amber{fill:var(--amber);background:var(--amber)}
.c-grey{fill:var(--grey);background:var(--grey)}
.bars{display:grid;gap:.35rem;margin:.6rem 0}
.bar{display:grid;grid-template-columns:minmax(7rem,14rem) 1fr minmax(7.5rem,auto);gap:.7rem;align-items:center;
font-size:.92rem}
.bar .name{overflow-wrap:anywhere;line-height:1.25}
.bar .value{font-variant-numeric:tabular-nums;white-space:nowrap}
.track{display:block;height:1rem;background:var(--bg);border-radius:.2rem;overflow:hidden}
.track i{display:block;height:100%;border-radius:.2rem}
.wide{overflow-x:auto;margin-top:.8rem}
table{border-collapse:collapse;font-size:.88rem;width:100%}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top;
white-space:nowrap}
th{color:var(--soft);font-weight:600}
td:last-child:not(.number){white-space:normal;min-width:14rem}
summary{cursor:pointer;color:var(--blue);margin:.4rem 0}
.number{text-align:right;font-variant-numeric:tabular-nums}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1rem;margin:.4rem 0}
dt{font-weight:600}
dd{margin:0}
@media(max-width:34rem){
main{padding:.6rem}
section{padding:.8rem}
.bar{grid-template-columns:1fr auto;gap:.1rem .7rem;margin-bottom:.3rem}
.bar .track{grid-column:1/-1;grid-row:2;height:.8rem}
.chart svg{height:9rem}
dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:.5rem}
}
"""


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
    labelled = dict.fromkeys((0, number - 1) if number < 12 else (0, number // 2, number - 1))
    axis = "".join(f"<span>{moment(first + at * width, with_time=width < DAY_MS)}</span>" for at in labelled)
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


T = TypeVar("T")

MOST_ROWS = 20
OPEN_FINDINGS = 5
MOST_FINDINGS = 100
"""Findings of one kind: shown at once, and at all."""


def page(audit: Audit) -> str:
    """The page. Its length is bounded, however large the store: long tables are cut, and say so."""
    sections = (_verdict, _figures, _findings, _upcoming, _lateness, _retention, _held, _subscriptions, _dead_letters,
                _skew, _partitions, _words)  # fmt: skip
    title = f"Audit of {escape(printable(audit.store))}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{title}</title><style>{STYLE}</style></head><body><main>'
        f'<header><h1>{title}</h1><p class="soft">Judged as of {moment(audit.as_of_ms)} UTC'
        f"{'' if audit.as_of_ms == audit.taken_ms else f', made at {moment(audit.taken_ms)} UTC'}"
        f"{', from an export' if audit.source == 'export' else ''}{of_group(audit)}. All times are UTC.</p></header>"
        f"{''.join(section(audit) for section in sections)}</main></body></html>\n"
    )


def of_group(audit: Audit) -> str:
    """Where in the log the audit of a copy stands; empty: it is of something else."""
    return "" if audit.group is None else f", of group {audit.group} of the log, written by {iso_time(audit.group_ms)}"


def _section(title: str, explanation: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{explanation}</p>{''.join(content)}</section>"


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, total: int | None = None) -> str:
    """Columns that begin with `>` are numbers, aligned to the right."""
    head = "".join(f'<th class="{_aligned(column)}">{escape(column.lstrip(">"))}</th>' for column in columns)
    body = []
    for row in rows:
        cells = (
            f'<td class="{_aligned(column)}">{escape(cell_text(cell))}</td>'
            for column, cell in zip(columns, row, strict=True)
        )
        body.append(f"<tr>{''.join(cells)}</tr>")
    cut = "" if total is None or total <= len(body) else f'<p class="soft">The first {len(body)} of {total:,}.</p>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>{cut}'


def _aligned(column: str) -> str:
    return "number" if column.startswith(">") else ""


# -- what is wrong -------------------------------------------------------------------------------


def _verdict(audit: Audit) -> str:
    errors = sum(found.severity == ERROR for found in audit.findings)
    warnings = len(audit.findings) - errors
    kind, text = "good", "Nothing is wrong: no finding."
    if errors:
        also = f" {plural(warnings, 'warning')} too." if warnings else ""
        kind, text = "bad", f"{plural(errors, 'error')}: something is lost or wrong. Read the findings below.{also}"
    elif warnings:
        kind = "so-so"
        text = f"{plural(warnings, 'warning')}: nothing is lost; something is late, left over or held too long."
    return f'<p class="verdict {kind}">{text}</p>'


def _findings(audit: Audit) -> str:
    if not audit.findings:
        return ""
    explanation = (
        "Each is one problem: where it is, what it is, and what to do about it. <b>Errors</b> mean that messages are "
        "lost, doubled or in danger; <b>warnings</b> cost space or time only: what comes late, or is left over."
    )
    by_code: dict[str, list[AuditFinding]] = {}
    for found in sorted(audit.findings, key=lambda found: (found.severity != ERROR, found)):
        by_code.setdefault(found.code, []).append(found)
    return _section("Findings", explanation, *(_kind(code, found) for code, found in by_code.items()))


def _kind(code: str, found: Sequence[AuditFinding]) -> str:
    known = CODES[code]
    kind = "bad" if known.severity == ERROR else "so-so"
    number = f" \N{MULTIPLICATION SIGN} {len(found):,}" if len(found) > 1 else ""
    shown = "".join(map(_finding, found[:OPEN_FINDINGS]))
    more = "".join(map(_finding, found[OPEN_FINDINGS:MOST_FINDINGS]))
    folded = f"<details><summary>{len(found) - OPEN_FINDINGS:,} more</summary>{more}</details>" if more else ""
    left = len(found) - MOST_FINDINGS
    cut = f'<p class="soft">And {left:,} more in audit.json.</p>' if left > 0 else ""
    return (
        f'<article class="finding {kind}"><p><b>{escape(known.severity)}: {escape(code)}{number}</b></p>'
        f"<p>{_with_code(known.meaning[0].upper() + known.meaning[1:])}.</p>"
        f"<p>What to do: {_with_code(known.advice)}.</p>{shown}{folded}{cut}</article>"
    )


def _with_code(text: str) -> str:
    """Escaped; what stands between backticks is code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts))


def _finding(found: AuditFinding) -> str:
    entries = f" ({plural(found.entries, 'message')})" if found.entries > 1 else ""
    return f'<p class="address">{_text(found.address)}</p><p class="soft">{_text(found.message)}{entries}</p>'


# -- how much there is ---------------------------------------------------------------------------


def _figures(audit: Audit) -> str:
    messages, pending, overdue, fired, acknowledged = (
        sum(getattr(row, name) for row in audit.retention)
        for name in ("messages", "pending", "overdue", "fired", "acknowledged")
    )
    tiles = (
        (messages, "messages in partitions"),
        (pending - overdue, "pending: not due yet"),
        (overdue, "are due and have not fired"),
        (share(acknowledged, fired), "of what fired is acknowledged by every subscription"),
        (len(audit.partitions), "partitions"),
        (size_text(sum(audit.disk.values())), "on disk")
        if audit.disk
        else (size_text(sum(row.file_bytes for row in audit.partitions)), "on disk in partitions"),
        (len(audit.topics), "topics"),
        (len(audit.subscriptions), "subscriptions"),
    )
    shown = "".join(
        f"<div><b>{escape(cell_text(number))}</b><span>{escape(what)}</span></div>" for number, what in tiles
    )
    explanation = (
        "A store keeps messages until they are due, in one partition for each span of due time. When a message is due "
        "it <em>fires</em>: it goes into its topic's main log, from which every subscription gets it and acknowledges "
        "it. Overdue messages are normal while no process has the store open; else they should be few."
    )
    return _section("At a glance", explanation, f'<div class="tiles">{shown}</div>')


def _upcoming(audit: Audit) -> str:
    if not audit.ahead:
        return _section("What is still to come", "No message is pending.")
    counts = {row.hour_ms: row.messages for row in audit.ahead}
    total = sum(counts.values())
    peak_ms = max(counts, key=lambda hour: counts[hour])
    due = {hour: count for hour, count in counts.items() if hour + HOUR_MS <= audit.as_of_ms}
    later = {hour: count for hour, count in counts.items() if hour + HOUR_MS > audit.as_of_ms}
    explanation = (
        f"When the {plural(total, 'message')} that have not fired are due. The fullest hour begins at "
        f"{moment(peak_ms)} with {counts[peak_ms]:,} ({share(counts[peak_ms], total)}). Tall single bars are "
        "times at which much work comes at once. Partitions that are still written to were read while the audit ran, "
        "so this is as of then, not of one instant."
    )
    series = (Series("overdue", "amber", due), Series("to come", "blue", later))
    return _section("What is still to come", explanation, time_bars(series, HOUR_MS, "pending messages by due time"))


def _lateness(audit: Audit) -> str:
    bins = _sums((row.below_ms, row.markers) for row in audit.lateness)
    unknown = bins.pop(-1, 0)
    known = sum(bins.values())
    note = f" Of {plural(unknown, 'message')} it is not known: an older version wrote them." if unknown else ""
    if not known:
        return _section("How late messages fired", f"No firing whose time is known is in the main logs.{note}")
    punctual = sum(count for below_ms, count in bins.items() if 0 < below_ms <= 1_000)
    explanation = (
        f"How long after its due time each message that is still in the main logs fired: {share(punctual, known)} "
        "within a second. Good is everything at the top. Bars further down come from times when no process had the "
        f"store open, or could not keep up.{note}"
    )
    bars = []
    for below_ms in sorted(bins, key=lambda below_ms: (not below_ms, below_ms)):
        name = f"under {duration(below_ms)}" if below_ms else "longer"
        colour = "green" if 0 < below_ms <= 1_000 else "blue" if 0 < below_ms <= 60_000 else "amber"
        bars.append(Bar(name, bins[below_ms], f"{bins[below_ms]:,} · {share(bins[below_ms], known)}", colour))
    return _section("How late messages fired", explanation, list_bars(bars))


def _retention(audit: Audit) -> str:
    if not audit.retention:
        return _section("What is kept", "No partition holds a message.")
    explanation = (
        "The messages in partitions by the day they are due. Green is done and goes with its partition, or by "
        "<code>duelog compact</code>; amber has fired and some subscription has it to acknowledge; blue is pending. "
        "Much green or amber in old days is space that a slow subscription holds: see the next section."
    )
    kinds: tuple[tuple[str, str, Callable[[RetentionRow], int]], ...] = (
        ("acknowledged by every subscription", "green", lambda row: row.acknowledged),
        ("fired, not acknowledged by every subscription", "amber", lambda row: row.fired - row.acknowledged),
        ("pending", "blue", lambda row: row.pending),
        ("cancelled, moved or released", "grey", lambda row: row.messages - row.fired - row.pending),
    )
    series = [
        Series(name, colour, _sums((row.day_ms, count(row)) for row in audit.retention))
        for name, colour, count in kinds
    ]
    topics = _by_topic(audit)
    columns = ("topic", ">messages", ">size", "oldest", "newest", ">pending", ">fired", ">acknowledged", ">cancelled")
    table = _table(columns, topics[:MOST_ROWS], total=len(topics))
    return _section("What is kept", explanation, time_bars(series, DAY_MS, "messages by day"), table)


def _sums(counts: Iterable[tuple[T, int]]) -> Counter[T]:
    found: Counter[T] = Counter()
    for what, count in counts:
        found[what] += count
    return found


def _by_topic(audit: Audit) -> list[tuple[object, ...]]:
    topics: dict[str, RetentionRow] = {}
    for row in audit.retention:
        topics[row.topic] = topics[row.topic].plus(row) if row.topic in topics else row
    return [
        (short_names(row.topic), row.messages, size_text(row.payload_bytes), moment(row.oldest_due_ms),
         moment(row.newest_due_ms), row.pending, row.fired, row.acknowledged, row.cancelled)
        for row in sorted(topics.values(), key=lambda row: (-row.messages, row.topic))
    ]  # fmt: skip


# -- what holds it -------------------------------------------------------------------------------


def _held(audit: Audit) -> str:
    if not audit.held:
        return _section("What is held, and by what", "Every partition whose time has passed is gone.")
    partitions = {row.partition for row in audit.held}
    references = Counter((row.topic, row.subscription, row.reason) for row in audit.held)
    explanation = (
        f"{plural(len(partitions), 'partition')} whose time has passed cannot be deleted yet, and why. A "
        "<b>subscription</b> that is behind is the usual reason: have it receive and acknowledge, or remove it if "
        "it is not needed. That is normal operation and no finding; it becomes a worry when the bars grow from audit "
        "to audit."
    )
    bars = [
        Bar(_reference(*holder), count, plural(count, "partition"), "amber" if holder[2] == "subscription" else "grey")
        for holder, count in references.most_common(12)
    ]
    columns = ("partition", "topic", "reason", "subscription", ">behind", "explanation")
    rows = [
        (row.partition, short_names(row.topic), row.reason, row.subscription, row.behind, row.explanation)
        for row in audit.held[:MOST_ROWS]
    ]
    table = _table(columns, rows, total=len(audit.held))
    folded = f"<details><summary>Partition by partition</summary>{table}</details>"
    return _section("What is held, and by what", explanation, list_bars(bars), folded)


def _reference(topic: str, subscription: str, reason: str = "") -> str:
    return f"{printable(short_names(topic)) or 'the store'}: {printable(subscription) or reason}"


def _subscriptions(audit: Audit) -> str:
    title = "Subscriptions that are behind"
    if not audit.subscriptions:
        return _section(title, "No topic has a subscription: nothing is delivered.")
    behind = sorted((row for row in audit.subscriptions if row.backlog), key=lambda row: -row.backlog)
    if not behind:
        return _section(title, f"All {plural(len(audit.subscriptions), 'subscription')} have caught up.")
    explanation = (
        "How many messages each subscription has to acknowledge before it is done. Short bars, or none, are good: a "
        "long one is a receiver that is slow, stopped or forgotten."
    )
    bars = [
        Bar(_reference(row.topic, row.subscription), row.backlog,
            f"{row.backlog:,}" + (", paused" if row.paused else ""), "amber")
        for row in behind[:15]
    ]  # fmt: skip
    left = len(behind) - len(bars)
    cut = f'<p class="soft">{plural(left, "more subscription")} with a smaller backlog.</p>' if left else ""
    return _section(title, explanation, list_bars(bars), cut)


def _dead_letters(audit: Audit) -> str:
    title = "Dead letters"
    if not audit.dead_letters:
        return _section(title, "None is held: every message was delivered, or is still to be.")
    explanation = (
        "Messages whose deliveries all failed, by where they came from and why. `duelog dead-letters` lists them, "
        "delivers them again, or drops them."
    )
    most = sorted(audit.dead_letters, key=lambda row: -row.letters)
    bars = [
        Bar(_reference(row.topic, row.subscription), row.letters,
            f"{row.letters:,} ({printable(row.reason)}), since {moment(row.oldest_ms)} UTC", "amber")
        for row in most[:15]
    ]  # fmt: skip
    left = sum(row.letters for row in most[15:])
    cut = f'<p class="soft">{plural(left, "more letter")}.</p>' if left else ""
    return _section(title, explanation, list_bars(bars), cut)


def _skew(audit: Audit) -> str:
    topics = _sums((row.topic, row.messages) for row in audit.retention)
    days = _sums((row.day_ms, row.messages) for row in audit.retention)
    total = sum(topics.values())
    if not total:
        return ""
    (topic, most), (day_ms, in_day) = topics.most_common(1)[0], days.most_common(1)[0]
    explanation = (
        f"The largest of {plural(len(topics), 'topic')}, {_text(short_names(topic))}, has {share(most, total)} of all "
        f"messages; the largest of {plural(len(days), 'day')}, {moment(day_ms, with_time=False)}, has "
        f"{share(in_day, total)}. Even shares spread the work; one topic or day with most of them is where the store "
        "is busiest."
    )
    bars = [
        Bar(printable(short_names(name)), count, f"{count:,} · {share(count, total)}", "blue")
        for name, count in topics.most_common(12)
    ]
    left = len(topics) - len(bars)
    cut = f'<p class="soft">{plural(left, "smaller topic")} besides.</p>' if left else ""
    return _section("How evenly it is spread", explanation, list_bars(bars), cut)


def _partitions(audit: Audit) -> str:
    explanation = (
        "<b>open</b> partitions still take messages, <b>closed</b> ones do not and go without references. The last "
        "column is how much of each was read: all of it (<i>whole</i>), due times and sizes but no payload "
        "(<i>headers</i>, and <i>open</i>: as of the moment it was read), or nothing (<i>not read</i>)."
    )
    columns = ("partition", "state", ">topics", ">messages", ">pending", ">payloads", ">on disk", "read")
    rows = [
        (row.partition, row.state, row.topics, row.messages, row.pending, size_text(row.payload_bytes),
         size_text(row.file_bytes), row.scope)
        for row in audit.partitions[: 3 * MOST_ROWS]
    ]  # fmt: skip
    return _section("Partitions", explanation, _table(columns, rows, total=len(audit.partitions)))


def _words(audit: Audit) -> str:
    terms = (
        ("topic", "a named stream of messages"),
        ("subscription", "a named receiver of a topic; each gets every message once it is due"),
        ("partition", "a directory with the messages of all topics that are due in one span of time"),
        ("fire", "a message's time has come: a marker that points at it goes into its topic's main log"),
        ("main log", "what subscriptions read; it consists of ledgers, and the oldest go when all have passed them"),
        ("acknowledge", "a receiver is done with a message; it never gets it again"),
    )
    shown = "".join(f"<dt>{term}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms)
    return f"<section><h2>Words</h2><dl>{shown}</dl></section>"
