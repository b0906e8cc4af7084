"""Fixtures of stores with a copy."""

import pytest

from tests.duelog.replica.faulty import FaultyBucket


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> FaultyBucket:
    """The bucket of every store that is opened with a replica; nothing goes wrong with it unless told so."""
    faulty = FaultyBucket()
    monkeypatch.setattr("duelog.replica.shipping.Bucket", lambda url: faulty)
    return faulty
