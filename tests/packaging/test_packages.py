"""The folders on disk against what pyproject.toml installs of them; the version, the data, errors of their own."""

import ast
import gzip
import os
import tomllib
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version

import pytest

import duelog
from tests.packaging.tree import FACE, FLOORS, ROOT, dotted, modules, packages, project

SETUPTOOLS = project()["tool"]["setuptools"]


def test_every_package_on_disk_is_installed_and_no_other() -> None:
    """A package missing from `packages` works in an editable install and is silently missing from the wheel."""
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages())


def test_every_package_is_mapped_to_its_folder() -> None:
    """`package-dir` names the folder of every floor, and a nested package lies where its floor's mapping says."""
    mapping = SETUPTOOLS["package-dir"]
    assert set(mapping) <= set(packages())
    for name, folder in packages().items():
        mapped = name
        while mapped not in mapping:
            mapped = mapped.rpartition(".")[0]
        rest = name.removeprefix(mapped).replace(".", "/")
        assert ROOT / (mapping[mapped] + rest) == folder, name


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder of a floor that holds modules has an `__init__.py`: without one it would not be installed."""
    folders = {module.parent for floor in FLOORS for module in modules(ROOT / floor)}
    assert folders == set(packages().values())


def test_every_folder_at_the_top_is_a_floor_or_not_installed() -> None:
    """A new folder at the top that is a package is a floor of the design, with a place in its order."""
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found - {"tests", "benchmarks"} == set(FLOORS)


def test_every_command_has_a_module_behind_it() -> None:
    """A console script names a module that is there: pip installs a script for one that is not, too."""
    on_disk = {dotted(module) for floor in FLOORS for module in modules(ROOT / floor)}
    assert {target.partition(":")[0] for target in project()["project"]["scripts"].values()} <= on_disk


def test_the_face_is_a_real_package() -> None:
    """Spark's workers and zip imports need `duelog/__init__.py` as a file, and a checker needs `py.typed` beside it."""
    for name in ("__init__.py", "py.typed"):
        path = ROOT / FACE / name
        assert path.is_file()
        assert not path.is_symlink()


@pytest.mark.parametrize("floor", [floor for floor in FLOORS if floor != FACE])
def test_links_lead_from_the_face_to_the_floors(floor: str) -> None:
    """Where the checkout has links they are relative and lead to the floor of their name; it may have none."""
    link = ROOT / FACE / floor
    if os.path.lexists(link):
        assert link.is_symlink()
        assert os.readlink(link) == f"../{floor}"


def test_the_face_links_nothing_but_floors() -> None:
    """A link to anything else would be importable in a checkout and missing from the wheel."""
    links = {path.name for path in (ROOT / FACE).iterdir() if path.is_symlink()}
    assert links <= set(FLOORS) - {FACE}


def test_lint_bans_the_bare_name_of_every_floor() -> None:
    """From the repository's root `import store` succeeds and makes a second copy of every class in it."""
    banned = project()["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(FLOORS) - {FACE}


def test_the_package_says_the_version_that_is_installed() -> None:
    """And that is the one of pyproject.toml, which no other file repeats."""
    assert duelog.__version__ == version("duelog")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert duelog.__version__ == project["version"]


BARE = {"AssertionError", "LookupError", "KeyError", "IndexError", "RuntimeError", "Exception"}


def wrong(tree: ast.AST) -> list[int]:
    """Lines of statements that `python -O` would drop, or that raise an error which says nothing of the store."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Raise) and {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & BARE)
    ]


def test_a_broken_invariant_is_raised_as_one() -> None:
    """No assertion and no bare error in the product: BrokenInvariant asks for a report, the others name their facts."""
    sources = [module for floor in FLOORS for module in modules(ROOT / floor)]
    found = {dotted(module): lines for module in sources if (lines := wrong(ast.parse(module.read_text("utf-8"))))}
    assert found == {}


def test_an_assertion_and_a_bare_error_would_be_found() -> None:
    """The test above looks where it should."""
    assert wrong(ast.parse("assert it\nraise KeyError\nraise LookupError('it') from None\nraise ValueError")) == [
        1,
        2,
        3,
    ]


DAY_S = 86_400


def test_the_delays_are_what_their_description_says() -> None:
    """Every number in the description of the delays is what the file gives."""
    with gzip.open(ROOT / "tools" / "demo" / "data" / "git-delays.tsv.gz", "rt", encoding="ascii") as lines:
        rows = [line.rstrip("\n").split("\t") for line in lines]
    pairs = [(int(written), int(due)) for written, due, _ in rows]
    sharing = [count for count in Counter(due for _, due in pairs).values() if count > 1]
    assert pairs == sorted(pairs)
    assert {len(commit) for _, _, commit in rows} == {12}

    stated = [
        f"{len(pairs):,} pairs of times",
        f"{datetime.fromtimestamp(pairs[0][0], UTC):%Y-%m-%d} to {datetime.fromtimestamp(pairs[-1][0], UTC):%Y-%m-%d}",
        f"{sum(due > written for written, due in pairs):,} are due after they were written",
        f"{sum(due > written + DAY_S for written, due in pairs):,} of them by more than a day",
        f"{sum(due > written + 7 * DAY_S for written, due in pairs):,} by more than a week",
        f"delay is {max(due - written for written, due in pairs) // DAY_S:,} days",
        f"{sum(due == written for written, due in pairs):,} are due in the second they were written",
        f"{sum(due < written for written, due in pairs):,} before it",
        f"{len({due // DAY_S for _, due in pairs}):,} different days",
        f"delayed ones on {len({due // DAY_S for written, due in pairs if due > written}):,}",
        f"{sum(sharing):,} share their due second with another, {max(sharing)} at most",
    ]
    text = " ".join((ROOT / "tools" / "demo" / "data" / "README.md").read_text(encoding="utf-8").split())
    assert [phrase for phrase in stated if phrase not in text] == []
