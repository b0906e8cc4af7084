"""audit, export and compact of several stores: by a list, a glob or a placement table, each on its own."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from duelog import DelayedStore
from duelog.tools.transfer.export_layout import open_export
from tests.tools.closed_days import build_half_acknowledged
from tests.tools.command_line import json_lines_of, json_of, refused, run


@pytest.fixture(scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("fleet")
    first = build_half_acknowledged(parent / "a", 200).path
    for name in ("b", "c"):
        shutil.copytree(first, parent / name)
    return parent


@pytest.fixture
def fleet(_built: Path, tmp_path: Path) -> Path:
    """Three stores side by side."""
    return shutil.copytree(_built, tmp_path / "fleet")


def test_an_audit_of_several_stores_has_the_rows_of_each(fleet: Path, tmp_path: Path) -> None:
    """JSON, and Parquet files with a column `store` beside a report of each store."""
    output = tmp_path / "report"
    found = json_of("audit", f"{fleet}/*", "--output", output)
    assert [each["store"] for each in found["stores"]] == [str(fleet / name) for name in "abc"]
    assert found["unreadable"] == []
    table = pq.read_table(output / "partitions.parquet")
    assert table.column_names[0] == "store"
    assert table["store"].unique().to_pylist() == [str(fleet / name) for name in "abc"]
    assert len(list(output.glob("store=*/audit.html"))) == 3


def test_a_store_that_is_damaged_ends_with_status_2_after_the_others_are_done(fleet: Path, tmp_path: Path) -> None:
    """Its line on standard error has its path and the reason; export leaves no directory of it."""
    (fleet / "b" / "STORE").write_bytes(b"nothing")
    for arguments in (["audit", f"{fleet}/*"], ["compact", f"{fleet}/*"], ["export", f"{fleet}/*", tmp_path / "to"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert str(fleet / "a") in result.stdout
        assert str(fleet / "c") in result.stdout
        assert str(fleet / "b") not in result.stdout
        assert f"{fleet / 'b'}: " in result.stderr
        assert "stores: 3, of which failed: 1" in result.stderr
    listed = json.loads((tmp_path / "to" / "STORES.json").read_text())["stores"]
    assert [("reason" in row) for row in listed] == [False, True, False]
    assert open_export(tmp_path / "to" / listed[2]["directory"]).message_files
    assert len(list((tmp_path / "to").iterdir())) == 3


def test_a_store_that_this_process_has_open_is_named_and_the_others_are_audited(fleet: Path) -> None:
    """It is busy: another process could read it."""
    with DelayedStore.open(fleet / "b"):
        result = run("audit", fleet / "a", fleet / "b", fleet / "c")
    assert result.exit_code == 2
    assert f"{fleet / 'b'}: " in result.stderr
    assert str(fleet / "c") in result.stdout


def test_a_placement_table_means_the_stores_of_its_brokers(fleet: Path) -> None:
    """Paths are relative to the file; a broker without a store is refused by its name."""
    table = fleet / "placement.toml"
    table.write_text(
        'default = "one"\n[brokers.one]\nurl = "pulsar://localhost:1"\nstore = "a"\n'
        '[brokers.two]\nurl = "pulsar://localhost:2"\nstore = "c"\n'
    )
    found = json_lines_of("compact", table, "--dry-run")
    assert [each["store"] for each in found] == [str(fleet / "a"), str(fleet / "c")]
    with table.open("a") as file:
        file.write('[brokers.three]\nurl = "pulsar://localhost:3"\n')
    assert "brokers.three.store" in refused("compact", table, "--dry-run")
    assert "matches no store" in refused("audit", f"{fleet}/x*")
