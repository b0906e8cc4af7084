"""One Spark session for all tests of this folder, and a store for them to read.

With several test processes all of them run in one (`--dist loadgroup`), so that one JVM is started.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from duelog.tools.spark.session import make_session
from tests.tools.closed_days import Built, build

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


QUICK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # jobs here end before more pays
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.python.filterPushdown.enabled": "true",  # so that it is tested; each query has a `load` of its own
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this folder together."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores of which a task may fail twice."""
    pytest.importorskip("pyspark")
    session = make_session("local[2,3]", name="duelog-tests", config=QUICK)
    yield session
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the gateway leaves sockets to the garbage collector
        session.stop()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A store of three closed days, which tests do not change."""
    return build(tmp_path_factory.mktemp("spark") / "store", cancelled=40)
