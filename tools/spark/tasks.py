"""One Spark task for each of many values: a function is called somewhere with each, and its answers come back.

This is what every job but a DataFrame read needs: exactly one answer for each task, however often Spark repeats or
doubles its attempts, and one task for each value however Spark would have spread rows. A data source does that, without
a shuffle and over Spark Connect as well; what an answer means (a directory to publish, say) is for the caller to carry
out once all are there.
"""

import base64
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ...store.errors import BrokenInvariant
from .session import spark_errors

T = TypeVar("T")
R = TypeVar("R")


class TaskSource(DataSource):
    """The data source `duelog-tasks`: rows (place, answer). Its options are for `run_tasks` alone to give."""

    @classmethod
    def name(cls) -> str:
        return "duelog-tasks"

    def schema(self) -> str:
        return "place bigint, answer binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of the tasks that the options carry. Spark sends what is left of this object to every task."""
        function, values = pickle.loads(zlib.decompress(base64.b64decode(self.options["tasks"])))
        self.options = {}
        return TaskReader(cloudpickle.loads(function), values)


class TaskReader(DataSourceReader):
    """Calls the function of a job for each of its values."""

    def __init__(self, function: Callable[[Any], object], values: list[Any]) -> None:
        self._function = function
        self._values = values

    def __getstate__(self) -> dict[str, object]:
        """Without the values: every task gets this object, and its own value besides."""
        return {"_function": self._function, "_values": []}

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(each) for each in enumerate(self._values)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, bytes]]:
        place, value = partition.value
        yield place, pickle.dumps(self._function(value))


def run_tasks(spark: SparkSession, function: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """Call `function` with each of `values`; the answers in order. Raises SparkFailed: a task has failed for good.

    Values and answers are picklable. The function is called on workers, perhaps more than once for a value, perhaps at
    the same time; of the attempts for one value one answer is taken.
    """
    if not values:
        return []
    packed = pickle.dumps((cloudpickle.dumps(function), list(values)))  # type: ignore[no-untyped-call]
    spark.dataSource.register(TaskSource)
    with spark_errors():
        reader = spark.read.format(TaskSource.name())
        rows = reader.option("tasks", base64.b64encode(zlib.compress(packed, 1)).decode()).load().collect()
    answers: dict[int, R] = {row.place: pickle.loads(row.answer) for row in rows}
    if len(rows) != len(values) or len(answers) != len(values):
        raise BrokenInvariant(f"{len(rows)} answers of {len(values)} tasks")
    return [answers[place] for place in range(len(values))]
