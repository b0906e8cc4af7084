"""Every error of the library, for callers: `from duelog.errors import StoreLocked`."""

from duelog.store.errors import (
    BrokenInvariant,
    ClockJumped,
    ClosedError,
    ConsumerBusy,
    CorruptEntry,
    DamagedStore,
    DelayTooLong,
    DuelogError,
    FormatMismatch,
    InvalidArgument,
    InvalidMessage,
    StoreFailed,
    StoreFull,
    StoreLocked,
    UnknownSubscription,
    UnknownTopic,
)

__all__ = [
    "BrokenInvariant",
    "ClockJumped",
    "ClosedError",
    "ConsumerBusy",
    "CorruptEntry",
    "DamagedStore",
    "DelayTooLong",
    "DuelogError",
    "FormatMismatch",
    "InvalidArgument",
    "InvalidMessage",
    "StoreFailed",
    "StoreFull",
    "StoreLocked",
    "UnknownSubscription",
    "UnknownTopic",
]
