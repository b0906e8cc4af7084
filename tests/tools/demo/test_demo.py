"""The demo: what it counts is what the trace says, and it notices every kind of broken guarantee."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duelog import Message, MessageId, ReceivedMessage, Subscription, Topic
from duelog.tools.demo import demo_run as demo
from duelog.tools.demo.demo_run import DAY_MS, problems, replay_trace, run_demo
from duelog.tools.demo.demo_trace import Audit, Trace, load_trace
from tests.tools.command_line import refused


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Fifty messages of the trace: a third due at once or within the minute, a third by more than a day."""
    return load_trace()[77_263 : 77_263 + 50]


def made(pairs: list[tuple[int, int]]) -> Trace:
    """A trace of (written, due) in seconds, ordered by the first."""
    times = np.array(sorted(pairs), np.int64).reshape(-1, 2) * 1000
    return Trace(times[:, 0], times[:, 1], [f"{row:012x}" for row in range(len(pairs))])


def pending_counted(trace: Trace, now_ms: int) -> int:
    """Messages written and not due at a time, one by one."""
    return sum(
        written <= now_ms < due for written, due in zip(trace.written_ms.tolist(), trace.due_ms.tolist(), strict=True)
    )


def test_the_last_five_years_are_counted_back_from_the_last_message() -> None:
    """The default of the demo begins five years to the day before the trace ends."""
    whole = load_trace()
    recent = whole.last_years(5)
    assert (len(whole), len(recent)) == (81_966, 18_003)
    assert recent.written_ms[-1] == whole.written_ms[-1]
    assert (recent.written_ms[0] - whole.written_ms[-1]) // DAY_MS == -1826
    assert (whole.due_days(DAY_MS), recent.due_days(DAY_MS)) == (6_010, 1_377)


def test_an_audit_counts_what_is_not_of_the_trace() -> None:
    """A payload that was not sent, and one under another's key, are foreign and not received."""
    trace = made([(0, 5)])
    audit = Audit(trace)
    audit.received(9_000, [(b"nothing", "nothing"), (trace.ids[0].encode(), "another"), (trace.ids[0].encode(), None)])
    assert (audit.verdict().foreign, audit.verdict().lost) == (3, 1)


