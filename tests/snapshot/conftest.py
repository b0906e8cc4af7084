"""A partition's environment for every test of snapshots that wants one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog.store.env.environment import Environment
from duelog.store.files import failpoints
from tests.snapshot.logs import new_environment


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty partition environment; failpoints are disarmed at the end."""
    opened = new_environment(tmp_path / "partition")
    yield opened
    failpoints.disarm()
    opened.close()
