"""Every kind of finding of an audit: how bad it is, what it means, what to do about it.

docs/audit.md lists the same, and a test holds the two against each other.
"""

from __future__ import annotations

from typing import NamedTuple

ERROR, WARNING = "error", "warning"


class Code(NamedTuple):
    """A kind of finding. `severity`: "error": something is lost or wrong; "warning": something is late or left over."""

    severity: str
    meaning: str
    advice: str


BEHIND_TIME = frozenset(("late", "overdue"))
"""Kinds of findings that are about time, and not about what is stored: they do not change an exit status."""

_REPAIR = "run `duelog repair` on a copy of the store, or restore a backup"

CODES: dict[str, Code] = {
    "lost": Code(
        ERROR,
        "messages were due, the store has gone past them, and no marker hands them out",
        "send them again from a backup or from their source; `duelog dump --entries` shows them",
    ),
    "doubled-marker": Code(
        ERROR,
        "messages were put into the main log more than once: subscriptions receive them again",
        "have receivers ignore message ids that they know; keep the store and report it",
    ),
    "dangling-marker": Code(
        ERROR, "the main log points at messages that do not exist: no subscription can receive them", _REPAIR
    ),
    "stray-marker": Code(
        ERROR,
        "the main log hands out messages that were cancelled, or that have not fired by the record of it",
        "expect cancelled messages, or the same ones once more when they fire; keep the store and report it",
    ),
    "deleted-too-early": Code(
        ERROR, "a partition is gone, and something that is kept still points into it", "restore it from a backup"
    ),
    "missing-partition": Code(
        ERROR, "the catalog has a partition whose directory is not there", "restore its directory from a backup"
    ),
    "unreadable-partition": Code(
        ERROR, "a partition cannot be opened, or its pages do not hold together; it was not looked at", _REPAIR
    ),
    "damaged-main": Code(
        ERROR, "the pages of the main environment do not hold together; nothing else was looked at", _REPAIR
    ),
    "corrupt-entry": Code(ERROR, "entries do not match their checksums: they are never delivered", _REPAIR),
    "missing-entries": Code(ERROR, "entries of a log are gone: their numbers leave a gap", _REPAIR),
    "corrupt-record": Code(ERROR, "a record of the catalog does not match its checksum", _REPAIR),
    "set-aside": Code(
        ERROR,
        "an entry could not be read when it was to be delivered; it holds its partition until it is discarded",
        "restore it from a backup, or discard it with `duelog repair`",
    ),
    "wrong-holders": Code(
        ERROR,
        "the catalog counts other references to a closed partition than there are: it goes too early, or never",
        _REPAIR,
    ),
    "overdue": Code(
        WARNING,
        "messages have been due for more than a minute and have not fired",
        "open the store; where a process has it open, its log and `store.suspended()` say what keeps them from firing",
    ),
    "late": Code(
        WARNING,
        "messages fired more than a minute after they were due",
        "see that a process has the store open all the time, and that its firing does not stand still; old ones go "
        "with their ledgers",
    ),
    "not-deleted": Code(
        WARNING,
        "nothing holds a partition any more, and it is still there",
        "open the store for writing: a tick removes it; if it comes back, run `duelog repair` on a copy",
    ),
    "orphan-directory": Code(
        WARNING,
        "a directory under partitions/ that the catalog does not know",
        "it is removed when the store is next opened for writing, unless it holds messages",
    ),
    "orphan-generation": Code(
        WARNING,
        "a generation of a partition that is not the one in the catalog",
        "it is removed when the store is next opened for writing",
    ),
    "leftover": Code(
        WARNING,
        "something that a crash left in staging/ or trash/",
        "it is removed when the store is next opened for writing",
    ),
    "incomplete-snapshot": Code(
        WARNING,
        "a snapshot of a delay index that was not finished or cannot be read: the next start takes longer",
        "nothing is lost; `duelog snapshot rebuild` makes it anew",
    ),
}
