"""One healthy store for all tests of audits; what is damaged is a copy."""

from pathlib import Path

import pytest

from tests.audit.histories import build


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A healthy store, which tests do not change, and the time at its end."""
    path = tmp_path_factory.mktemp("audit") / "store"
    return path, build(path)
