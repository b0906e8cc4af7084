"""README.md does what it says: its code blocks run, its commands work, its links and figures are those of the code."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from duelog import DelayedStore, StoreConfig, Subscription, Topic
from duelog.store.codec.format import MAX_ENTRY_ID
from duelog.store.codec.message_fields import MAX_KEY_BYTES
from duelog.store.config import Durability
from tests.tools.command_line import run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def blocks(language: str) -> list[str]:
    """The fenced code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def after_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Runs every python block in order, in one namespace and one directory; returns the directory."""

    def run_all() -> Path:
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {}
        for block in blocks("python"):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, "README.md", "exec"), names)
            assert printed.getvalue().splitlines() == PRINTS.findall(block), block
        return tmp_path

    return run_all


def test_every_python_block_runs_and_prints_what_its_comments_say(after_python: Callable[[], Path]) -> None:
    """In order, in one directory; afterwards each store that they made has no finding."""
    directory = after_python()
    assert len(blocks("python")) >= 6
    stores = sorted(path.parent for path in directory.glob("*/STORE"))
    assert [path.name for path in stores] == ["data", "driven"]
    for path in stores:
        result = run("check", path, "--deep")
        assert (result.exit_code, result.stdout) == (0, "")


def test_every_command_of_the_readme_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in an empty directory, each with exit status 0."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("sh")
    commands = block.splitlines()
    assert len(commands) > 9
    for command in commands:
        if command.startswith("duelog "):
            words = subprocess.run(
                ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
            )
            result = run(*words.stdout.splitlines()[1:])
            assert result.exit_code == 0, (command, result.stderr)
        else:
            subprocess.run(["sh", "-c", command], check=True)


def test_the_targets_of_the_readme_are_in_the_makefile() -> None:
    """Every `make NAME` that the README mentions exists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z]+)", README)) - {"make"}
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test", "help"} <= named & targets
    words = {"the", "things"}
    assert named - words <= targets


def test_the_files_of_the_readme_exist() -> None:
    """Every path in backticks with a slash or an ending is in the repository."""
    paths = re.findall(r"`([a-z_]+/(?:[a-z_]+\.(?:py|md))?)`|\b(docs/[a-z]+\.md|CONTRIBUTING\.md)\b", README)
    found = {first or second for first, second in paths}
    assert len(found) > 8
    assert [path for path in sorted(found) if not (ROOT / path).exists()] == []


def test_the_limits_of_the_readme_are_those_of_the_code() -> None:
    """Figures that stand in both places."""
    config = StoreConfig()
    assert config.max_message_bytes == 5 << 20
    assert MAX_KEY_BYTES == 64 << 10
    assert MAX_ENTRY_ID + 1 == 2**32 - 1
    assert (config.ledger_max_entries, config.ledger_max_bytes) == (50_000, 64 << 20)
    assert config.ledger_max_age_ms == 4 * 3_600_000
    assert config.max_clock_jump_ms == 30 * 86_400_000
    assert (config.ack_flush_ms, config.partition_ms, config.durability) == (100, 86_400_000, "commit")


def test_the_durability_table_says_what_each_setting_loses() -> None:
    """A row for every setting, and of "none" the words that the configuration uses too."""
    assert re.findall(r'^\| `"(\w+)"`', README, re.MULTILINE) == list(get_args(Durability))
    assert (
        "everything: of 1,500 simulated power cuts half left an unusable file. For data that can be made again"
        in README
    )
    assert "For data that can be made again." in " ".join((StoreConfig.__doc__ or "").split())


def test_the_readme_names_no_method_that_is_not_there() -> None:
    """`store.x`, `topic.x`, `subscription.x` in backticks are attributes of the public classes."""
    owners: dict[str, type] = {"store": DelayedStore, "topic": Topic, "subscription": Subscription}
    named = re.findall(r"`(store|topic|subscription)\.([a-z_]+)", README)
    assert len(named) > 5
    assert [name for name in named if not hasattr(owners[name[0]], name[1])] == []


def test_every_function_on_a_messages_way_exists() -> None:
    """In "Follow a message" each step names modules with classes or functions in them, and they are there."""
    section = README.partition("## Follow a message\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(\w+)\.\*\*", section, re.MULTILINE) == [
        "Send",
        "Apply",
        "Fire",
        "Receive",
        "Acknowledge",
        "Recover",
    ]
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", section)
    assert len(named) > 10
    assert [each for each in named if each[1] not in defined(ROOT / each[0])] == []


def defined(module: Path) -> set[str]:
    """Classes, their methods, and functions of a module."""
    functions = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(module.read_text(encoding="utf-8"))
    outer = [node for node in tree.body if isinstance(node, functions)]
    inner = [(node, each) for node in outer for each in node.body if isinstance(each, functions)]
    return {node.name for node in outer} | {f"{node.name}.{each.name}" for node, each in inner}
