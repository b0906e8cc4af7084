"""The command line as a whole: processes, pipes, help, completion, and names of options."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import typer

from duelog import Message
from duelog.tools.cli.cli_upkeep import init
from duelog.tools.cli.main import REGISTERED, app, main
from tests.conftest import HOUR_MS
from tests.duelog.writing_process import WritingProcess
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
    refused,
    run,
)

COMMANDS = ["send", "receive", "import", "scheduled", "stats", "partitions", "check", "dump", "demo"]


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


def test_the_console_script_is_this_program_in_the_version_of_the_package() -> None:
    """`duelog` is installed and runs `duelog.tools.cli.main:main`."""
    (script,) = entry_points(group="console_scripts", name="duelog")
    assert script.load() is main
    assert ok("--version") == f"duelog {version('duelog')}\n"


def test_every_command_is_in_the_help_and_has_help_with_an_example() -> None:
    """Without a command it is a usage error; an example is a line that begins with `duelog` and the command."""
    result = run()
    assert result.exit_code == 2
    shown = result.stdout + result.stderr
    assert all(command in shown for command in COMMANDS)
    for command in COMMANDS:
        shown = ok(command, "--help")
        assert f"duelog {command}" in shown
        assert "Usage:" in shown


DENTIST = event("UID:1@example.org", "DTSTART:20991201T090000Z", "SUMMARY:Dentist", alarms=[":-PT15M"])
APART = {"completion", "demo", "serve", "ui", "worker", "proxy", "drain", "move-namespace"}


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
        examples += re.findall(r"^ *\$ (duelog .*)$", text, re.MULTILINE)
    assert len(examples) >= len(COMMANDS)
    for example in sorted(examples, key=lambda example: "--parquet" in example):  # after the export that it reads
        arguments = shlex.split(example)[1:]
        if arguments[0] in APART or "--server" in arguments or "s3://" in example:  # tested on their own
            continue
        if arguments[0] == "receive":
            arguments = ["0" if argument == "1m" else argument for argument in arguments]
        result = run(*arguments)
        allowed = "has no directory" if "20261201T000000Z" in example else ""
        status = int("17:3" in arguments or arguments[0] == "cancel")  # there is no such message
        assert result.exit_code == status or (allowed and allowed in result.stderr), (example, result.stderr)


@pytest.mark.parametrize(
    "command", ["nope", "send", "send {}", "stats {} --nope", "receive {} t s --max 0", "scheduled {} t --limit x"]
)
def test_a_wrong_command_line_exits_with_2_and_makes_nothing(path: Path, command: str) -> None:
    """Unknown commands and options, missing arguments, values of the wrong kind."""
    assert run(*command.format(path).split()).exit_code == 2
    assert not path.exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_the_script(shell: str) -> None:
    """It says which command it completes; where the shell is installed it finds no fault in it."""
    script = ok("completion", shell)
    assert "_DUELOG_COMPLETE" in script
    assert "duelog" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "found"),
    [("duelog sub", "subscriptions"), ("duelog policies set data --max-d", "--max-delay"),
     ("duelog receive --type key", "key_shared"), ("duelog completion z", "zsh")],
)  # fmt: skip
def test_commands_options_and_values_are_completed(words: str, found: str) -> None:
    """Bash asks so."""
    asked = {"_DUELOG_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "from duelog.tools.cli.main import app; app(prog_name='duelog')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert found in done.stdout.splitlines()


def test_another_shell_is_refused_by_its_name() -> None:
    """With those that there are."""
    assert "'tcsh'" in refused("completion", "tcsh")


OPTIONS = {
    "--topic": "TOPIC", "--subscription": "SUBSCRIPTION", "--namespace": "NAMESPACE", "--key": "KEY",
    "--property": "NAME=VALUE", "--server": "URL", "--token": "TOKEN", "--tls-trust": "FILE",
    "--at": "TIME", "--after": "DURATION", "--from": "TIME", "--until": "TIME", "--for": "DURATION", "--due": "TIME",
    "--published": "TIME", "--older-than": "DURATION", "--timeout": "DURATION", "--ttl": "DURATION",
    "--retention": "DURATION", "--ack-timeout": "DURATION", "--backoff": "DURATION", "--max": "N", "--limit": None,
    "--json": None, "--create": None, "--all": None, "--dry-run": None, "--spark": None, "--replace": None,
}  # fmt: skip
"""The options that have one meaning for all, and what they take."""

OTHER_NAMES = {
    "--since", "--before", "--start-time", "--end-time", "--within", "--wait", "--age", "--max-messages", "--number",
    "--sub", "--subscription-name", "--topic-name", "--ns", "--url", "--host-url", "--auth", "--filter", "--yes",
    "--format", "--make", "--new", "--simulate", "--dedupe", "--expires",
}  # fmt: skip
"""Names that other tools have for these; here they are none."""

TWO_MEANINGS = {"--partition", "--output", "--to"}
"""A length of time of `init`, else the name of one; a file or a directory; a broker, a URL or a place in a log."""

WITHOUT_JSON = {"serve", "ui", "proxy", "worker", "completion", "table"}
"""They run until they are ended, print what is no answer, or write a file of another kind."""


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


NAMED = dict(commands(typer.main.get_command(app)))


def options(command: Any) -> dict[str, str | None]:
    """The names of each option of a command."""
    return {
        name: each.metavar
        for each in command.params
        if each.param_type_name == "option"
        for name in each.opts
        if name.startswith("--")
    }


def test_an_option_has_the_name_and_the_value_that_it_has_everywhere() -> None:
    """By the table; and no command calls it as other tools do."""
    found = {name: options(command) for name, command in NAMED.items()}
    assert {
        (name, each): taken
        for name, takes in found.items()
        for each, taken in takes.items()
        if OPTIONS.get(each, taken) != taken or each in OTHER_NAMES
    } == {}


def test_an_option_takes_the_same_in_every_command() -> None:
    """Those that are not in the table too."""
    taken: dict[str, set[str | None]] = defaultdict(set)
    for command in NAMED.values():
        for name, value in options(command).items():
            taken[name].add(value)
    assert {name for name, values in taken.items() if len(values) > 1} - TWO_MEANINGS == set()
    assert OPTIONS.keys() - taken.keys() == set()


def test_the_store_comes_first_then_the_topic_then_the_subscription() -> None:
    """And every command that answers can answer in JSON."""
    for name, command in NAMED.items():
        arguments = [each.metavar for each in command.params if each.param_type_name == "argument"]
        places = [each.strip("[].") for each in arguments if each.strip("[].") in ("STORE", "TOPIC", "SUBSCRIPTION")]
        assert places == ["STORE", "TOPIC", "SUBSCRIPTION"][: len(places)], name
        assert arguments[: len(places)] == [each for each in arguments if each.strip("[].") in places], name
        assert ("--json" in options(command)) == (name not in WITHOUT_JSON), name


def test_the_package_runs_as_the_command() -> None:
    """`python -m duelog` has the same commands, and its help names it so."""
    done = subprocess.run([sys.executable, "-m", "duelog", "send"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[0].split(" [")[0]) == (2, "Usage: python -m duelog send")
    shown = subprocess.run([sys.executable, "-m", "duelog", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"duelog {version('duelog')}\n"
