"""docs/spark.md names the tables, columns and options that there are."""

import re
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from duelog.tools.columns.main_tables import TABLES
from duelog.tools.columns.scan_arrow import BODY_COLUMNS, MESSAGES
from duelog.tools.columns.scan_rows import USUAL
from duelog.tools.spark.source import _OPTIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading, up to the next."""
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def test_every_column_of_messages_is_described_with_its_type() -> None:
    """In the order of the schema."""
    rows = re.findall(r"^\| (`.*?) \| (\S+) \|", section("messages"), re.MULTILINE)
    columns = [(name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names)]
    kinds = {"string": "string", "int64": "bigint", "bool": "boolean", "binary": "binary"}
    assert columns == [(field.name, kinds.get(str(field.type), "map<string,string>")) for field in MESSAGES]


def test_every_column_of_the_other_tables_is_named() -> None:
    """Each of its own table."""
    others = section("The other tables")
    texts = dict(re.findall(r"^- `(\w+)`(.*?)(?=^- |\Z)", others, re.MULTILINE | re.DOTALL))
    texts["markers"] = section("markers")
    assert "columns of `messages`" in section("pending")
    assert set(texts) == set(TABLES) - {"messages", "pending"}
    for table, text in texts.items():
        assert set(TABLES[table].names) <= set(re.findall(r"`(\w+)`", text)), table


def test_every_option_is_described() -> None:
    """With the defaults that there are."""
    reading = section("Reading a store")
    assert set(_OPTIONS) - {"path", "paths"} == {
        name for names in re.findall(r"^\| (`.*?) \|", reading, re.MULTILINE) for name in re.findall(r"`(\w+)`", names)
    } - {"option"}
    assert f"{USUAL.entries:,} entries or {USUAL.bytes >> 20} MiB" in reading
    assert all(f"`{name}`" in reading for name in BODY_COLUMNS)
