"""`duelog audit`: exit status and output; its forms: JSON and Parquet with every row, a page that stands alone."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.check.check_store import check_lateness
from duelog.tools.audit import audit_store
from duelog.tools.audit.audit_report import MOST_BINS, MOST_FINDINGS, Series, as_json, page, time_bars, write_report
from duelog.tools.audit.audit_tables import (
    CODES,
    DAY_MS,
    TABLES,
    Audit,
    DeadLetterRow,
    RetentionRow,
    finding,
    is_faulty,
)
from tests.audit.histories import damage, full
from tests.audit.planting import Victim, doubled_marker
from tests.conftest import HOUR_MS
from tests.duelog.writing_process import WritingProcess
from tests.tools.command_line import files, json_of, ok, refused, run


def test_a_healthy_store_gives_status_0_says_what_is_held_and_is_not_changed(healthy: tuple[Path, int]) -> None:
    """A partition that a slow subscription holds is in the table, and is no finding; no file is made or written."""
    path, now_ms = healthy
    before = files(path)
    text = ok("audit", path, "--as-of", now_ms)
    assert "held partitions: 16" in text
    assert "slow" in text
    ok("audit", path, "--headers", "--json")
    assert files(path) == before


def test_findings_give_status_1(healthy: tuple[Path, int], tmp_path: Path) -> None:
    """With a line for each: severity, code, address, message, advice."""
    shutil.copytree(healthy[0], tmp_path / "store")
    doubled_marker(Victim(tmp_path / "store", 1))
    result = run("audit", tmp_path / "store", "--as-of", healthy[1])
    assert result.exit_code == 1
    assert result.stdout.startswith(f"error: doubled-marker: {full('slow-1')}, partition ")
    assert sum(line.startswith("error: ") for line in result.stdout.splitlines()) == 1
    warnings = sum(line.startswith("warning: late: ") for line in result.stdout.splitlines())
    assert f"findings: {1 + warnings}\n" in result.stderr


def test_output_is_written_into_a_directory(healthy: tuple[Path, int], tmp_path: Path) -> None:
    """Made if need be; a second audit replaces what is there."""
    for _ in range(2):
        ok("audit", healthy[0], "--output", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "audit.html").read_text().startswith("<!doctype html>")
    assert damage(json.loads((tmp_path / "a" / "b" / "audit.json").read_text())["findings"]) == []
    now = ("--as-of", "2030-01-01T00:00Z")
    ok("audit", healthy[0], "--output", tmp_path, *now)
    made_at = re.compile(r"made at [^.,]*")
    assert made_at.sub("", ok("audit", healthy[0], "--html", *now)) == made_at.sub(
        "", (tmp_path / "audit.html").read_text() + "\n"
    )
    assert "--html" in refused("audit", healthy[0], "--html", "--json")
    assert "expected one store" in refused("audit", healthy[0], healthy[0], "--html")


def test_what_cannot_be_audited_is_refused(healthy: tuple[Path, int], tmp_path: Path) -> None:
    """A missing directory, none at all, a store and an export at once, what is none, output into the store."""
    assert "inside the store" in refused("audit", healthy[0], "--output", healthy[0] / "staging" / "report")
    assert not (healthy[0] / "staging" / "report").exists()
    assert "no export" in refused("audit", "--from-parquet", healthy[0])
    assert "no export" in refused("audit", "--from-parquet", tmp_path)
    assert "there is no such directory" in refused("audit", tmp_path / "none")
    assert "expected a store" in refused("audit")
    assert "expected a store" in refused("audit", tmp_path, "--from-parquet", tmp_path)
    assert "--as-of" in refused("audit", tmp_path, "--as-of", "soon")
    assert list(tmp_path.iterdir()) == []


def test_no_spark_is_loaded_without_asking_for_it(healthy: tuple[Path, int]) -> None:
    """Nor pyarrow, where no report is written."""
    code = (
        "import sys\nfrom duelog.tools.cli.main import app\n"
        f"try:\n    app(['audit', {str(healthy[0])!r}])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'pyspark', 'pyarrow', 'pandas', 'matplotlib'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_beside_a_process_that_has_the_store_open(tmp_path: Path) -> None:
    """Which goes on sending, firing, acknowledging, closing and deleting between audits."""
    with WritingProcess(tmp_path / "store", partition_ms=HOUR_MS, ledger_max_entries=20) as writer:
        writer.do("subscribe", "t", "slow")
        for turn in range(4):
            writer.do("send", "t", f"m{turn}", [1_000 * at for at in range(1, 40)])
            writer.do("send", "u", f"m{turn}", [HOUR_MS + 1_000 * at for at in range(1, 40)])
            writer.do("advance", HOUR_MS)
            found = json_of("audit", tmp_path / "store")
            assert damage(found["findings"]) == []
            assert sum(row["messages"] for row in found["retention"]) > 0
        writer.do("drain", "t", "slow")
        assert damage(json_of("audit", tmp_path / "store")["findings"]) == []


def test_the_help_says_which_findings_do_not_change_the_exit_status() -> None:
    """Those that `is_faulty` passes over."""
    told = " ".join(ok("audit", "--help").replace("│", " ").split())
    assert "overdue and late are shown, and do not change the exit status" in told
    findings = [finding(code, "topic", "message") for code in ("overdue", "late")]
    assert not is_faulty(Audit("store", 0, 0, "store", findings))


START_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
CONFIG = StoreConfig(partition_ms=HOUR_MS, background=False)
NAMES = [f"persistent://public/default/{name}" for name in ("late", "overdue")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One topic whose messages fired in time and, three of them, late; another with four that are to fire."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "s", CONFIG, clock=clock) as store:
        for delay in (10, 70, 100, 130):
            store.topic("late").send(b"x", deliver_after=delay)
        clock.advance(10_000)
        store.tick()
        clock.advance(180_000)  # the others are late by 60, 90 and 120 s
        store.tick()
        for delay in (60, 200, 300, 310):
            store.topic("overdue").send(b"x", deliver_after=delay)
        store.topic("late").send(b"x", deliver_after=7_200)
    return tmp_path / "s"


def found(path: Path, now_ms: int) -> list[tuple[str, str, str, int]]:
    """Severity, code, address and number of messages of an audit's findings, which `check` has too."""
    audit = audit_store(path, as_of_ms=now_ms)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(now_ms), read_only=True) as store:
        engine = store._engine
        checked = list(check_lateness(engine.storage.main, engine.storage.partitions, engine.clock.now_ms()))
        assert list(store.check()) == []
    of_check = [(each.severity, each.code, each.address, int(each.message.split()[0])) for each in checked]
    of_audit = [(each.severity, each.code, each.address, each.entries) for each in audit.findings]
    assert sorted(of_check) == sorted(of_audit)
    return of_audit


