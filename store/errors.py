"""Every error that duelog raises: one base, a few leaves that carry their facts as fields.

Grouped by when they occur: opening a store, handing something in, using it, finding damage.
"""

import math
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_DEFAULT = re.compile(r"persistent://public/default/(?=[^\s'\"])")


def short_names(text: str) -> str:
    """The text for people: with the names that they give topics of the default namespace.

    >>> short_names("topic persistent://public/default/mails"), short_names("persistent://shop/mail/out")
    ('topic mails', 'persistent://shop/mail/out')
    """
    return _DEFAULT.sub("", text)


class DuelogError(Exception):
    """Base of every error that duelog raises on purpose. Its text has short names, its fields have full ones."""

    def __str__(self) -> str:
        return short_names(super().__str__())


class _AtPath(DuelogError):
    """An error of one file or directory of a store: `path`, and the `reason`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


# -- opening a store ---------------------------------------------------------------------------


class StoreLocked(DuelogError):
    """Another process has the store open for writing.

    pid: that process, by its number on `host`; both None where that cannot be told.
    """

    def __init__(self, path: Path, pid: int | None = None, host: str | None = None, shown: str = "") -> None:
        """shown: how the text names the process."""
        super().__init__(f"{path}: another process has this store open for writing{shown and f': {shown}'}")
        self.path = path
        self.pid = pid
        self.host = host


class AlreadyOpen(StoreLocked):
    """This process has the store open already, for writing or reading, by this path or another one to it.

    is_fork: or a process has it open read-only from which this one was forked; LMDB cannot tell.
    """

    def __init__(self, path: Path, *, is_fork: bool = False) -> None:
        text = f"{path}: this process has this store open already; share that DelayedStore, it is thread-safe"
        if is_fork:
            text += "; or the one that it was forked from has: then fork before that opens it, or spawn this process"
        DuelogError.__init__(self, text)
        self.is_fork = is_fork
        self.path = path
        self.pid = self.host = None


class FormatMismatch(DuelogError):
    """The directory is no store, or one of another format, or one made with another setting."""

    def __init__(self, path: Path, field: str, found: object, expected: object) -> None:
        super().__init__(f"{path}: {field} is {found!r}, expected {expected!r}")
        self.path = path
        self.field = field
        self.found = found
        self.expected = expected


class DamagedStore(_AtPath):
    """A part of the store is missing, short or not as its catalog says."""


# -- handing something in ----------------------------------------------------------------------


class InvalidArgument(DuelogError, ValueError):
    """An argument is not of the documented form; nothing was done."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = f"{shown[:100]}... ({len(shown)} characters)"
        super().__init__(f"{field}={shown}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


def checked_list(field: str, values: object, expected: str) -> list[Any]:
    """The elements of an argument that has several. Raises InvalidArgument for text, bytes and what has none."""
    if isinstance(values, (str, bytes, bytearray, memoryview)) or not isinstance(values, Iterable):
        raise InvalidArgument(field, values, f"expected {expected}")
    return list(values)


def checked_int(field: str, value: Any, lowest: float, expected: str, highest: float = math.inf) -> int:
    """An argument that is an integer, of numpy and of an enumeration too, but no bool. Raises InvalidArgument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not lowest <= number <= highest:
        raise InvalidArgument(field, value, f"expected {expected}")
    return number


class InvalidMessage(InvalidArgument):
    """A message, its due time, key or properties cannot be taken; nothing of its batch was written."""


class DelayTooLong(InvalidMessage):
    """The due time lies further in the future than the policy in force allows (PIP-437)."""

    def __init__(self, asked_ms: int, limit_ms: int, set_at: str) -> None:
        super().__init__("delay_ms", asked_ms, f"longer than max_delivery_delay_ms={limit_ms} set on {set_at}")
        self.asked_ms = asked_ms
        self.limit_ms = limit_ms
        self.set_at = set_at


class QuotaExceeded(DuelogError):
    """More messages of a topic would be pending than the policy in force allows; none of the call's was stored.

    count: how many were to be. pending: how many are. limit: `max_pending`, as it is set at `set_at`.
    """

    def __init__(self, topic: str, count: int, pending: int, limit: int, set_at: str) -> None:
        over = f"{count} more go over max_pending={limit} set on {set_at}"
        super().__init__(f"topic {topic}: {pending} messages are pending, {over}")
        self.topic = topic
        self.count = count
        self.pending = pending
        self.limit = limit
        self.set_at = set_at


class PoliciesChanged(DuelogError):
    """The policies at a scope are not those that the caller expected: another was quicker, and nothing was set.

    expected, found: the policies, None: none.
    """

    def __init__(self, scope: str, expected: object, found: object) -> None:
        super().__init__(f"policies of {scope}: {_shown(found)} is set there, {_shown(expected)} was expected")
        self.scope = scope
        self.expected = expected
        self.found = found


def _shown(policies: object) -> str:
    return "nothing" if policies is None else repr(policies)


class DocumentChanged(DuelogError):
    """A document is not of the version that the caller expects: another was quicker, and nothing was stored.

    expected, found: versions; None: no document.
    """

    def __init__(self, key: str, expected: int | None, found: int | None) -> None:
        stored = "no document" if found is None else f"version {found}"
        wanted = "none" if expected is None else f"version {expected}"
        super().__init__(f"document {key!r}: {stored} is there, {wanted} was expected")
        self.key = key
        self.expected = expected
        self.found = found


class TransactionConflict(DuelogError):
    """One operation of a transaction cannot be, so that nothing of it was stored: which, and why."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"nothing of the transaction is stored: {operation}: {reason}")
        self.operation = operation
        self.reason = reason


class UnknownTopic(DuelogError, LookupError):
    """No topic of that name exists."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist")
        self.topic = topic


class UnknownSubscription(DuelogError, LookupError):
    """The topic has no subscription of that name."""

    def __init__(self, topic: str, subscription: str) -> None:
        super().__init__(f"topic {topic!r} has no subscription {subscription!r}")
        self.topic = topic
        self.subscription = subscription


class ConsumerBusy(DuelogError):
    """The subscription is taken: exclusive with a consumer, or open under another type."""

    def __init__(self, topic: str, subscription: str, reason: str) -> None:
        super().__init__(f"subscription {subscription!r} of topic {topic!r}: {reason}")
        self.topic = topic
        self.subscription = subscription
        self.reason = reason


# -- using a store -----------------------------------------------------------------------------


class ClosedError(DuelogError):
    """The object was closed, or belongs to a parent process."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed")
        self.what = what


