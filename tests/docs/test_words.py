"""Documents speak of components and threads, in the words of docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_references import DOCUMENTS, SOURCES
from tests.packaging.tree import ROOT

GONE = (
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "whoever",
    "who asks",
    "asleep",
    "awake",
    "put to sleep",
    "crew",
    "half loaded",
    "intake",
    "journal",
    "set aside",
    "sets aside",
    "gave up",
    "give up",
    "gives up",
    "given up",
    "holders",
    "owed",
    "owes",
    "promised",
    "settle",
    "settled",
    "settling",
    "shared commit",
    "vouched",
)
"""Words that have a better one: a component or a thread as subject, reserve, apply, pack, quarantine, discard."""


def prose(document: Path) -> str:
    """The text of a document without code: names that callers and files have are not its words."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return " ".join(re.sub(r"`[^`]*`", "", text).split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_uses_no_word_that_has_a_better_one(document: Path) -> None:
    """Each word as a whole, in any case; names in backticks do not count."""
    found = re.findall(rf"\b({'|'.join(GONE)})\b", prose(document), re.IGNORECASE)
    assert found == []


JOURNAL = {
    "store/wal/older_wal.py": "the file of older versions",
    "cleanup/older_replay.py": "likewise",
    "docs/format.md": "likewise",
    "CHANGELOG.md": "settings that are gone",
    "benchmarks/peers/sqlite_peer.py": "a setting of SQLite",
}
"""Where the word that the write-ahead log once had still stands."""


def test_the_write_ahead_log_has_one_name() -> None:
    """In code, comments and documents, but for what older versions left and what other programs say."""
    about = {Path(__file__), ROOT / "tests" / "packaging" / "test_words.py"}
    found = {
        str(path.relative_to(ROOT))
        for path in {*DOCUMENTS, *SOURCES} - about
        if re.search("journal", path.read_text(encoding="utf-8"), re.IGNORECASE)
    }
    assert found == JOURNAL.keys()
