"""Events of an open store, told by its parts: metrics count them, and threads that wait for them are woken.

One protocol in place of a callback for each thing; RocksDB's EventListener is the example. Parts get the listeners of
their store when they are made. The list is filled once all parts are there, so nobody hears of recovery.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import StoreFailed
from .names import TopicName

_log = logging.getLogger("duelog")

P = ParamSpec("P")
T = TypeVar("T")


def call_supplied(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call a function that a program or an exporter supplied, and return its result; None where it raises.

    It runs once the disk has what it hears of. What it raises, BaseException included, is logged: it turns no stored
    message into an error, stops no leader and ends no thread of the store.
    """
    try:
        return function(*args, **kwargs)
    except BaseException:
        name = getattr(function, "__qualname__", None) or repr(function)
        _log.exception("callback %s raised; what it was told of stands", name)
        return None


class StoreListener:
    """Hears of events in the thread in which they happen, before the call that caused them returns.

    Each method does nothing here; a listener overrides those that it wants. They take leaf locks only, and are
    called by `tell`.
    """

    hears: ClassVar[frozenset[str]] = frozenset()
    """The names of the methods that are overridden."""

    def __init_subclass__(cls) -> None:
        events = (name for name in vars(StoreListener) if not name.startswith("_"))
        cls.hears = frozenset(name for name in events if getattr(cls, name) is not getattr(StoreListener, name))

    def committed(self, environment: str, elapsed_ns: int, requests: int, entries: int) -> None:
        """A group commit for `requests` callers is on disk, and memory knows it.

        Of the environment so named, or of the write-ahead log: "wal".
        """

    def failed(self, environment: str, error: StoreFailed) -> None:
        """Nothing more is written to the environment so named."""

    def partition_created(self, start_ms: int) -> None:
        """A partition has come into being; it may have begun."""

    def partition_deleted(self, start_ms: int) -> None:
        """A partition was removed from disk."""

    def fired(self, topic_id: int, dues: npt.NDArray[np.int64], now_ms: int) -> None:
        """Messages with these due times were fired, or seen due in the main log, at `now_ms`."""

    def admitted(self, topic_id: int, count: int) -> None:
        """Messages are pending that were not sent: they take the place of others, are requeued, or occurrences."""

    def cancelled(self, topic: TopicName, count: int) -> None:
        """Messages were cancelled."""

    def rescheduled(self, topic: TopicName, count: int) -> None:
        """Messages were given another due time."""

    def rejected(self, topic: TopicName, count: int) -> None:
        """Messages were refused for a delay over the maximum."""

    def overridden(self, topic: TopicName, count: int) -> None:
        """Messages are on disk whose own delay a policy replaced."""

    def snapshot_written(self, stored_bytes: int, elapsed_ns: int) -> None:
        """A snapshot is on disk; `elapsed_ns`: the work on it since the one before."""

    def ledger_trimmed(self, entries: int) -> None:
        """A ledger of a main log with `entries` entries was trimmed."""

    def quarantined(self) -> None:
        """An entry that cannot be read was met for the first time since the store was opened."""


Listeners = list[StoreListener]
"""The listeners of one store, shared by its parts."""


def tell(
    listeners: Sequence[StoreListener], event: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Tell of an event, a method of StoreListener, those that override it: a call for nothing costs a send 1 %."""
    name = event.__name__
    for listener in listeners:
        if name in listener.hears:
            call_supplied(getattr(listener, name), *args, **kwargs)
