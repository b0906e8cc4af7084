"""A backup against its manifest: what copying, a bad disk or a hand did to it is found before it is needed."""

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.tools.store_check import check_store
from tests.conftest import START_MS, OpenStore, applied

CONFIG = StoreConfig(partition_ms=3_600_000)


@pytest.fixture
def backup(open_store: OpenStore, tmp_path: Path) -> Path:
    """A backup of a store with two partitions."""
    store = open_store(config=CONFIG)
    for hours in (1, 2):
        store.topic("t").send_payloads([bytes(500)] * 50, deliver_after=3_600.0 * hours)
    return applied(store).backup(tmp_path / "copy").path


@pytest.mark.parametrize("deep", [False, True])
def test_an_untouched_backup_has_no_finding(backup: Path, deep: bool) -> None:
    """Looked at twice: the check changes nothing."""
    assert check_store(backup, deep=deep) == []
    assert check_store(backup, deep=deep) == []


def test_a_byte_that_no_page_uses_is_found_by_its_file_s_checksum(backup: Path) -> None:
    """Bytes that the records' checksums do not cover: the copy is not what was written."""
    file = next(backup.glob("partitions/*/g*/data.mdb"))
    content = bytearray(file.read_bytes())
    content[4_000] ^= 0xFF  # past the contents of a meta page
    file.write_bytes(content)
    assert check_store(backup) == []
    assert [(found.code, found.address) for found in check_store(backup, deep=True)] == [("backup-file", str(file))]


def test_a_file_that_was_cut_short_or_lost_is_found(backup: Path) -> None:
    """By its size, without reading it; a lost one by its name."""
    first, second = sorted(backup.glob("partitions/*/g*/data.mdb"))
    second.unlink()
    with first.open("ab") as file:
        file.write(bytes(4_096))
    found = {finding.address: finding.message for finding in check_store(backup) if finding.code == "backup-file"}
    assert "bytes" in found[str(first)]
    assert found[str(second)] == "is missing"


def test_a_manifest_that_cannot_be_read_is_found(backup: Path) -> None:
    """Instead of taking the copy for a store."""
    (backup / "BACKUP").write_text("{")
    assert "backup-manifest" in {finding.code for finding in check_store(backup)}


def test_a_backup_that_was_opened_is_a_store_like_any_other(backup: Path) -> None:
    """Its files have changed since, and should."""
    with DelayedStore.open(backup, CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").send(b"more", deliver_after=10)
    assert check_store(backup, deep=True) == []