class ReadOnly(ClosedError):
    """A call that changes something, of a store opened with `read_only=True`: nothing was done."""

    def __init__(self, what: str) -> None:
        DuelogError.__init__(self, f"{what} is open read-only: nothing can be changed")
        self.what = what


class StoreFailed(DuelogError):
    """The store has stopped: a commit is in doubt, or it cannot go on. Nothing more is written until it is reopened.

    `__cause__` is the error that stopped it, where there was one.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: the store has stopped ({reason}); reopen the store to go on writing")
        self.path = path
        self.reason = reason


class StoreFull(_AtPath):
    """The disk or the map is full; what is committed is kept, and writing goes on when there is free space."""

    def __init__(self, path: Path, reason: str, free_bytes: int | None = None) -> None:
        super().__init__(path, reason)
        self.free_bytes = free_bytes


class HandlersHang(DuelogError):
    """Every thread of a worker's task hangs in its function, and so do those that took their places: it runs nothing.

    task: its name. threads: how many hang.
    """

    def __init__(self, task: str, threads: int, timeout_s: float) -> None:
        super().__init__(
            f"task {task}: {threads} threads hang in its function for more than {timeout_s:g} s: it runs nothing more"
        )
        self.task = task
        self.threads = threads


class StoreBusy(_AtPath):
    """A store was written to without a pause for so long that no instant of it could be copied; nothing was done."""


class StoreUnavailable(_AtPath):
    """The operating system refused a file of the store, for no fault in what is stored; `errno` is its number."""

    def __init__(self, path: Path, reason: str, errno: int | None = None) -> None:
        super().__init__(path, reason)
        self.errno = errno


class ResourceShortage(StoreUnavailable):
    """The process or the machine is short of file descriptors, memory or address space: nothing is damaged.

    The same call may be made again once there is more (`ulimit -n`).
    """


class DayAway(StoreUnavailable):
    """The partition is in the copy, and this machine has given its files back: nothing is lost or damaged.

    A store that is open for writing fetches it `preload_ms` before it begins, or where a call needs it.
    """


class NoPermission(StoreUnavailable):
    """This user may not read, or may not write, a file of the store: nothing is damaged."""


class ClockJumped(DuelogError):
    """The clock jumped forward by more than ``max_clock_jump_ms`` at once: firing stopped."""

    def __init__(self, last_ms: int, now_ms: int, bound_ms: int) -> None:
        super().__init__(
            f"the clock went from {last_ms} to {now_ms} at once, over max_clock_jump_ms={bound_ms}; "
            "nothing is fired until it comes back or accept_clock() is called"
        )
        self.last_ms = last_ms
        self.now_ms = now_ms
        self.bound_ms = bound_ms


# -- finding damage ----------------------------------------------------------------------------


class CorruptEntry(DuelogError):
    """A record's checksum does not match, or its fields contradict each other; it is never delivered."""

    def __init__(self, environment: str, ledger_id: int, entry_id: int, reason: str) -> None:
        super().__init__(f"{environment}: ledger {ledger_id}, entry {entry_id}: {reason}")
        self.environment = environment
        self.ledger_id = ledger_id
        self.entry_id = entry_id
        self.reason = reason


class CorruptRecord(DuelogError, ValueError):
    """A small record of the catalog or of a cursor does not match its checksum or its layout: the store is damaged.

    Callers of `open` get DamagedStore for what is met there.
    """


class BrokenInvariant(DuelogError, AssertionError):
    """Duelog itself is wrong: please report it with the message."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} (a bug in duelog; please report it)")


# -- the copy in object storage ----------------------------------------------------------------


class _OfReplica(DuelogError):
    """An error of a store's copy in object storage: `url`, its prefix, and the `reason`."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class ReplicaUnreachable(_OfReplica):
    """Object storage gave no answer, or refused to. What was asked for may have been done."""


class ReplicaRefused(_OfReplica):
    """The prefix has no copy of this store, or one of a format that is not known."""


class ForkFound(ReplicaRefused):
    """Another process ships to the prefix, or has shipped what this store does not have."""


class NotReplicated(_OfReplica):
    """A change is on this machine's disk, and not known to be in the copy. It may come there yet."""


class NotLeader(_OfReplica):
    """The lease was not renewed in time: another machine may lead. Nothing was done; it may be tried again."""


class Deposed(ReplicaRefused):
    """Another machine leads by the copy: nothing is written here any more."""


class ReplicaDamaged(_OfReplica):
    """An object of the copy is missing, or not as it was written: `name` says which."""

    def __init__(self, url: str, name: str, reason: str) -> None:
        super().__init__(url, f"{name} {reason}")
        self.name = name
