"""References lead somewhere: from code to a section of a document, from a document to a file or a section.

A section is named in one form, `docs/format.md, "Grammar"`: the document's path from the root, then the heading. The
document alone is enough where all of it is meant.
"""

import ast
import functools
import re
from itertools import groupby
from pathlib import Path

import pytest

from tests.conftest import present
from tests.packaging.tree import FLOORS, ROOT, modules

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(path for folder in ("docs", "docs/guide", "docs/site") for path in (ROOT / folder).glob("*.md")),
]
SOURCES = [path for folder in (*FLOORS, "tests", "benchmarks", "docs") for path in modules(ROOT / folder)]

REFERENCE = re.compile(r'([\w./-]+\.md)\b(?:, ("[^"]*"|[A-Z]\w*))?')
"""A document, and what follows it as a section: a heading in quotes, or a capitalised word that lacks them."""


def headings(document: Path) -> set[str]:
    """The headings of a document, without their marks."""
    return set(re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE))


@functools.cache
def prose(source: Path) -> list[str]:
    """Docstrings and runs of comment lines of a module, each with its lines joined by single spaces."""
    text = source.read_text(encoding="utf-8")
    if ".md" not in text and ".py" not in text:
        return []
    nodes = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    comments = [line.partition("# ")[2].strip() for line in text.splitlines()]
    runs = [" ".join(lines) for named, lines in groupby(comments, bool) if named]
    return [*(" ".join(each.split()) for each in docstrings), *runs]


def broken(name: str, section: str, folder: Path) -> str:
    """The fault of a reference made in `folder`; empty if it leads somewhere."""
    document = next((place / name for place in (ROOT, folder, folder.parent) if (place / name).is_file()), None)
    if document is None:
        return "there is no such document"
    if not section:
        return ""
    if not section.startswith('"'):
        return "a section stands in quotes"
    return "" if section.strip('"') in headings(document) else "there is no such section"


def test_every_document_and_section_that_code_names_exists() -> None:
    """Docstrings and comments of product, tests and benchmarks."""
    found = [
        (str(source.relative_to(ROOT)), match.group(0), broken(match.group(1), match.group(2) or "", source.parent))
        for source in SOURCES
        if source != Path(__file__)
        for text in prose(source)
        for match in REFERENCE.finditer(text)
    ]
    assert len(found) > 10
    assert [each for each in found if each[2]] == []


ELSEWHERE = {"contextlib.py", "threading.py", "query.py"}
"""Modules of Python, and a user's."""


def test_every_module_that_code_names_exists() -> None:
    """By its path from the root, or by its end: `firing.py` is `markers/firing/firing.py`."""
    paths = [f"/{path.relative_to(ROOT)}" for path in SOURCES]
    found = {
        (str(source.relative_to(ROOT)), name)
        for source in SOURCES
        for text in prose(source)
        for name in re.findall(r"(?<![\w/.])[\w/]+\.py\b", text)
    }
    assert len(found) > 50
    gone = [each for each in sorted(found) if not any(path.endswith(f"/{each[1]}") for path in paths)]
    assert [each for each in gone if each[1] not in ELSEWHERE] == []


@functools.cache
def names_of_tests() -> set[str]:
    """The names of the modules of tests, and of the tests in them."""
    modules_ = [source for source in SOURCES if source.stem.startswith("test_")]
    tests = (re.findall(r"def (test_\w+)", source.read_text(encoding="utf-8")) for source in modules_)
    return {source.stem for source in modules_}.union(*tests)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('docs/format.md, "Grammar"', ""),
        ("docs/format.md", ""),
        ('docs/format.md, "Grammars"', "there is no such section"),
        ("docs/format.md, Grammar", "a section stands in quotes"),
        ("docs/formats.md", "there is no such document"),
    ],
)
def test_a_reference_that_leads_nowhere_is_told(text: str, wrong: str) -> None:
    """By the document, by the section, and by the form."""
    match = present(REFERENCE.search(f"As said ({text})."))
    assert broken(match.group(1), match.group(2) or "", ROOT / "store") == wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    """A module is named by its path from the root, a test by its name; a link leads to a file, or a heading of it."""
    text = document.read_text(encoding="utf-8")
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)  # a program's own files
    named = set(re.findall(r"(?<![\w/.])[\w/]+\.py\b", without_code))
    assert set(re.findall(r"`(test_\w+)`", text)) <= names_of_tests()
    folders = set(re.findall(r"`((?:store|partitions|snapshot|markers|cleanup|duelog|tools|tests)/[\w/]*/)`", text))
    assert [name for name in sorted(named | folders) if not (ROOT / name).exists()] == []
    for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]*))?\)", text):
        page = document.parent / target if target else document
        assert page.is_file(), target
        assert not anchor or anchor in {
            re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings(page)
        }, anchor
