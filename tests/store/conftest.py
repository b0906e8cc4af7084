"""An environment for every test of the ground floor that wants one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog.store.env.environment import Environment


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """A new environment with a map of 1 MiB."""
    opened = Environment(tmp_path / "main", name="main", map_bytes=1 << 20, create=True)
    yield opened
    opened.close()
