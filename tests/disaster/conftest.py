"""Where tests of this folder put what they make."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disaster.running import memory


@pytest.fixture(scope="module")
def places() -> Iterator[Path]:
    """A directory of a module, in memory where there is one."""
    with tempfile.TemporaryDirectory(prefix="duelog-disaster-", dir=memory()) as directory:
        yield Path(directory)
