"""The order of the floors and the rooms on them, held by reading every import in the source.

Every import counts, also one inside a function or under TYPE_CHECKING: the order says who may know of whom.
"""

import ast
from collections import Counter
from functools import cache

import pytest

from tests.packaging.tree import FACE, FLOORS, ROOT, dotted, imported_names, modules

TWICE = {"errors", "__init__"}
"""Names that the public face shares with what stands behind it: duelog.errors."""

MAY_IMPORT: dict[str, set[str]] = {
    "store.files": {"store"},
    "store.codec": {"store"},
    "store.env": {"store", "store.files", "store.codec"},
    "store.log": {"store", "store.codec", "store.env"},
    "store.wal": {"store", "store.files", "store.codec", "store.env"},
    "store.policy": {"store", "store.codec", "store.env", "store.log"},
    "markers": {"markers.firing"},
    "topics": {"delivery"},
    "sending": {"topics"},
    "upkeep": {"sending", "topics"},
    "operations": {"", "upkeep", "topics", "sending"},
    "connected": {"", "operations", "sending", "topics"},
    "replica": {"", "sending"},
    "": {"connected", "operations", "delivery", "topics", "sending", "upkeep", "check", "workers", "replica"},
    "survey": {"upkeep"},
    "check": {"upkeep", "survey"},
    "workers": {"", "connected", "topics", "upkeep"},
    "aio": {"", "connected", "delivery", "sending"},
    "broker": {"broker.lookup", "broker.protocol"},
    "broker.admin": {"broker.listing", "broker.lookup", "broker.protocol", "broker.security"},
    "broker.consume": {"broker", "broker.lookup", "broker.protocol"},
    "broker.metrics": {"broker.consume", "broker.listing", "broker.produce", "broker.protocol"},
    "broker.produce": {"broker", "broker.lookup", "broker.protocol"},
    "broker.listing": {"broker", "broker.lookup", "broker.protocol", "broker.security"},
    "broker.lookup": {"broker.protocol", "broker.security"},
    "broker.operate": {"broker.admin", "broker.consume", "broker.lookup", "broker.metrics", "broker.produce",
                       "broker.protocol", "broker.tenancy"},
    "broker.cluster": {"broker", "broker.admin", "broker.listing", "broker.protocol", "broker.security",
                       "broker.server"},
    "broker.page": {"broker.admin", "broker.operate", "broker.protocol", "broker.security"},
    "broker.security": {"broker", "broker.protocol"},
    "broker.server": {"broker", "broker.admin", "broker.consume", "broker.listing", "broker.lookup", "broker.metrics",
                      "broker.operate", "broker.page", "broker.cluster", "broker.produce", "broker.protocol",
                      "broker.security", "broker.tenancy"},
    "broker.tenancy": {"broker.admin", "broker.listing", "broker.lookup", "broker.protocol", "broker.security"},
    "tools": {"tools.columns"},
    "tools.columns": {"tools"},
    "tools.transfer": {"tools", "tools.columns"},
    "tools.arrow": {"tools.columns", "tools.transfer"},
    "tools.repair": {"tools"},
    "tools.audit": {"tools", "tools.columns", "tools.transfer"},
    "tools.demo": {"tools"},
    "tools.spark": {"tools", "tools.audit", "tools.cli", "tools.columns", "tools.transfer"},
    "tools.cli": {"tools", "tools.arrow", "tools.audit", "tools.demo", "tools.repair", "tools.columns", "tools.spark",
                  "tools.transfer"},
}  # fmt: skip
"""Which rooms of its own floor a room may import; one that is not named, none. "" is the public face."""

MODULES = [module for floor in FLOORS for module in modules(ROOT / floor)]
BY_NAME = {dotted(module): module for module in MODULES}
ROOMS = {".".join(module.parent.relative_to(ROOT).parts).removeprefix(FACE).removeprefix(".") for module in MODULES}


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
        for module in MODULES
        if (
            found := wrong_imports(
                module.read_text(encoding="utf-8"), dotted(module), is_package=module.name == "__init__.py"
            )
        )
    }
    assert wrong == {}


RIGHTWARDS = [
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
]
LEFTWARDS = [
    ("duelog.store.acks", "from .errors import DuelogError"),
    ("duelog.store.acks", "from duelog.store.errors import DuelogError"),
    ("duelog.store.acks", "import numpy, lmdb"),
    ("duelog.markers.fire", "from ..partitions.index import DelayIndex"),
    ("duelog.tools.spark.source", "from ... import DelayedStore"),
    ("duelog.tools.spark.source", "from ..check import check"),
    ("duelog.engine", "from .topic import Topic"),
    ("duelog.engine", "from duelog.cleanup.trim import trim"),
    ("duelog.store.__init__", "from .errors import DuelogError"),
]


@pytest.mark.parametrize(
    ("module", "statement", "found"), [*((*each, 1) for each in RIGHTWARDS), *((*each, 0) for each in LEFTWARDS)]
)
def test_an_import_rightwards_is_seen_and_one_leftwards_is_allowed(module: str, statement: str, found: int) -> None:
    """Each way of writing an import is read by the check above."""
    assert len(wrong_imports(statement, module, is_package=False)) == found


@cache
def imports() -> dict[str, set[str]]:
    """By module, the dotted names of all that it imports, inside functions and under TYPE_CHECKING too."""
    return {
        name: {
            imported
            for _, imported in imported_names(
                ast.parse(module.read_text(encoding="utf-8")),
                name if module.name == "__init__.py" else name.rpartition(".")[0],
            )
        }
        for name, module in BY_NAME.items()
    }


def module_of(name: str) -> str | None:
    """The module that a dotted name is, or is in; None: it is none of the project's."""
    while name and name not in BY_NAME:
        name = name.rpartition(".")[0]
    return name or None


def room_of(name: str) -> str | None:
    """The room of the module that a dotted name is, or is in; None: it is no module of the project's."""
    module = module_of(name)
    if module is None:
        return None
    return ".".join(BY_NAME[module].parent.relative_to(ROOT).parts).removeprefix(FACE).removeprefix(".")


def test_a_room_imports_the_rooms_that_it_may_and_no_others() -> None:
    """Every import counts, also one inside a function or under TYPE_CHECKING."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for name in BY_NAME:
        room = str(room_of(name))
        others = {str(other) for other in map(room_of, imports()[name]) if other not in (None, room)}
        found[room] |= {other for other in others if floor_of(f"{FACE}.{other}") == floor_of(f"{FACE}.{room}")}
    assert {room: others for room, others in found.items() if others} == MAY_IMPORT


def test_no_two_modules_have_one_name() -> None:
    """A name says which module is meant, wherever it is read."""
    assert {name for name, count in Counter(module.stem for module in MODULES).items() if count > 1} == TWICE


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Modules can be read one after the other, each after all that it imports, also for its annotations."""
    left = {name: {module_of(each) for each in names} - {None, name} for name, names in imports().items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}
