"""The command line as processes: beside a writing process, in a pipe, interrupted; and what its help says."""

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from duelog import Message
from duelog.tools.cli.cli_upkeep import init
from duelog.tools.cli.main import REGISTERED, main
from tests.duelog.writing_process import HOUR_MS, WritingProcess
from tests.tools.command_line import (
    DUELOG,
    FUTURE_MS,
    calendar,
    child,
    event,
    json_lines_of,
    make_store,
    ok,
    process,
    run,
)

COMMANDS = ["send", "receive", "import", "scheduled", "stats", "partitions", "check", "dump", "demo"]


# -- beside a writing process --------------------------------------------------------------------


@pytest.fixture
def written(path: Path) -> Iterator[Path]:
    """A store that another process has open for writing, with messages in it."""
    with WritingProcess(path) as writer:
        writer.do("subscribe", "t", "mailer")
        writer.send("t", "x", 0, 1_000, HOUR_MS, 5 * HOUR_MS)
        writer.do("advance", 2_000)
        yield path


@pytest.mark.parametrize(
    "command", ["stats {}", "stats {} t", "partitions {}", "scheduled {} t", "check {}", "dump {}"]
)
def test_looking_works_beside_a_writing_process(written: Path, command: str) -> None:
    """With the span that the store was made with, and without disturbing it."""
    done = child(*command.format(written).split(), "--json")
    assert (done.returncode, done.stderr) == (0, "" if command != "check {}" else done.stderr)
    assert all(json.loads(line) for line in done.stdout.splitlines())
    if command == "scheduled {} t":
        assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("send {} t x", "it takes no commands"),
        ("repair {}", "repair rewrites the files"),
        ("snapshot verify {}", "verify a backup"),
        ("snapshot rebuild {}", "end it first"),
        ("serve {} --port 0", "a broker has its store for itself"),
        ("drain {} --to pulsar://localhost:1", "copy with --keep"),
    ],
)
def test_a_command_that_needs_the_store_for_itself_says_why_in_one_line(written: Path, command: str, why: str) -> None:
    """Status 2, the path and the reason, no traceback; of commands that go over the socket, where there is none."""
    done = process(*command.format(written).split())
    assert (done.returncode, done.stdout) == (2, "")
    holder = r"process \d+ \(.*\)"
    taken = rf"duelog: {re.escape(str(written))}: another process has this store open for writing: {holder}; "
    assert re.match(taken, done.stderr)
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


# -- in a shell ----------------------------------------------------------------------------------


def test_a_pipe_that_closes_early_is_no_error(path: Path) -> None:
    """`duelog dump data | head` ends quietly, with the status of what SIGPIPE kills."""
    with make_store(path) as store:
        store.topic("t").send_batch([Message(b"y" * 40, deliver_at=FUTURE_MS + n) for n in range(5_000)])
    command = [*DUELOG, "dump", str(path), "--partition", "21000101T000000Z", "--entries"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        assert reading.stdout.readline()
        reading.stdout.close()
        assert reading.stderr.read() == ""
    assert reading.returncode == 141


def test_interrupting_a_waiting_receive_leaves_the_store_usable(path: Path) -> None:
    """Ctrl-C: status 130, no traceback, and the next process may write."""
    ok("send", "--create", path, "t", "x", "--at", FUTURE_MS)
    command = [*DUELOG, "receive", "--create", str(path), "t", "mailer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert "is new" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert "Traceback" not in waiting.stderr.read()
    assert waiting.returncode == 130
    assert json_lines_of("receive", "--create", path, "t", "mailer", "--timeout", 0) == []
    assert run("check", path).exit_code == 0


# -- help and version ----------------------------------------------------------------------------


def test_the_console_script_is_this_program_in_the_version_of_the_package() -> None:
    """`duelog` is installed and runs `duelog.tools.cli.main:main`."""
    (script,) = entry_points(group="console_scripts", name="duelog")
    assert script.load() is main
    assert ok("--version") == f"duelog {version('duelog')}\n"


def test_without_a_command_the_help_is_shown_with_status_2() -> None:
    """A usage error, with every command in it."""
    result = run()
    assert result.exit_code == 2
    shown = result.stdout + result.stderr
    assert all(command in shown for command in COMMANDS)


def test_every_command_has_help_with_an_example() -> None:
    """The first sentence, and a line that begins with `duelog` and the command."""
    for command in COMMANDS:
        shown = ok(command, "--help")
        assert f"duelog {command}" in shown
        assert "Usage:" in shown


DENTIST = event("UID:1@example.org", "DTSTART:20991201T090000Z", "SUMMARY:Dentist", alarms=[":-PT15M"])
APART = {"completion", "demo", "serve", "worker", "proxy", "drain", "move-namespace"}


def test_the_examples_of_the_help_are_accepted(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example, run in order in one directory, ends with status 0."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "messages.jsonl").write_text('{"topic": "reminders", "payload": "pay"}\n')
    (tmp_path / "operations.jsonl").write_text('{"operation": "put_document", "key": "order/17", "value": "paid"}\n')
    (tmp_path / "calendar.ics").write_text(calendar(DENTIST))
    assert run("init", "stores/a").exit_code == 0
    examples = []
    for registered in sorted(REGISTERED.values(), key=lambda each: getattr(each, "callback", None) is not init):
        text = getattr(getattr(registered, "callback", None), "__doc__", None) or ""
        examples += re.findall(r"^ *(duelog .*)$", text, re.MULTILINE)
    assert len(examples) >= len(COMMANDS)
    for example in sorted(examples, key=lambda example: "--parquet" in example):  # after the export that it reads
        arguments = shlex.split(example)[1:]
        if arguments[0] in APART or "--server" in arguments or "s3://" in example:  # tested on their own
            continue
        if arguments[0] == "receive":
            arguments = ["0" if argument == "1m" else argument for argument in arguments]
        result = run(*arguments)
        allowed = "there is none" if "20261201T000000Z" in example else ""
        status = int("17:3" in arguments or arguments[0] == "cancel")  # there is no such message
        assert result.exit_code == status or (allowed and allowed in result.stderr), (example, result.stderr)


@pytest.mark.parametrize(
    "command", ["nope", "send", "send {}", "stats {} --nope", "receive {} t s --max 0", "scheduled {} t --limit x"]
)
def test_a_wrong_command_line_exits_with_2_and_makes_nothing(path: Path, command: str) -> None:
    """Unknown commands and options, missing arguments, values of the wrong kind."""
    result = run(*command.format(path).split())
    assert result.exit_code == 2
    assert not path.exists()
