"""The forms of an audit: JSON and Parquet with every row, a page that stands alone and escapes its text."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.tools.audit import Audit, audit_store
from duelog.tools.audit.audit_report import MOST_BINS, MOST_FINDINGS, Series, as_json, page, time_bars, write_report
from duelog.tools.audit.audit_tables import CODES, DAY_MS, HOUR_MS, TABLES, DeadLetterRow, RetentionRow, finding

START_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
NASTY = '<script>alert("x")</script>&\x1b[2J'


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """An audit of a store whose subscription has a name to be escaped."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "s", StoreConfig(partition_ms=HOUR_MS, background=False), clock=clock) as store:
        store.topic("t").subscribe("<b>&").close()
        store.topic("t").send_batch([Message(b"x", deliver_after=60.0 * n) for n in range(1, 100)])
        clock.advance(HOUR_MS)
        store.tick()
    return audit_store(tmp_path / "s", as_of_ms=clock.now_ms())


class Tags(HTMLParser):
    """Which tags a page has, and whether they nest."""

    VOID = frozenset({"meta", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_json_and_parquet_have_every_row_of_every_table(audit: Audit, tmp_path: Path) -> None:
    """It comes back from `json` as it went in; an empty table keeps its columns."""
    parquet = pytest.importorskip("pyarrow.parquet")
    found = json.loads(json.dumps(as_json(audit)))
    assert found["as_of_ms"] == audit.as_of_ms
    assert write_report(audit, tmp_path / "out")
    for name, kind in TABLES.items():
        assert [kind(**row) for row in found[name]] == getattr(audit, name), name
        table = parquet.read_table(tmp_path / "out" / f"{name}.parquet")
        assert table.column_names == list(kind._fields), name  # type: ignore[attr-defined]
        assert [kind(**row) for row in table.to_pylist()] == getattr(audit, name), name


def test_without_pyarrow_the_rest_is_written(audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON and the page; the answer says that Parquet was left out."""
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert not write_report(audit, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.html", "audit.json"]


def test_the_page_loads_nothing_and_runs_nothing(audit: Audit) -> None:
    """No script, no link, no image; nothing with an address of somewhere else."""
    text = page(audit)
    parsed = Tags(text)
    assert not parsed.tags & {"script", "link", "img", "iframe", "object"}
    assert not parsed.attributes & {"src", "href", "onclick", "onload"}
    assert not re.search(r"https?:|url\(|@import", text)


def test_text_of_the_store_is_escaped(audit: Audit) -> None:
    """Whatever names and reasons hold: tags, quotes, control characters."""
    audit.store = NASTY
    audit.findings = [finding("lost", NASTY, NASTY, 2)]
    audit.retention = [row._replace(topic=NASTY) for row in audit.retention]
    audit.held = [row._replace(topic=NASTY, subscription=NASTY, explanation=NASTY) for row in audit.held]
    audit.subscriptions = [row._replace(topic=NASTY, subscription=NASTY) for row in audit.subscriptions]
    audit.dead_letters = [DeadLetterRow(NASTY, NASTY, NASTY, 3, START_MS, START_MS)]
    text = page(audit)
    assert "script" not in Tags(text).tags
    assert "\x1b" not in text


def test_every_section_says_what_it_shows(audit: Audit) -> None:
    """A sentence under each heading, also where there is nothing to show."""
    empty = Audit("nothing", START_MS, START_MS, "store")
    for each in (audit, empty):
        sections = re.findall(r"<section><h2>(.*?)</h2><(p|dl)>(.)", page(each))
        assert len(sections) >= 7
        assert page(each).count("<section>") == len(sections)


def test_the_verdict_is_of_the_worst_finding(audit: Audit) -> None:
    """Nothing, warnings, errors."""
    audit.findings = []
    assert 'class="verdict good"' in page(audit)
    audit.findings = [finding("leftover", "staging/x", "old")]
    assert 'class="verdict so-so"' in page(audit)
    audit.findings.append(finding("lost", "t", "gone"))
    assert 'class="verdict bad"' in page(audit)


def test_the_page_of_a_huge_store_stays_small(audit: Audit) -> None:
    """Thousands of topics, days and findings are cut, and it says so."""
    days = [RetentionRow(f"topic-{n % 3_000}", n * DAY_MS, 5, 5, 0, 1, 1, 0, 4, 2, 0, 0, 0) for n in range(9_000)]
    audit.retention = days
    audit.findings = [finding("lost", f"address {n}", "gone") for n in range(5_000)]
    text = page(audit)
    assert len(text) < 150_000
    assert f"And {5_000 - MOST_FINDINGS:,} more in audit.json" in text


def test_every_code_can_be_shown(audit: Audit) -> None:
    """Meaning and advice of each kind of finding."""
    audit.findings = [finding(code, "here", "so it is") for code in CODES]
    text = page(audit)
    assert [code for code in CODES if f": {code}" not in text] == []


@pytest.mark.parametrize("span", [1, 5, 59, 61, 400, 9_000])
def test_a_chart_has_a_bounded_number_of_bars_that_add_up(span: int) -> None:
    """Hours become days, weeks and more; no count is left out."""
    counts = {hour * 24 * HOUR_MS: 2 for hour in range(span)}
    text = time_bars([Series("a", "blue", counts)], DAY_MS, "bars")
    shown = [int(number.replace(",", "")) for number in re.findall(r": ([\d,]+) a</title>", text)]
    assert len(shown) <= MOST_BINS + 1
    assert sum(shown) == 2 * span
