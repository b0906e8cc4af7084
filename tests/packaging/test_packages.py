"""The folders on disk against what pyproject.toml installs of them."""

import os

import pytest

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
