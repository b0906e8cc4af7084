"""The source tree as the packaging tests see it: the floors in their order, their packages and modules on disk.

Reads the disk and pyproject.toml only; knows nothing of what is installed, so that the tests can hold one against the
other. Links are never followed: a floor is its folder at the top of the repository.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

FLOORS = ("store", "partitions", "snapshot", "markers", "cleanup", "duelog", "broker", "tools")
"""Each may import those to its left."""

FACE = "duelog"


def project() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules(folder: Path) -> Iterator[Path]:
    """Every Python file under a folder, in order, links not followed."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from modules(path)
        elif path.suffix == ".py":
            yield path


def dotted(module: Path) -> str:
    """The name under which a module of a floor is imported: duelog/delivery/acks.py is duelog.delivery.acks."""
    parts = list(module.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == FACE else [FACE, *parts])


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module of `package` imports, by statement or by literal name.

    `from a.b import c` gives a.b.c, as c may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def packages() -> dict[str, Path]:
    """Every package on disk, by its installed name, with its folder."""
    return {
        dotted(module): module.parent
        for floor in FLOORS
        for module in modules(ROOT / floor)
        if module.name == "__init__.py"
    }


def installed_name(module: Path) -> str:
    """The path of a floor's file in a wheel: that of store/errors.py begins with duelog/."""
    relative = module.relative_to(ROOT)
    return str(relative if relative.parts[0] == FACE else Path(FACE, relative))
