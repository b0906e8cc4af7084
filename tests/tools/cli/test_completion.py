"""`duelog completion`: shells complete commands, options and values; by the parser itself, so that none is missing."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.tools.command_line import ok, refused


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
