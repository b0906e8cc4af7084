"""Running the command line in the test's own process, and stores for it to look at."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.tools.cli.main import app

PAST_MS = 1_000_000_000_000
"""2001-09-09T01:46:40Z: due on every machine."""

DAY_MS = 86_400_000

DUELOG = [sys.executable, "-m", "duelog.tools.cli.main"]

FUTURE_MS = 4_102_444_800_000
"""2100-01-01T00:00:00Z: due on none."""


typer.testing._get_command = cache(get_command)  # type: ignore[attr-defined]
"""The commands are put together once, which takes longer than most of them."""


def run(*arguments: object, input: str | bytes | None = None) -> Result:
    """The result of `duelog` with these arguments; its stdout and stderr are apart."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def ok(*arguments: object, input: str | bytes | None = None) -> str:
    """Run `duelog`, whose exit status must be 0; its standard output."""
    result = run(*arguments, input=input)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def json_of(*arguments: object, input: str | bytes | None = None) -> Any:
    """The one JSON value that `duelog ... --json` prints."""
    return json.loads(ok(*arguments, "--json", input=input))


def json_lines_of(*arguments: object) -> list[dict[str, Any]]:
    """The JSON lines that `duelog ... --json` prints."""
    return [json.loads(line) for line in ok(*arguments, "--json").splitlines()]


def refused(*arguments: object, input: str | bytes | None = None) -> str:
    """Run `duelog`, which refuses with status 2, without a traceback, and prints nothing; its standard error."""
    result = run(*arguments, input=input)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`duelog` run to its end as a program."""
    command = [*DUELOG, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def child(*arguments: object, stdout: IO[str] | None = None) -> subprocess.CompletedProcess[str]:
    """`duelog` run to its end in a child of this process, which has imported all that it needs."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        forked = os.fork()
        if not forked:
            status: object = 1
            try:
                os.dup2((stdout or out).fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                app([str(argument) for argument in arguments], prog_name="duelog")
            except SystemExit as end:
                status = end.code
            except BaseException:
                traceback.print_exc()
            try:
                sys.stdout.flush()
            except OSError:
                status = 120  # as Python ends then
            sys.stderr.flush()
            os._exit(int(str(status or 0)))
        _, code = os.waitpid(forked, 0)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(
            list(map(str, arguments)), os.waitstatus_to_exitcode(code), out.read(), err.read()
        )


def flip(file: Path, wanted: bytes) -> None:
    """Flip a bit of some bytes wherever they are in a file that is not open: pages have earlier copies."""
    content = file.read_bytes()
    assert wanted in content
    file.write_bytes(content.replace(wanted, bytes([wanted[0] ^ 1]) + wanted[1:]))


def make_store(path: Path, **config: Any) -> DelayedStore:
    """An open store whose clock stands still in the past."""
    return DelayedStore.open(path, StoreConfig(**config), clock=ManualClock(PAST_MS))


def files(path: Path) -> dict[str, int]:
    """Every file under a path with its modification time, LMDB's lock files left out: readers write into them."""
    return {
        str(f.relative_to(path)): f.stat().st_mtime_ns for f in path.rglob("*") if f.is_file() and f.name != "lock.mdb"
    }


def event(*lines: str, alarms: Sequence[str] = ()) -> str:
    """An event of a calendar: its properties, and the triggers of its alarms."""
    reminders = [f"BEGIN:VALARM\nACTION:DISPLAY\nTRIGGER{alarm}\nEND:VALARM" for alarm in alarms]
    return "\n".join(["BEGIN:VEVENT", *lines, *reminders, "END:VEVENT"])


def calendar(*events: str) -> str:
    """A calendar of some events."""
    return "\n".join(["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//duelog//tests//EN", *events, "END:VCALENDAR", ""])
