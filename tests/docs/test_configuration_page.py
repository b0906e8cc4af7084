"""docs/configuration.md is what the code makes of itself."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.packaging.tree import ROOT

SCRIPT = Path("docs/site/configuration.py")
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command that writes the page, of the copy of the documents under `root`."""
    command = [sys.executable, str(root / SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_page_is_current() -> None:
    """A setting, policy, default or meaning that changed is on it."""
    done = run(ROOT, "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_is_not_current_is_told_and_made_anew(tmp_path: Path) -> None:
    """The check names the command, which writes the page that the repository has."""
    shutil.copytree(ROOT / SCRIPT.parent, tmp_path / SCRIPT.parent)
    page = tmp_path / "docs" / "configuration.md"
    page.write_text(PAGE.replace("| `86400000` (1 d) |", "| `3600000` (1 h) |"), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != PAGE
    done = run(tmp_path, "--check")
    assert (done.returncode, "python docs/site/configuration.py" in done.stderr) == (1, True)
    assert run(tmp_path).returncode == 0
    assert page.read_text(encoding="utf-8") == PAGE


def test_every_setting_says_what_it_means() -> None:
    """No row without a meaning, and no number of ms, bytes or seconds without its unit."""
    assert len(ROWS) > 100
    assert [row[0] for row in ROWS if len(row) < 5 or not re.search(r"\w", row[4])] == []
    numbers = [row for row in ROWS if re.search(r"int|integer|number|float", row[1])]
    assert [row[0] for row in numbers if not row[3].strip()] == []
