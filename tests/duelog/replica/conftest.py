"""Fixtures of stores with a copy."""

import pytest

from duelog.store.wal import write_batch
from tests.duelog.replica.faulty import FaultyBucket


@pytest.fixture(autouse=True)
def _little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any batch has its bodies in body files, where a store flushes its groups."""
    monkeypatch.setattr(write_batch, "LARGE_BYTES", 100)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> FaultyBucket:
    """The bucket of every store that is opened with a replica; nothing goes wrong with it unless told so."""
    faulty = FaultyBucket()
    for module in ("shipping", "tiers"):
        monkeypatch.setattr(f"duelog.replica.{module}.Bucket", lambda url: faulty)
    return faulty
