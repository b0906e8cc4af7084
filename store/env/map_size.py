"""The size of an environment's map: grown by doubling, while no thread of this process reads it."""

from __future__ import annotations

import lmdb

from .reader_gate import ReaderGate

MAX_MAP_BYTES = 1 << 44
"""Largest map an environment grows to: virtual address space ends near 2**47."""


class MapSize:
    """The map of one open environment."""

    def __init__(self, environment: lmdb.Environment, gate: ReaderGate, size: int) -> None:
        """`gate` is what its readers go through; `size`: bytes."""
        self._environment = environment
        self._gate = gate
        self.bytes = size

    def grow(self) -> bool:
        """Double it once no reader is inside. False at MAX_MAP_BYTES. REQUIRES: as `map_anew`."""
        if self.bytes * 2 > MAX_MAP_BYTES:
            return False
        with self._gate.alone():
            self.bytes *= 2
            self._environment.set_mapsize(self.bytes)
        return True

    def map_anew(self) -> bool:
        """Have the pages that were read leave this process's memory; False, and nothing is done, while a thread reads.

        REQUIRES: what keeps commits and closing out, and no transaction in it.
        """
        with self._gate.alone_at_once() as alone:
            if alone:
                self._environment.set_mapsize(self.bytes)  # LMDB maps the file anew
            return alone

    def follow(self) -> None:
        """Take over the size that the writing process has given the file, once no reader is inside."""
        with self._gate.alone():
            self._environment.set_mapsize(0)
