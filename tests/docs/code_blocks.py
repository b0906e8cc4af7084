"""The code blocks of a page, run as a reader runs them: in their order, in one directory, and then once more."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.broker.clients.conftest import ServedStore
from tests.packaging.tree import ROOT
from tests.tools.command_line import run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

_PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
_PROGRAM = re.compile(r"# (\w+\.py)\n")
_GUARDED = re.compile(r"(?:(test .*) \|\| )?(duelog .*)")


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def printed_lines(block: str) -> list[str]:
    """The lines that a block prints, as its comments say."""
    return _PRINTS.findall(block)


def programs(text: str) -> dict[str, str]:
    """The blocks that are whole programs, by the file name in their first line."""
    return {match[1]: block for block in blocks(text, "python") if (match := _PROGRAM.match(block))}


def run_python(text: str) -> None:
    """Run every python block but whole programs, in one namespace, in the current directory."""
    names: dict[str, Any] = {}
    for block in blocks(text, "python"):
        if not _PROGRAM.match(block):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, "page", "exec", dont_inherit=True), names)
            assert printed.getvalue().splitlines() == printed_lines(block), block


def run_commands(text: str) -> int:
    """Run every line of the sh blocks, in the current directory; how many are commands of duelog."""
    count = 0
    for line in "".join(blocks(text, "sh")).splitlines():
        guarded = _GUARDED.fullmatch(line)
        if guarded is None:
            subprocess.run(["sh", "-c", line], check=True)
            continue
        count += 1
        guard, command = guarded.groups()
        if guard is None or subprocess.run(["sh", "-c", guard], check=False).returncode:
            words = subprocess.run(
                ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
            )
            result = run(*words.stdout.splitlines()[1:])
            assert result.exit_code == 0, (command, result.stderr)
    return count


def run_programs(text: str, folder: Path) -> None:
    """Run the whole programs in their order, each as a process, beside `duelog serve`; twice."""
    broker = ServedStore(folder)
    broker.start()
    try:
        for _ in range(2):
            for name, program in programs(text).items():
                served = program.replace('"data"', repr(str(folder / "store")))
                (folder / name).write_text(served, encoding="utf-8")
                done = subprocess.run(
                    [sys.executable, name], cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=180
                )
                said = [line for line in done.stdout.splitlines() if " INFO " not in line]
                assert said == printed_lines(program)
        assert broker.stop() == 0
    finally:
        broker.kill()
