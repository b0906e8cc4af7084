"""CONTRIBUTING.md, docs/design.md and docs/testing.md name folders, attributes and wrong engines that there are."""

import ast
import re
from pathlib import Path

from tests.packaging.tree import FLOORS, ROOT, modules

DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
SECTION = (
    (ROOT / "docs" / "testing.md")
    .read_text(encoding="utf-8")
    .partition("\n## Wrong engines\n")[2]
    .partition("\n## ")[0]
)


def defined(module: Path) -> set[str]:
    """Classes, their methods, and functions of a module."""
    functions = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(module.read_text(encoding="utf-8"))
    outer = [node for node in tree.body if isinstance(node, functions)]
    inner = [(node, member) for node in outer for member in node.body if isinstance(member, functions)]
    return {node.name for node in outer} | {f"{node.name}.{member.name}" for node, member in inner}


MUTANTS = {name for path in (ROOT / "tests").rglob("*mutants.py") for name in defined(path)}


def test_the_design_names_no_attribute_that_is_not_there() -> None:
    """`Class.name` in backticks: the module that defines the class has the name."""
    sources = [path.read_text(encoding="utf-8") for floor in FLOORS for path in modules(ROOT / floor)]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", DESIGN)
    assert len(named) > 3
    for owner, name in named:
        defining = [source for source in sources if re.search(rf"^class {owner}\b", source, re.MULTILINE)]
        assert any(re.search(rf"\b{name}\b", source) for source in defining), f"{owner}.{name}"


def test_the_table_of_folders_has_every_floor_and_room() -> None:
    """Each folder of a floor that holds modules, floors in their order, and no other."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \| ", text, re.MULTILINE)
    folders = {str(module.parent.relative_to(ROOT)) for floor in FLOORS for module in modules(ROOT / floor)}
    assert sorted(rows) == sorted(folders)
    assert [row for row in rows if "/" not in row] == list(FLOORS)


def test_every_function_on_a_messages_way_exists() -> None:
    """In "Follow a message" each step names modules with classes or functions in them, and they are there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Follow a message\n")[2].partition("\n## ")[0]
    steps = ["Send", "Apply", "Fire", "Receive", "Acknowledge", "Recover"]
    assert re.findall(r"^- \*\*(\w+)\.\*\*", section, re.MULTILINE) == steps
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", section)
    assert len(named) > 10
    assert [(path, name) for path, name in named if name not in defined(ROOT / path)] == []


def test_every_wrong_engine_on_the_page_is_there() -> None:
    """Names with underscores in backticks are functions of the modules of mutants."""
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", SECTION))
    assert len(named) > 30
    assert named - MUTANTS == set()


def test_every_suite_of_wrong_engines_is_run_when_its_code_changes() -> None:
    """The table of `.ci/run` has each, and the places whose code it breaks."""
    table = re.search(r'^suites="\\\n(.*?)"$', (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert table is not None
    suites = {suite: places for suite, *places in map(str.split, table[1].splitlines())}
    assert [path for row in suites.items() for path in (row[0], *row[1]) if not (ROOT / path).exists()] == []
    marking = [path for path in (ROOT / "tests").rglob("test_*.py") if "wrong_engines(" in path.read_text("utf-8")]
    assert {str(path.relative_to(ROOT)) for path in marking if path != Path(__file__)} <= suites.keys()


def test_every_failpoint_on_the_page_is_reached() -> None:
    """Names with a dot in backticks are those that the code says to `reach`."""
    named = set(re.findall(r"`([a-z]+\.[a-z]+)`", SECTION))
    code = "".join(path.read_text(encoding="utf-8") for floor in FLOORS for path in modules(ROOT / floor))
    assert named
    assert named - set(re.findall(r'"([a-z]+\.[a-z]+)"', code)) == set()
