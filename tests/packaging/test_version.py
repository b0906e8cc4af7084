"""The version: one number, of the installed distribution."""

import tomllib
from importlib.metadata import version

import duelog
from tests.packaging.tree import ROOT


def test_the_package_says_the_version_that_is_installed() -> None:
    """And that is the one of pyproject.toml, which no other file repeats."""
    assert duelog.__version__ == version("duelog")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert duelog.__version__ == project["version"]
