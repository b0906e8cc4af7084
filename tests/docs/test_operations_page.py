"""docs/operations.md: a runbook for each error, extras as they are, and a restore drill that is run."""

import ast
import dataclasses
import json
import re
import subprocess
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from duelog.stats import SubscriptionStats
from tests.conftest import present
from tests.docs.code_blocks import run_commands
from tests.packaging.tree import FLOORS, ROOT, modules
from tests.tools.command_line import DUELOG, ok, run

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
RUNBOOKS = PAGE.partition("\n## Runbooks\n")[2].partition("\n## ")[0]
SOURCES = [path.read_text(encoding="utf-8") for floor in FLOORS for path in modules(ROOT / floor)]

INTERNAL = dict.fromkeys(("_AtPath", "_OfReplica"), "a base without errors of its own")
"""Errors that no operator can meet, and why."""


def errors() -> set[str]:
    """Every class under DuelogError, wherever it is defined."""
    bases = {
        node.name: {name.id for name in node.bases if isinstance(name, ast.Name)}
        for source in SOURCES
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = {"DuelogError"}
    while more := {name for name, own in bases.items() if own & found} - found:
        found |= more
    return found - {"DuelogError"}


def sections() -> dict[str, str]:
    """Name of an error to its runbook."""
    parts = re.split(r"^### (\w+)\n", RUNBOOKS, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_error_has_its_runbook() -> None:
    """Each says what is seen, what it comes from and what to do; and no runbook is of an error that is gone."""
    assert INTERNAL.keys() <= errors()
    assert sorted(sections()) == sorted(errors() - INTERNAL.keys())
    form = re.compile(r"\n- \*\*Seen\*\*: .+?\n- \*\*Cause\*\*: .+?\n- \*\*Do\*\*: .+?", re.DOTALL)
    assert [name for name, text in sections().items() if form.match(text) is None] == []


def test_what_a_runbook_quotes_is_what_the_error_says() -> None:
    """Words in backticks under "Seen" stand in the sources; `Spark: ` and the like with what follows them."""
    code = "\n".join(re.sub(r'"\n\s*f?"', "", source) for source in SOURCES)
    quoted = [
        (name, each)
        for name, text in sections().items()
        for each in re.findall(r"`([^`]+)`", text.partition("- **Cause**")[0])
        if not each.startswith(("duelog ", "--", "errno"))
    ]
    assert len(quoted) > 10
    assert [each for each in quoted if each[1] not in code] == []


def test_every_extra_is_named() -> None:
    """Those that users install; what developing and building the documents need is elsewhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = PAGE.partition("\n## Install\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(project["optional-dependencies"].keys() - {"dev", "docs"})


def test_the_restore_drill_brings_back_what_was_there_at_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands in order, each with status 0; afterwards the store is as of the backup, and sound."""
    monkeypatch.chdir(tmp_path)
    assert run_commands(PAGE) > 4
    before = [json.loads(line) for line in ok("scheduled", "data.before", "reminders", "--json").splitlines()]
    restored = [json.loads(line) for line in ok("scheduled", "data", "reminders", "--json").splitlines()]
    assert [len(_flat(each)) for each in (before, restored)] == [2, 1]
    assert ok("check", "data", "--deep") == ""


def _flat(lines: list[object]) -> list[object]:
    """The JSON that a command printed, on one line or several."""
    return [each for line in lines for each in (line if isinstance(line, list) else [line])]


def instructions() -> dict[str, list[str]]:
    """The Docker file's lines by their first word."""
    (block,) = re.findall(r"^```dockerfile\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    found: dict[str, list[str]] = {}
    for line in block.splitlines():
        word, _, rest = line.partition(" ")
        found.setdefault(word, []).append(rest)
    return found


def test_what_the_docker_file_names_is_there() -> None:
    """The version of Python, the package and its extra, the user, and a volume that this user may write."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = instructions()
    assert lines.keys() == {"FROM", "RUN", "USER", "VOLUME", "ENV", "ENTRYPOINT"}
    (image,), (run_,), (user,), (volume,) = (lines[each] for each in ("FROM", "RUN", "USER", "VOLUME"))
    version = present(re.fullmatch(r"python:(3\.\d+)-slim", image))
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]
    installed = present(re.search(r"pip install --no-cache-dir '(\w+)\[(\w+)\]'", run_))
    assert installed[1] == project["name"]
    assert installed[2] in project["optional-dependencies"]
    assert re.search(rf"useradd --uid \d{{5}} {user}\b", run_)
    assert run_.endswith(f"install -d -o {user} {volume}")  # else the volume is root's, and no store can be made
    assert all(re.fullmatch(r"[A-Z_]+=\d+", each) for each in lines["ENV"])


def test_the_docker_files_command_serves_a_store_and_its_health(tmp_path: Path) -> None:
    """Run as printed, but for the place and the ports; SIGTERM reaches it and ends it in order."""
    (entry,), (volume,) = instructions()["ENTRYPOINT"], instructions()["VOLUME"]
    program, *arguments = json.loads(entry)  # the form without a shell
    assert (program, arguments[0]) == ("duelog", "serve")
    assert arguments[1].startswith(f"{volume}/")
    assert arguments[arguments.index("--http") + 1] == "8080"
    arguments[arguments.index("--http") + 1] = "0"
    arguments[1] = str(tmp_path / "store")
    with subprocess.Popen([*DUELOG, *arguments, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            said = [present(process.stdout).readline() for _ in range(2)]
            found = re.search(r"http://[^:]+:(\d+)", said[1])
            assert found is not None, said
            health = f"http://localhost:{found[1]}/admin/v2/brokers/health"
            assert health.partition(found[1])[2] in PAGE
            with urllib.request.urlopen(health, timeout=20) as answer:
                assert answer.status == 200
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert run("check", tmp_path / "store").exit_code == 0


def test_the_table_of_sizes_is_what_its_command_prints() -> None:
    """The same columns, by the command that the page names."""
    values: dict[str, Any] = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "benchmarks" / "sizing.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("DAYS", "HEAD")
    }
    assert values["HEAD"] in PAGE
    rows = re.findall(r"^\| (\d+) \|(?: [\d,]+ \|){6}$", PAGE, re.MULTILINE)
    assert [int(days) for days in rows] == list(values["DAYS"])


def test_the_figures_and_commands_of_the_page_are_there() -> None:
    """Fields of a subscription's figures, and each `duelog COMMAND` that a sentence names."""
    table = PAGE.partition("\n## Diagnose problems without an error\n")[2].partition("\n## ")[0]
    fields = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))) - {
        "max_in_flight",
        "pending",
    }
    assert fields <= {each.name for each in dataclasses.fields(SubscriptionStats)}
    assert len(fields) > 5
    commands = {tuple(each.split()) for each in re.findall(r"`duelog ((?:[a-z][a-z-]* ?)+)", PAGE)}
    assert len(commands) > 10
    for words in sorted(commands):
        done = run(*words, "--help")
        assert done.exit_code == 0, words
        assert f"Usage: duelog {' '.join(words)} " in done.stdout, words
