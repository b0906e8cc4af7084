"""`duelog worker MODULE:WORKER`: a program's worker from a shell; the one of README.md too."""

import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from duelog import DelayedStore
from tests.docs.code_blocks import blocks
from tests.packaging.tree import ROOT
from tests.tools.command_line import DUELOG, refused

MODULE = """
import duelog, os, sys
worker = duelog.Worker("data", name="mailer")
other = 5

@worker.task("reminders")
async def remind(message: duelog.ReceivedMessage) -> None:
    print(message.payload.decode(), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module `mails`, and a message for its worker; it is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mails", raising=False)
    (tmp_path / "mails.py").write_text(MODULE)
    with DelayedStore.open(tmp_path / "data") as store:
        store.topic("reminders").send(b"pay the bill")
    return tmp_path


@pytest.mark.parametrize("source", ["of its own", "README.md"])
def test_a_worker_from_a_shell_runs_until_it_is_told_to_stop(program: Path, source: str) -> None:
    """It does what is due; SIGTERM ends it with status 0, and what it did is acknowledged; it logs both, with times."""
    if source == "README.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        text = next(block for block in blocks(readme, "python") if "@worker.task" in block)
        (program / "mails.py").write_text(text)
    command, pipe = [*DUELOG, "worker", "mails:worker"], subprocess.PIPE
    with subprocess.Popen(command, cwd=program, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "pay the bill\n"
        running.send_signal(signal.SIGTERM)
        _, logged = running.communicate(timeout=60)
        assert running.returncode == 0
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO duelog.worker"
    begin, end = logged.splitlines()
    assert re.match(
        rf"{time}: worker mailer starts: duelog {version('duelog')}, store {program}/data: remind for", begin
    )
    assert re.match(rf"{time}: worker mailer ends after [\d.]+ s: 1 message acknowledged, 0 attempts failed", end)
    with DelayedStore.open(program / "data") as store:
        assert store.topic("reminders").subscription("mailer").stats().backlog == 0


NO_WORKERS: list[tuple[str, str]] = [
    ("mails", "expected the form"),
    ("mails:", "expected the form"),
    ("../mails:worker", "expected the form"),
    ("letters:worker", "no module 'letters'"),
    ("mails.sub:worker", "no module 'mails.sub'"),
    ("mails:nobody", "it is None"),
    ("mails:other", "it is 5"),
]


def test_what_is_no_worker_is_refused_in_one_line(program: Path) -> None:
    """With status 2, the value and why."""
    for target, reason in NO_WORKERS:
        said = refused("worker", target)
        assert re.fullmatch(rf"duelog: MODULE:WORKER='{re.escape(target)}': .*{re.escape(reason)}.*\n", said)
    assert "--log=" in refused("worker", "mails:worker", "--log", "loud")
