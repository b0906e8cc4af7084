"""Another revision of duelog to measure: its tree in a git worktree of its own, with the benchmarks of today in it."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .options import ROOT


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision checked out: its short name and the folder."""

    name: str
    tree: Path


@contextmanager
def checked_out(revision: str) -> Iterator[Revision]:
    """The tree of `revision` inside the block. Raises SystemExit where git knows no such revision."""
    try:
        name = _git("rev-parse", "--short", "--verify", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"--against {revision}: {error.stderr.strip()}") from None
    parent = Path(tempfile.mkdtemp(prefix="duelog-against-"))
    tree = parent / name
    try:
        _git("worktree", "add", "--detach", str(tree), name)
        shutil.rmtree(tree / "benchmarks", ignore_errors=True)
        shutil.copytree(ROOT / "benchmarks", tree / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
        yield Revision(name, tree)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
        _git("worktree", "prune")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
