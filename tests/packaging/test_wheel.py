"""The wheel, built for real and looked into: from a checkout, from one without links, from a source archive.

Each is built from a copy, so that nothing of the checkout's build/ comes into it and the checkout stays as it is.
"""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.tree import FACE, FLOORS, ROOT, installed_name, modules, packages


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command, which must succeed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_checkout(parent: Path) -> Path:
    """A copy of what the checkout holds under version control, links as links."""
    copy = parent / "checkout"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "node_modules"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


def copy_without_links(parent: Path) -> Path:
    """A copy of the checkout as it arrives where links cannot be made."""
    copy = copy_checkout(parent)
    for path in (copy / FACE).iterdir():
        if path.is_symlink():
            path.unlink()
    return copy


def unpack_source_archive(parent: Path) -> Path:
    """The source archive built from the checkout, unpacked."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", parent, cwd=copy_checkout(parent))
    (archive,) = parent.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(parent / "unpacked", filter="data")
    (unpacked,) = (parent / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module", params=[copy_checkout, copy_without_links, unpack_source_archive])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from each kind of source."""
    make_source: Callable[[Path], Path] = request.param
    parent = tmp_path_factory.mktemp("wheel")
    source = make_source(parent)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", parent / "wheels", source, cwd=parent)
    (built,) = (parent / "wheels").glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    """Every module of every floor under duelog/, the type marker, data and licence are there, no test or stray file."""
    expected = {installed_name(module) for floor in FLOORS for module in modules(ROOT / floor)}
    expected |= {installed_name(path) for path in (ROOT / "tools" / "demo" / "data").glob("*.gz")}
    expected |= {installed_name(path) for path in (ROOT / "broker" / "page" / "assets").glob("*")}
    expected |= {"duelog/py.typed"}
    with ZipFile(wheel) as archive:
        about = {name for name in archive.namelist() if ".dist-info/" in name}
        assert set(archive.namelist()) - about == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in about)


def test_every_package_imports_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Unpacked alone, with no checkout in sight, the wheel's packages import each other, and from the wheel."""
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import importlib, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]:\n"
        "    print(importlib.import_module(name).__file__)\n"
    )
    printed = run(sys.executable, "-I", "-c", program, tmp_path, *packages(), cwd=tmp_path)
    assert [Path(line).is_relative_to(tmp_path) for line in printed.splitlines()] == [True] * len(packages())


def test_the_source_archive_can_be_tested(tmp_path: Path) -> None:
    """A source archive holds the tests, what they are run with, and no link."""
    source = unpack_source_archive(tmp_path)
    paths = list(source.rglob("*"))
    assert not any(path.is_symlink() for path in paths)
    names = {str(path.relative_to(source)) for path in paths}
    assert {str(path.relative_to(ROOT)) for path in modules(ROOT / "tests")} <= names
    assert {"Makefile", "pyproject.toml", "LICENSE", ".ci/run"} <= names
