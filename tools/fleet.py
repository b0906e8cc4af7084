"""Several stores as one: which ones a list, a glob or a placement table means, and work done on each on its own.

A store that cannot be read or written (damaged, busy, gone) is told with its reason, and hides nothing of the others.
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import lmdb

from ..broker.cluster.placement import read_placement
from ..store.errors import DuelogError, InvalidArgument
from .columns.sealed import store_name

T = TypeVar("T")

AT_ONCE = 4
"""Stores that jobs deal with at a time: on Spark, so that the last tasks of one leave no core idle."""

FAILURES = (DuelogError, lmdb.Error, OSError)
"""Errors of a store that is damaged, busy or not there."""


class Outcome(NamedTuple, Generic[T]):
    """The outcome of one store: a result, or the reason why there is none."""

    store: Path
    result: T | None
    reason: str = ""

    @property
    def name(self) -> str:
        """The name of the store as it is shown."""
        return store_name(self.store)


def is_fleet(given: Sequence[str | os.PathLike[str]]) -> bool:
    """Return True if stores are given as a fleet: more than one, a glob or a table; not the directory of one store."""
    return len(given) != 1 or Path(given[0]).is_file() or _is_glob(os.fspath(given[0]))


def stores_of(given: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The stores that are meant, each once, in the order given; those of a glob by name.

    A directory is itself, whether it holds a store or not: what is wrong with it is told when it is opened. A glob
    stands for the stores among what it matches, a file is a placement table and stands for the stores of its brokers.
    Raises InvalidArgument for a glob that matches no store, and for a table that does not name a store for each broker.
    """
    found: dict[str, Path] = {}
    for each in given:
        text = os.fspath(each)
        paths = [Path(text)]
        if _is_glob(text):
            paths = [  # one that has lost its STORE file is told of, too
                each
                for each in map(Path, sorted(glob.glob(text)))
                if (each / "STORE").exists() or (each / "main").is_dir()
            ]
            if not paths:
                raise InvalidArgument("STORE", text, "matches no store")
        elif paths[0].is_file():
            paths = _placed(paths[0])
        for path in paths:
            found.setdefault(os.path.realpath(path), path)
    if not found:
        raise InvalidArgument("STORE", None, "expected the directory of a store")
    return list(found.values())


def _placed(table: Path) -> list[Path]:
    """The stores of a table's brokers, or their copies: of a broker that has both, the store."""
    found: list[Path] = []
    for name, broker in read_placement(table).brokers.items():
        place = broker.store or broker.replica
        if place is None:
            reason = f"{table} does not say where the store of this broker is, nor its copy (replica)"
            raise InvalidArgument(f"brokers.{name}.store", None, reason)
        found.append(Path(place))
    return found


def _is_glob(text: str) -> bool:
    return glob.has_magic(text) and not os.path.exists(text)


def attempt(store: Path, work: Callable[[Path], T]) -> Outcome[T]:
    """Do work in one store. Only what the store is to blame for becomes a reason."""
    try:
        return Outcome(store, work(store))
    except FAILURES as error:
        return Outcome(store, None, reason_of(error))


def reason_of(error: BaseException) -> str:
    """Why a store could not be used, on one line."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return " ".join(text.split()) or type(error).__name__


def each_store(stores: Sequence[Path], work: Callable[[Path], T], *, at_once: int = 1) -> Iterator[Outcome[T]]:
    """The outcome of `work` in each store, in their order; in up to `at_once` threads."""
    if at_once == 1:
        yield from (attempt(store, work) for store in stores)
        return
    with ThreadPoolExecutor(at_once, thread_name_prefix="duelog-store") as pool:
        yield from pool.map(lambda store: attempt(store, work), stores)
