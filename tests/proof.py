"""How long a series is: short in `make test`, long in `make proof`; and wrong engines, most of which only that runs."""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

PROOF = "DUELOG_PROOF" in os.environ
"""Set by `make proof`, which runs what is marked `series` or `proof`."""


def length(variable: str, quick: int, proof: int) -> int:
    """The length of a series: the environment's `variable`, else `proof` in `make proof` and `quick` elsewhere."""
    return int(os.environ.get(variable, proof if PROOF else quick))


def sample(cases: Iterable[Case], every: int) -> list[Case]:
    """Keep one of `every` cases; all of them in `make proof`."""
    return list(cases)[:: 1 if PROOF else every]


def wrong_engines(engines: Iterable[Any], *samples: Any) -> list[Any]:
    """Parameters of a test of wrong engines, all but `samples` marked `proof`."""
    return [
        engine
        if engine in samples
        else pytest.param(*(engine if isinstance(engine, tuple) else (engine,)), marks=pytest.mark.proof)
        for engine in engines
    ]
