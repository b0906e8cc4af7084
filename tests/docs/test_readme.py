"""README.md and the guide name what there is, with figures of the code; each code block runs, also a second time."""

import re
from pathlib import Path
from typing import get_args

import pytest

from duelog import DelayedStore, StoreConfig, Subscription, Topic
from duelog.store.config import SendDurability
from tests.docs.code_blocks import PAGES, blocks, programs, run_commands, run_programs, run_python
from tests.tools.command_line import run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_targets_of_the_readme_are_in_the_makefile() -> None:
    """Every `make NAME` that the README mentions exists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z]+)", README)) - {"make"}
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test", "help"} <= named & targets
    words = {"the", "things"}
    assert named - words <= targets


def test_the_readme_has_ten_limits_and_leads_to_each_page_of_the_guide() -> None:
    """A line for each limit; the guide's pages are linked by name."""
    limits = README.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- .*\.$", limits, re.MULTILINE)) == 10
    pages = [str(path.relative_to(ROOT)) for path in PAGES if path.parent.name == "guide"]
    assert [page for page in pages if f"]({page})" not in README] == []


def test_the_durability_table_says_what_each_setting_loses() -> None:
    """A row for every setting; the figures of "none" are those of docs/testing.md, its advice that of the code."""
    assert re.findall(r'^\| `"(\w+)"`', README, re.MULTILINE) == list(get_args(SendDurability))
    testing = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    ((states, bad),) = re.findall(r"^\| `none` \| (\d+) \| (\d+) \|", testing, re.MULTILINE)
    assert f"everything: of {states} simulated power cuts {bad} lost messages or left an unusable file." in README
    assert "For data that can be made again" in README
    assert "For data that can be made again." in " ".join((StoreConfig.__doc__ or "").split())


def test_no_page_names_a_method_that_is_not_there() -> None:
    """`store.x`, `topic.x`, `subscription.x` in backticks are attributes of the public classes."""
    owners: dict[str, type] = {"store": DelayedStore, "topic": Topic, "subscription": Subscription}
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    named = re.findall(r"`(store|topic|subscription)\.([a-z_]+)", text)
    assert len(named) > 20
    assert [name for name in named if not hasattr(owners[name[0]], name[1])] == []


TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in PAGES}


@pytest.mark.parametrize("page", [name for name, text in TEXTS.items() if blocks(text, "python")])
def test_every_python_block_of_a_page_runs_twice_in_one_directory(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, with the same output both times; afterwards the page's store has no finding."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run_python(TEXTS[page])
    for store in tmp_path.glob("*/STORE"):
        result = run("check", store.parent, "--deep")
        assert (result.exit_code, result.stdout) == (0, "")


@pytest.mark.parametrize("page", [name for name, text in TEXTS.items() if programs(text)])
def test_the_programs_of_a_page_run_twice_beside_duelog_serve(page: str, tmp_path: Path) -> None:
    """The web app sends and the worker receives; `duelog serve` then ends cleanly."""
    assert list(programs(TEXTS[page])) == ["web.py", "worker.py"]
    run_programs(TEXTS[page], tmp_path)


def test_every_command_of_the_guide_runs_twice_in_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, each with exit status 0."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run_commands(TEXTS["command-line"]) > 20


def test_no_page_has_a_code_block_that_is_not_run() -> None:
    """Fenced blocks are python or, on the page of the command line, sh; text is a picture."""
    fences = {(name, line) for name, text in TEXTS.items() for line in text.splitlines() if line.startswith("```")}
    assert {line for _, line in fences} == {"```", "```python", "```sh", "```text"}
    assert [name for name, line in fences if line == "```sh"] == ["command-line"]
    assert [name for name, line in fences if line == "```text"] == ["README"]