def test_what_fired_more_than_a_minute_late_or_has_been_due_for_so_long_is_a_warning(path: Path) -> None:
    """Late by 90, 120 and just 60 s, nothing else; due from the minute on, with the time since which it goes on."""
    assert found(path, START_MS + 190_000) == [("warning", "late", NAMES[0], 3)]
    due_ms = START_MS + 190_000 + 60_000
    assert [each[1] for each in found(path, due_ms + 59_999)] == ["late"]
    assert found(path, due_ms + 60_000)[1:] == [("warning", "overdue", NAMES[1], 1)]
    assert found(path, due_ms + 300_000)[1:] == [("warning", "overdue", NAMES[1], 3)]
    (overdue,) = [each for each in audit_store(path, as_of_ms=due_ms + 300_000).findings if each.code == "overdue"]
    assert overdue.message.startswith("3 have not fired, the oldest due since 2026-09-21T")


def test_the_page_is_not_green_over_them_and_the_exit_status_not_changed(path: Path) -> None:
    """Neither of `check`, which says whether there is damage, nor of `audit`; both print them, with their topics."""
    text = page(audit_store(path, as_of_ms=START_MS + 900_000))
    assert 'class="verdict so-so"' in text
    assert 'class="verdict good"' not in text
    assert "2 warnings" in text
    assert all(name in text for name in NAMES)
    shown = [json.loads(line) for line in ok("check", path, "--json").splitlines()]  # by the machine's clock
    assert ("warning", "late", NAMES[0]) in [(each["severity"], each["code"], each["address"]) for each in shown]
    assert {each["code"] for each in shown} <= {"late", "overdue"}
    assert "warning: overdue: " in ok("audit", path, "--as-of", START_MS + 900_000)


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
