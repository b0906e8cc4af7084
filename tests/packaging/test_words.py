"""The sources speak the field's words: no name goes back to a private one, no sentence is about an unknown person.

docs/design.md has the terms of this domain; all others are those of LevelDB, RocksDB, Kafka and PostgreSQL.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.tree import FLOORS, ROOT, dotted, modules

SOURCES = [module for floor in FLOORS for module in modules(ROOT / floor)]

GONE = re.compile(
    r"(?:^|_)("
    r"settl\w*|"  # reserve, apply, pack, flush, reconcile
    r"promis\w*|ow(?:e|es|ed|ing)|"  # reserve, unapplied
    r"intake|journals?|"  # WAL, WAL writer, WAL replay, checkpoint
    r"serv(?:e|ed|es|ing)|leads?|shared_commits?|"  # group commit, leader
    r"asleep|awake|sheets?|"  # packed, unpacked, slab
    r"ahead|"  # preallocated, hidden, early, prefetched, on time
    r"behind|keep_pages|warm\w*|"  # eviction, prefetch
    r"waits|keeps?_back|readable|"  # visible, hidden, read limit
    r"set_aside|"  # quarantined
    r"giv\w*_up|gave_up|"  # trim, discard, skip
    r"holders?|"  # references
    r"room|"  # free space, preallocated space, capacity
    r"half_\w+|vouch\w*|crew|lent|lend|"  # partially loaded, validated, thread pool, worker
    r"seen"  # absorbed_end
    r")(?:_|$)"
)

ALLOWED = {
    "read_ahead": "a read-ahead is what the field calls it",
    "ReadAhead": "likewise",
    "ReadAheadBudget": "likewise",
    "look_ahead": "how many messages a look-ahead reads past those that it may hand out",
    "write_ahead_log": "a write-ahead log is what the field calls it",
    "WriteAheadLog": "likewise",
    "_lead": "the leader of a group commit leads",
    "serve": "a server serves",
    "cli_serve": "likewise",
    "serve_prometheus": "likewise",
}
"""Names that have such a word in the field's own sense."""

PERSONS = re.compile(r"\b(whoever|somebody|nobody|anybody|everybody)\b", re.IGNORECASE)


def names(module: Path) -> Iterator[str]:
    """The names of a module, its classes, functions and parameters."""
    yield module.stem
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def in_snake_case(name: str) -> str:
    """`LogReader` and `log_reader` alike."""
    return "_".join(part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name))


def prose(module: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and docstring."""
    source = module.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("module", SOURCES, ids=dotted)
def test_a_name_has_no_word_that_the_field_has_another_for(module: Path) -> None:
    """Of modules, classes, functions and parameters, as the whole name or a part of it."""
    found = {name for name in names(module) if GONE.search(in_snake_case(name))}
    assert found - ALLOWED.keys() == set()


def test_every_name_that_is_allowed_is_there() -> None:
    """An exception goes with its name."""
    assert ALLOWED.keys() - {name for module in SOURCES for name in names(module)} == set()


@pytest.mark.parametrize("module", SOURCES, ids=dotted)
def test_sentences_are_about_components_and_threads(module: Path) -> None:
    """No docstring and no comment has an unknown person in it."""
    assert [f"{line}: {found[0]}" for line, text in prose(module) if (found := PERSONS.search(text))] == []


@pytest.mark.parametrize("name", ["settle_ids", "AsleepBucket", "keep_pages", "_keeps_back", "set_aside", "RoomAhead"])
def test_a_word_is_found_wherever_it_stands_in_a_name(name: str) -> None:
    """Of a class too, and after an underscore."""
    assert GONE.search(in_snake_case(name))


@pytest.mark.parametrize("name", ["server", "leader", "leading_u32", "headroom_bytes", "seenable", "followed"])
def test_a_part_of_a_word_is_not_found(name: str) -> None:
    """The word has to stand between underscores."""
    assert GONE.search(in_snake_case(name)) is None
