"""What Spark's filters say of topic, partition and due time, as what a scan wants.

Only what prunes before reading is understood here; Spark evaluates the rest itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from ...store.message import MAX_DUE_MS
from ..scan.scan_plan import Wanted

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""The setting of Spark with which it hands filters to data sources.

Spark keeps what a reader planned for the last filters of a DataFrame with it, and another use of the same DataFrame, in
a later query or in the same one, gets the rows of those: with it, each filter wants a `load` of its own.
"""

_BOUNDS: dict[type[Filter], Callable[[int], tuple[int, int]]] = {
    EqualTo: lambda value: (value, value + 1),
    GreaterThan: lambda value: (value + 1, MAX_DUE_MS + 1),
    GreaterThanOrEqual: lambda value: (value, MAX_DUE_MS + 1),
    LessThan: lambda value: (0, value),
    LessThanOrEqual: lambda value: (0, value + 1),
}
"""The due times [start, limit) that meet a comparison."""


def narrow(wanted: Wanted, condition: Filter) -> tuple[Wanted, bool]:
    """What is wanted of `wanted` under a condition too, and whether every row of that meets it.

    `IsNotNull` of a due time, which Spark adds to every comparison, is left to Spark: it says nothing about what to
    read.
    """
    if isinstance(condition, IsNotNull):
        return wanted, False
    if getattr(condition, "attribute", ()) == ("due_ms",):
        narrowed, done = _narrow_due(wanted, condition, getattr(condition, "value", None))
        return narrowed, done and not narrowed.every_due  # every: also those that have no due time to compare
    if names := text_values(condition, "topic"):
        return wanted._replace(topics=names if wanted.topics is None else wanted.topics & names), True
    if names := text_values(condition, "partition"):
        return wanted._replace(partitions=names if wanted.partitions is None else wanted.partitions & names), True
    return wanted, False


def text_values(condition: Filter, column: str) -> frozenset[str]:
    """The texts of which a column has to be one, by a condition; none: the condition says nothing of the kind."""
    if getattr(condition, "attribute", ()) != (column,):
        return frozenset()
    value: Any = getattr(condition, "value", None)
    values = value if isinstance(condition, In) else (value,) if isinstance(condition, EqualTo) else ()
    return frozenset(values) if all(isinstance(each, str) for each in values) else frozenset()


def _narrow_due(wanted: Wanted, condition: Filter, value: Any) -> tuple[Wanted, bool]:
    if isinstance(condition, In):
        values = [each for each in condition.value if isinstance(each, int)]
        if not values or len(values) < len(condition.value):
            return wanted, False
        (start, limit), exact = (min(values), max(values) + 1), len(set(values)) == 1
    elif type(condition) in _BOUNDS and isinstance(value, int):
        (start, limit), exact = _BOUNDS[type(condition)](value), True
    else:
        return wanted, False
    start, limit = max(wanted.due_from_ms, start), min(wanted.due_until_ms, limit)
    return wanted._replace(due_from_ms=start, due_until_ms=limit), exact
