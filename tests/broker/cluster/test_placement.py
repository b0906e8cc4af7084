"""The placement table: who serves what, what is refused, a file that changes."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from duelog.broker.cluster.placement import (
    Address,
    Placement,
    PlacementFile,
    parse_placement,
    place_namespace,
    read_placement,
)
from duelog.store.errors import InvalidArgument

TABLE = """# where things are
default = "a"

[brokers.a]
url = "pulsar://localhost:6650"
tls_url = "pulsar+ssl://localhost:6651"
http_url = "http://localhost:8080/"
store = "stores/a"

[brokers.b]   # the second one
url = "pulsar+ssl://B.example.org:6651"

[tenants]
acme = "b"

[namespaces]
"acme/orders" = "a"  # the large one
"""


def test_a_namespace_counts_more_than_its_tenant_and_a_tenant_more_than_the_default(tmp_path: Path) -> None:
    """In both forms of the file."""
    (tmp_path / "p.toml").write_text(TABLE)
    table = read_placement(tmp_path / "p.toml")
    found = {each: table.owner(each) for each in ("acme/orders", "acme/other", "public/default")}
    assert {each: owner and owner.name for each, owner in found.items()} == {
        "acme/orders": "a", "acme/other": "b", "public/default": "a"
    }  # fmt: skip
    assert table.stores() == {"a": tmp_path / "stores/a"}
    assert (table.brokers["a"].http_url, table.brokers["b"].http_url) == ("http://localhost:8080", None)
    assert table.brokers["b"].address == Address("b.example.org", 6651, tls=True)
    assert str(table.brokers["b"].address) == "pulsar+ssl://b.example.org:6651"
    same = {
        "default": "a",
        "brokers": {"a": {"url": "pulsar://localhost:6650", "tls_url": "pulsar+ssl://localhost:6651",
                          "http_url": "http://localhost:8080", "store": "stores/a"},
                    "b": {"url": "pulsar+ssl://B.example.org:6651"}},
        "tenants": {"acme": "b"}, "namespaces": {"acme/orders": "a"},
    }  # fmt: skip
    assert parse_placement(json.dumps(same), tmp_path / "p.json") == table


def test_without_a_default_nobody_serves_what_is_not_named() -> None:
    """A namespace that no line means has no owner."""
    table = parse_placement('[brokers.a]\nurl = "pulsar://h:1"\n', Path("p.toml"))
    assert table.owner("public/default") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("default = 1", "brokers"),
        ("=", "placement"),
        ('brokers = "a"', "brokers"),
        ("[brokers.a]\n", "brokers.a.url"),
        ("[brokers]\na = 1", "brokers.a"),
        ('[brokers.a]\nurl = "http://h:1"', "brokers.a.url"),
        ('[brokers.a]\nurl = "pulsar://h:99999"', "brokers.a.url"),
        ('[brokers.a]\nurl = "pulsar://h:1"\ntls_url = "pulsar://h:2"', "brokers.a.tls_url"),
        ('[brokers.a]\nurl = "pulsar://h:1"\nhttp_url = "h"', "brokers.a.http_url"),
        ('[brokers.a]\nurl = "pulsar://h:1"\nhost = "h"', "brokers.a.host"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[brokers.b]\nurl = "pulsar://h:1"', "brokers.b.url"),
        ('default = "b"\n[brokers.a]\nurl = "pulsar://h:1"', "default"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[tenants]\nt = "b"', "tenants.t"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[namespaces]\n"t/n" = 3', "namespaces.t/n"),
        ('[brokers.a]\nurl = "pulsar://h:1"\n[namespaces]\n"t" = "a"', "namespace"),
        ('[broker.a]\nurl = "pulsar://h:1"', "broker"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(text: str, named: str) -> None:
    """Each mistake has an error of its own, with the field."""
    with pytest.raises(InvalidArgument) as error:
        parse_placement(text, Path("p.toml"))
    assert error.value.field == named


def test_a_table_is_taken_anew_when_its_file_changes_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be read is logged once, and the last table stays."""
    path = tmp_path / "p.toml"
    path.write_text(TABLE)
    file = PlacementFile(path)
    first = file.table
    assert not file.refresh()
    path.write_text("[")
    with caplog.at_level(logging.ERROR):
        assert not file.refresh()
        assert not file.refresh()
    assert len(caplog.records) == 1
    assert file.table is first
    path.write_text(TABLE.replace('acme = "b"', 'acme = "a"'))
    os.utime(path, ns=(1, 1))
    assert file.refresh()
    assert file.table.tenants == {"acme": "a"}


def _owner(table: Placement, namespace: str) -> str | None:
    owner = table.owner(namespace)
    return None if owner is None else owner.name


@pytest.mark.parametrize("namespace", ["acme/orders", "acme/mail"])
def test_placing_a_namespace_changes_one_line(tmp_path: Path, namespace: str) -> None:
    """Comments and all other lines stay; twice is once."""
    path = tmp_path / "p.toml"
    path.write_text(TABLE)
    assert _owner(place_namespace(path, namespace, "b"), namespace) == "b"
    once = path.read_text()
    assert set(TABLE.splitlines()) - set(once.splitlines()) <= {'"acme/orders" = "a"  # the large one'}
    place_namespace(path, namespace, "b")
    assert path.read_text() == once
    assert _owner(read_placement(path), namespace) == "b"
    with pytest.raises(InvalidArgument, match="expected a broker"):
        place_namespace(path, namespace, "c")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.toml", '[brokers.a]\nurl = "pulsar://h:1"'),
        ("p.json", '{"brokers": {"a": {"url": "pulsar://h:1"}}}'),
        ("p.toml", '[namespaces]\n\n[brokers.a]\nurl = "pulsar://h:1"\n'),
    ],
)
def test_a_namespace_is_placed_where_none_was(tmp_path: Path, name: str, text: str) -> None:
    """The part of the table comes into being."""
    path = tmp_path / name
    path.write_text(text)
    place_namespace(path, "t/n", "a")
    assert read_placement(path).namespaces == {"t/n": "a"}


def test_a_file_of_another_shape_is_left_to_its_author(tmp_path: Path) -> None:
    """An inline table is not edited: the error says what to write."""
    path = tmp_path / "p.toml"
    path.write_text(
        'namespaces = {"t/n" = "a"}\n[brokers.a]\nurl = "pulsar://h:1"\n[brokers.b]\nurl = "pulsar://h:2"\n'
    )
    before = path.read_text()
    with pytest.raises(InvalidArgument):
        place_namespace(path, "t/n", "b")
    assert path.read_text() == before


def test_two_who_place_namespaces_at_one_moment_keep_each_others_lines(tmp_path: Path) -> None:
    """Each reads the table and writes it whole: without a lock the later one writes what was there before the other."""
    path = tmp_path / "p.toml"
    path.write_text(TABLE)
    names = [f"t/n{number}" for number in range(24)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: place_namespace(path, name, "b"), names))
    assert {name for name in names if _owner(read_placement(path), name) == "b"} == set(names)
    assert os.listdir(tmp_path) == ["p.toml"]
