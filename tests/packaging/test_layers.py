"""The order of the floors, held by reading every import in the source.

Every import counts, also one inside a function or under TYPE_CHECKING: the order says who may know of whom.
"""

import ast

import pytest

from tests.packaging.tree import FACE, FLOORS, ROOT, dotted, imported_names, modules

FLOOR_MODULES = [module for floor in FLOORS for module in modules(ROOT / floor)]


def floor_of(name: str) -> str | None:
    """The floor that a dotted name belongs to: the face if it is under duelog and no floor's, None if elsewhere."""
    parts = name.split(".")
    if parts[0] != FACE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else FACE


def wrong_imports(source: str, module: str, *, is_package: bool) -> list[str]:
    """Imports of a module from a floor to its right, or by a floor's bare name, one line each."""
    package = module if is_package else module.rpartition(".")[0]
    own = floor_of(module)
    assert own is not None
    found = []
    for line, name in imported_names(ast.parse(source), package):
        floor = floor_of(name)
        if floor is None:
            if name.split(".")[0] in FLOORS:
                found.append(f"{line}: {name}: a floor is imported as duelog.{name.split('.')[0]}")
        elif FLOORS.index(floor) > FLOORS.index(own):
            found.append(f"{line}: {name}: {own} may not import {floor}")
    return found


def test_imports_go_only_leftwards() -> None:
    """No module imports from a floor to the right of its own, nor by a bare name."""
    wrong = {
        dotted(module): found
        for module in FLOOR_MODULES
        if (
            found := wrong_imports(
                module.read_text(encoding="utf-8"), dotted(module), is_package=module.name == "__init__.py"
            )
        )
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("duelog.store.acks", "from ..markers import fire"),
        ("duelog.store.acks", "from .. import tools"),
        ("duelog.store.acks", "from .. import DelayedStore"),
        ("duelog.store.acks", "import duelog"),
        ("duelog.store.acks", "import duelog.partitions.index.delay_index as index"),
        ("duelog.store.acks", "from duelog.cleanup.trim import trim"),
        ("duelog.store.acks", "def f():\n    from ..snapshot import restore"),
        ("duelog.store.acks", "import importlib\nimportlib.import_module('duelog.tools.cli.main')"),
        ("duelog.store.acks", "import store.errors"),
        ("duelog.tools.cli.main", "from store import errors"),
        ("duelog.tools.spark.source", "from partitions.index import DelayIndex"),
        ("duelog.engine", "from .tools import cli"),
        ("duelog.store.__init__", "from ..tools import cli"),
    ],
)
def test_an_import_rightwards_is_seen(module: str, statement: str) -> None:
    """Each way of writing a forbidden import is found by the check above."""
    assert len(wrong_imports(statement, module, is_package=False)) == 1


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("duelog.store.acks", "from .errors import DuelogError"),
        ("duelog.store.acks", "from duelog.store.errors import DuelogError"),
        ("duelog.store.acks", "import numpy, lmdb"),
        ("duelog.markers.fire", "from ..partitions.index import DelayIndex"),
        ("duelog.tools.spark.source", "from ... import DelayedStore"),
        ("duelog.tools.spark.source", "from ..check import check"),
        ("duelog.engine", "from .topic import Topic"),
        ("duelog.engine", "from duelog.cleanup.trim import trim"),
        ("duelog.store.__init__", "from .errors import DuelogError"),
    ],
)
def test_an_import_leftwards_is_allowed(module: str, statement: str) -> None:
    """The check above lets through what the order of the floors allows."""
    assert wrong_imports(statement, module, is_package=False) == []
