"""Documents: small durable records that a program keeps beside its messages, changed by compare-and-set.

Each is a row of the main environment with a checksum and a copy, as all small records. A version is a number that the
store gives out once: it tells whether a document is the one that was read, also where it was deleted and put again.

    DOCUMENT := version:u64 value            key: the document's key in UTF-8

"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import NamedTuple, TypeVar

from ..codec import format as fmt
from ..env.environment import Environment
from ..env.transaction import Transaction, Work
from ..errors import CorruptRecord, DocumentChanged, InvalidArgument, checked_int
from . import catalog

MAX_KEY_BYTES = 500
"""Longest key in UTF-8: it is part of LMDB keys, which end at 511 bytes."""

MAX_VALUE_BYTES = 1 << 20

_VERSION = struct.Struct(">Q")

T = TypeVar("T")


class Document(NamedTuple):
    """A document as it was read. `version` is another after every change, and is never given out again."""

    value: bytes
    version: int

    def pack(self) -> bytes:
        """Fields of the record."""
        return _VERSION.pack(self.version) + self.value

    @classmethod
    def unpack(cls, fields: bytes) -> Document:
        """The inverse of `pack`. Raises CorruptRecord."""
        if len(fields) < _VERSION.size:
            raise CorruptRecord(f"document has {len(fields)} bytes")
        return cls(fields[_VERSION.size :], _VERSION.unpack_from(fields)[0])


class Documents:
    """The documents of an open store, by key. Made by DelayedStore.documents; thread-safe.

    A key is text of 1 to 500 bytes in UTF-8, a value up to 1 MiB. Each call reads them again, so that a read-only
    store sees what another process has written.
    """

    def __init__(
        self,
        main: Environment,
        check_open: Callable[[], None],
        check_writable: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        """`check_open` and `check_writable` raise where the store is not; `settle` waits for the copy, if need be."""
        self._main = main
        self._check_open = check_open
        self._check_writable = check_writable
        self._settle = settle

    def get(self, key: str) -> Document | None:
        """(value, version) of a document; None: there is none. Raises InvalidArgument, CorruptRecord."""
        self._check_open()
        fields = self._main.get(_row_key(key))
        return None if fields is None else Document.unpack(fields)

    def put(self, key: str, value: bytes | bytearray | memoryview, *, expected: int | EllipsisType | None = ...) -> int:
        """Store a document, durably, in place of one that is there; its version.

        expected: the version that must be there, None: there must be none; compared and replaced in one step.
        Left out: whatever is there. Raises DocumentChanged, with nothing stored; InvalidArgument, StoreFull,
        StoreFailed.
        """
        self._check_writable()
        return self._write(putting(key, value, expected))

    def delete(self, key: str, *, expected: int | EllipsisType | None = ...) -> bool:
        """Delete a document, durably; False: there is none. `expected`, and what it raises, as of `put`."""
        self._check_writable()
        return self._write(deleting(key, expected))

    def _write(self, work: Work[T]) -> T:
        """Write in a transaction, and wait until that is on disk."""
        value = self._main.write(work)
        self._main.flush()
        self._settle()
        return value

    def items(self, prefix: str = "") -> Iterator[tuple[str, Document]]:
        """(key, document) of those whose key begins with `prefix`, in order of key, code point by code point.

        Without building a list: they are read some at a time, so of those that are put or deleted meanwhile it says
        nothing. Raises InvalidArgument, CorruptRecord.
        """
        self._check_open()
        pages = catalog.pages(self._main, _row_key(prefix) if prefix else fmt.document_key(b""))
        return ((fmt.name_of(row), Document.unpack(fields)) for page in pages for row, fields in page)


def putting(key: str, value: bytes | bytearray | memoryview, expected: int | EllipsisType | None) -> Work[int]:
    """The unit of work of `Documents.put`. Raises InvalidArgument."""
    row, compared = _row_key(key), _checked(expected)
    try:
        content = bytes(memoryview(value))
    except TypeError:
        raise InvalidArgument("value", value, "expected bytes") from None
    if len(content) > MAX_VALUE_BYTES:
        raise InvalidArgument("value", content, f"{len(content)} bytes, over {MAX_VALUE_BYTES}")

    def work(rows: Transaction) -> int:
        _compare(rows, key, row, compared)
        version = catalog.take_numbers(rows, catalog.DOCUMENTS)
        rows.put(row, Document(content, version).pack())
        return version

    return work


def deleting(key: str, expected: int | EllipsisType | None) -> Work[bool]:
    """The unit of work of `Documents.delete`. Raises InvalidArgument."""
    row, compared = _row_key(key), _checked(expected)

    def work(rows: Transaction) -> bool:
        _compare(rows, key, row, compared)
        return rows.delete(row)

    return work


def _row_key(key: str) -> bytes:
    if not isinstance(key, str) or not key:
        raise InvalidArgument("key", key, "expected a str, not empty")
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("key", key, "has a lone surrogate") from None
    if len(encoded) > MAX_KEY_BYTES:
        raise InvalidArgument("key", key, f"{len(encoded)} bytes, over {MAX_KEY_BYTES}")
    return fmt.document_key(encoded)


def _checked(expected: int | EllipsisType | None) -> int | EllipsisType | None:
    if expected is None or isinstance(expected, EllipsisType):
        return expected
    return checked_int("expected", expected, -math.inf, "a version, or None")


def _compare(rows: Transaction, key: str, row: bytes, expected: int | EllipsisType | None) -> None:
    """Raise DocumentChanged unless the stored document has the expected version."""
    if isinstance(expected, EllipsisType):
        return
    fields = rows.get(row)
    found = None if fields is None else Document.unpack(fields).version
    if found != expected:
        raise DocumentChanged(key, expected, found)
