"""The folders on disk against what pyproject.toml installs of them; the version, the data, errors of their own."""

import ast
import os
import tomllib
from importlib.metadata import version

import duelog
from tests.packaging.tree import FACE, FLOORS, ROOT, dotted, modules, packages, project

SETUPTOOLS = project()["tool"]["setuptools"]


def test_every_package_on_disk_is_installed_from_its_folder_and_no_other() -> None:
    """One that is missing from `packages` or has no `__init__.py` works in an editable install alone."""
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages())
    mapping = SETUPTOOLS["package-dir"]
    assert set(mapping) <= set(packages())
    for name, folder in packages().items():
        mapped = name
        while mapped not in mapping:
            mapped = mapped.rpartition(".")[0]
        rest = name.removeprefix(mapped).replace(".", "/")
        assert ROOT / (mapping[mapped] + rest) == folder, name
    folders = {module.parent for floor in FLOORS for module in modules(ROOT / floor)}
    assert folders == set(packages().values())
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"} == set(FLOORS)


def test_every_command_has_a_module_behind_it() -> None:
    """A console script names a module that is there: pip installs a script for one that is not, too."""
    on_disk = {dotted(module) for floor in FLOORS for module in modules(ROOT / floor)}
    assert {target.partition(":")[0] for target in project()["project"]["scripts"].values()} <= on_disk


def test_the_face_links_floors_and_nothing_else() -> None:
    """Links may be missing (a source archive, a system without them), but never lead elsewhere or be copies."""
    links = {path.name: path.is_symlink() and os.readlink(path) for path in (ROOT / FACE).iterdir()}
    assert {name: target for name, target in links.items() if target or name in FLOORS} == {
        name: f"../{name}" for name in FLOORS if name in links
    }


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
    found_here = wrong(ast.parse("assert it\nraise KeyError\nraise LookupError('it') from None\nraise ValueError"))
    assert found_here == [1, 2, 3]
