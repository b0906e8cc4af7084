"""One checksum, whatever computes it."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.store.codec import checksum
from tests.conftest import present


def loaded_anew() -> ModuleType:
    """The module as a process that starts now would have it."""
    spec = present(importlib.util.spec_from_file_location("checksum_anew", checksum.__file__))
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(st.binary(max_size=3_000), st.integers(0, 2**32 - 1))
def test_a_store_does_not_differ_by_what_computes_its_checksums(data: bytes, value: int) -> None:
    """The same number as zlib's, of bytes and of a view, from the start and going on."""
    assert checksum.crc32(data, value) == checksum.crc32(memoryview(data), value) == zlib.crc32(data, value)
    assert checksum.crc32(data) == zlib.crc32(data)


def test_isal_is_used_where_it_is_and_never_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it zlib computes them."""
    isal = pytest.importorskip("isal.isal_zlib")
    assert loaded_anew().crc32 is isal.crc32
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert loaded_anew().crc32 is zlib.crc32
