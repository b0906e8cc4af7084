"""Selection of topics by a pattern, and the hash by which a client tells that a list has not changed.

Pure functions of names; listing and watching share them, so that their hashes agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

import crc32c
import re2

from ...store.names import SCHEME
from ..lookup.topic_address import PARTITION_MARK

_NAMES_AT_ONCE = 1_000
"""Names that are joined at once, so that little memory is enough."""

_SCHEMES = re.compile("(?:non-)?persistent://")
_PARTITION = re.compile(rf"{PARTITION_MARK}[0-9]+\Z")


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str, /) -> object: ...


class UnreadablePattern(ValueError):
    """It is no regular expression of RE2."""


def compiled(pattern: str) -> Pattern:
    """Compile a pattern to be matched against `tenant/namespace/name`. Raises UnreadablePattern.

    A scheme in it is dropped, also behind `\\Q`: names of all lists are of one scheme. RE2 takes linear time, so that a
    pattern cannot hold up the broker.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        found: Pattern = re2.compile(_SCHEMES.sub("", pattern, count=1), options)
    except re2.error as error:
        raise UnreadablePattern(str(error)) from error
    return found


def selected(names: Iterable[str], pattern: Pattern) -> list[str]:
    """The full names whose topic the pattern matches in full; a partition goes by its partitioned topic."""
    return [name for name in names if matches(name, pattern)]


def matches(name: str, pattern: Pattern) -> bool:
    """Return True if `selected` has the name."""
    local = name.removeprefix(SCHEME)
    return bool(pattern.fullmatch(_PARTITION.sub("", local) if PARTITION_MARK in local else local))


def topics_hash(names: Iterable[str]) -> str:
    """The hash of a list, in any order.

    >>> topics_hash(["persistent://tenant/ns/topic1"])
    'fd59a01d'
    """
    found, before = 0, b""
    ordered = sorted(names)
    for start in range(0, len(ordered), _NAMES_AT_ONCE):
        found = int(crc32c.crc32c(before + ",".join(ordered[start : start + _NAMES_AT_ONCE]).encode(), found))
        before = b","
    return found.to_bytes(4, "little").hex()
