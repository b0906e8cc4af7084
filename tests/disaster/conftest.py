"""Where tests of this folder put what they make."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from duelog.store.wal import write_batch
from tests.disaster.running import memory
from tests.disaster.working import LARGE_BYTES


@pytest.fixture(scope="module", autouse=True)
def _little_is_large() -> Iterator[None]:
    """In this process as in those that it starts (fork_server.py)."""
    with patch.object(write_batch, "LARGE_BYTES", LARGE_BYTES):
        yield


@pytest.fixture(scope="module")
def places() -> Iterator[Path]:
    """A directory of a module, in memory where there is one."""
    with tempfile.TemporaryDirectory(prefix="duelog-disaster-", dir=memory()) as directory:
        yield Path(directory)
