"""Commands of the binary protocol, one dataclass each, and one table by which they are encoded and decoded."""

from __future__ import annotations


class Command:
    """A command of the protocol."""

    __slots__ = ()