def test_a_slice_of_the_trace_goes_through_and_verifies(trace: Trace, tmp_path: Path) -> None:
    """Everything sent is received, the partitions it needs come and go, and the counts are the trace's own."""
    heard: list[int] = []
    figures, course = replay_trace(tmp_path / "store", trace, heard.append)
    assert problems(figures) == {}
    assert (figures["messages"], figures["delayed"]) == (50, sum((trace.due_ms > trace.written_ms).tolist()))
    assert heard == sorted(heard)
    assert heard[-1] == 100
    days = {due // DAY_MS for due in trace.due_ms[trace.delayed].tolist()}
    assert figures["partitions_created"] == figures["partitions_deleted"] == len(days) > 5
    assert figures["peak_pending"] == max(pending_counted(trace, int(now_ms)) for now_ms in trace.written_ms)
    assert figures["ledgers_trimmed"] > 0
    assert 0 < figures["end_disk_bytes"] <= figures["peak_disk_bytes"] == max(course.disk_bytes)
    assert course.times_ms == sorted(course.times_ms)
    assert len(course.times_ms) == len(course.pending) == len(course.disk_bytes)


Change = Callable[[list[Message]], list[Message]]


def change_sending(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Have every batch changed before the store gets it."""
    honest = Topic.send_batch

    def send_batch(topic: Topic, messages: Iterable[Message], *, allow_past: bool = False) -> list[MessageId]:
        return honest(topic, change(list(messages)), allow_past=allow_past)

    monkeypatch.setattr(Topic, "send_batch", send_batch)


def first_due(trace: Trace) -> str:
    """The delayed message that is due first: it may not come a millisecond before."""
    rows = np.flatnonzero(trace.delayed)
    return trace.ids[int(rows[np.argmin(trace.due_ms[rows])])]


def last_due(trace: Trace) -> str:
    """The message that is due last of all."""
    return trace.ids[int(np.argmax(trace.due_ms))]


def moved(name: str, by_ms: int) -> Change:
    """Have one message due by some ms later, or earlier."""

    def change(messages: list[Message]) -> list[Message]:
        for message in messages:
            if message.key == name:
                assert isinstance(message.deliver_at, int)
                message.deliver_at += by_ms
        return messages

    return change


@pytest.mark.parametrize(
    ("promise", "which", "plant"),
    [
        ("lost", first_due, lambda name: lambda messages: [message for message in messages if message.key != name]),
        ("double", first_due, lambda name: lambda messages: [m for m in messages for _ in range(1 + (m.key == name))]),
        ("early", first_due, lambda name: moved(name, -1)),
        ("late", last_due, lambda name: moved(name, 1)),
    ],
)
def test_a_store_that_breaks_one_guarantee_for_one_message_is_found_out(
    promise: str,
    which: Callable[[Trace], str],
    plant: Callable[[str], Change],
    trace: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One message less, one twice, one a millisecond early or late: counted as such, once."""
    change_sending(monkeypatch, plant(which(trace)))
    figures, _ = replay_trace(tmp_path / "store", trace)
    assert problems(figures)[promise] == 1


def test_messages_handed_out_in_another_order_are_found_out(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscription that hands out each batch backwards breaks the order and nothing else."""
    honest = Subscription.receive

    def receive(subscription: Subscription, *args: Any, **kwargs: Any) -> list[ReceivedMessage]:
        return honest(subscription, *args, **kwargs)[::-1]

    monkeypatch.setattr(Subscription, "receive", receive)
    figures, _ = replay_trace(tmp_path / "store", trace)
    assert list(problems(figures)) == ["disordered"]


@pytest.fixture
def short(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """The demo with a short trace, for what does not depend on its length."""
    part = trace[:12]
    monkeypatch.setattr(demo, "load_trace", lambda: part)
    return part


def test_the_demo_prints_its_figures_and_draws_them(
    short: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that verifies ends with status 0, a table on standard output, a PNG, and no store left behind."""
    plot = tmp_path / "plot.png"
    assert run_demo(None, plot=plot)
    printed = capsys.readouterr().out
    for name in ("messages", "partitions created", "peak of pending", "on disk at the end", "early", "lost", "double"):
        assert name in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_demo_as_json_is_one_value(short: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With json_ standard output is one JSON value, and a store that was named stays."""
    assert run_demo(tmp_path / "store", all_=True, plot=tmp_path / "plot.png", json_=True)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["messages"] == len(short)
    assert report["plot"] == str(tmp_path / "plot.png")
    assert (tmp_path / "store" / "STORE").exists()


def test_the_demo_fails_when_a_guarantee_is_broken(
    short: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lost message makes the exit status 1 and is in the figures."""
    name = first_due(short)
    change_sending(monkeypatch, lambda messages: [message for message in messages if message.key != name])
    assert not run_demo(None, plot=tmp_path / "plot.png", json_=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["lost"]) == (False, 1)


def test_the_demo_without_matplotlib_says_how_to_get_it(
    short: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where matplotlib is missing the figures are printed all the same."""
    monkeypatch.setitem(sys.modules, "duelog.tools.demo.demo_plot", None)
    assert run_demo(None, plot=tmp_path / "plot.png", json_=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["plot"] is None
    assert "pip install 'duelog[plot]'" in err
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["store", "--years", "0"], "--years"),
        (["full"], "STORE"),
        (["full/file"], "STORE"),
        (["store", "--plot", "none/plot.png"], "--plot"),
        (["store", "--plot", "full"], "--plot"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_anything_is_made(
    short: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    """No years, a directory with something in it, no place for the plot: status 2, with the value."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert named in refused("demo", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
