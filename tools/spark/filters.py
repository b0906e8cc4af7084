"""What Spark's filters say of topic, partition and due time, as what a scan wants.

Only what prunes before reading is understood here; Spark evaluates the rest itself.
"""

from __future__ import annotations

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

from ..scan.scan_plan import Wanted

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""The setting of Spark with which it hands filters to data sources."""


def narrow(wanted: Wanted, condition: Filter) -> tuple[Wanted, bool]:
    """What is wanted of `wanted` under a condition too, and whether every row of that meets it.

    `IsNotNull` of a due time, which Spark adds to every comparison, is left to Spark: it says nothing about what to
    read.
    """
    if isinstance(condition, IsNotNull):
        return wanted, False
    path = getattr(condition, "attribute", ())
    value: Any = getattr(condition, "value", None)
    if path == ("due_ms",):
        narrowed, done = _narrow_due(wanted, condition, value)
        return narrowed, done and not narrowed.every_due  # every: also those that have no due time to compare
    if path in (("topic",), ("partition",)):
        if isinstance(condition, EqualTo) and isinstance(value, str):
            names = frozenset({value})
        elif isinstance(condition, In) and all(isinstance(each, str) for each in value):
            names = frozenset(value)
        else:
            return wanted, False
        if path == ("topic",):
            return wanted._replace(topics=names if wanted.topics is None else wanted.topics & names), True
        return wanted._replace(partitions=names if wanted.partitions is None else wanted.partitions & names), True
    return wanted, False


def _narrow_due(wanted: Wanted, condition: Filter, value: Any) -> tuple[Wanted, bool]:
    if isinstance(condition, In):
        values = [each for each in condition.value if isinstance(each, int)]
        if not values or len(values) < len(condition.value):
            return wanted, False
        return _between(wanted, min(values), max(values) + 1), len(set(values)) == 1
    if not isinstance(value, int):
        return wanted, False
    if isinstance(condition, EqualTo):
        return _between(wanted, value, value + 1), True
    if isinstance(condition, GreaterThan):
        return _between(wanted, value + 1, None), True
    if isinstance(condition, GreaterThanOrEqual):
        return _between(wanted, value, None), True
    if isinstance(condition, LessThan):
        return _between(wanted, None, value), True
    if isinstance(condition, LessThanOrEqual):
        return _between(wanted, None, value + 1), True
    return wanted, False


def _between(wanted: Wanted, due_from_ms: int | None, due_until_ms: int | None) -> Wanted:
    if due_from_ms is not None:
        wanted = wanted._replace(due_from_ms=max(wanted.due_from_ms, due_from_ms))
    if due_until_ms is not None:
        wanted = wanted._replace(due_until_ms=min(wanted.due_until_ms, due_until_ms))
    return wanted
