"""README.md and docs/guide: each code block runs and prints what its comments say, also a second time."""

from pathlib import Path

import pytest

from tests.docs.code_blocks import PAGES, blocks, programs, run_commands, run_programs, run_python
from tests.tools.command_line import run

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
