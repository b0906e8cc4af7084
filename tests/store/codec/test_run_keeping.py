"""A run without some of its bodies: what stays is copied, damage included, and its place is kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from duelog.store.codec.format import run_key
from duelog.store.codec.run import Run, pack_messages
from duelog.store.errors import CorruptEntry

KEY = run_key(7, 100)
BASE_MS = 1_000


def packed(bodies: list[bytes], *, conditional: bool = False) -> bytes:
    """A run of these bodies, one ms apart."""
    count = len(bodies)
    replaced = (np.arange(count, dtype=np.uint64) + 50, np.arange(count, dtype=np.uint32) + 9) if conditional else None
    return bytes(pack_messages(KEY, BASE_MS, np.arange(count) + BASE_MS, bodies, replaced))


@pytest.mark.parametrize("conditional", [False, True])
def test_what_stays_is_the_same_and_what_goes_is_none(conditional: bool) -> None:
    """Any choice of any bodies, dropped ones and empty choices among them, is as if they had been packed so."""
    source = random.Random(5)
    for count in (1, 2, 7, 192):
        for _ in range(20):
            bodies = [source.randbytes(source.choice((0, 1, 40))) for _ in range(count)]
            keep = np.array([source.random() < source.choice((0.1, 0.5, 1.0)) for _ in range(count)])
            run = Run("a", KEY, packed(bodies, conditional=conditional))
            expected = [body if kept else b"" for body, kept in zip(bodies, keep, strict=True)]
            assert run.keeping(keep) == packed(expected, conditional=conditional)
            assert Run("a", KEY, run.keeping(keep)).fixed() == run.fixed()


def test_a_damaged_body_stays_damaged() -> None:
    """Its checksum is copied, not computed, so that it is reported from the copy too."""
    value = bytearray(packed([b"one", b"two", b"three"]))
    value[-7] ^= 1  # in "two"
    thin = Run("a", KEY, Run("a", KEY, bytes(value)).keeping(np.array([False, True, True])))
    assert thin.body(0) is None
    assert thin.body(2) == b"three"
    with pytest.raises(CorruptEntry, match="checksum"):
        thin.body(1)


def test_a_body_outside_its_run_is_found_before() -> None:
    """Such a run cannot be thinned."""
    value = packed([b"one", b"two"])
    assert Run("a", KEY, value).bodies_fit
    assert not Run("a", KEY, value[:-1]).bodies_fit
