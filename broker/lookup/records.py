"""Documents of one kind, kept in memory: read without waiting, changed by compare-and-set.

All belongs to the event loop's thread; what waits for the disk does so in another.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

from ...store.errors import CorruptRecord, DocumentChanged
from ...store.log.documents import Document, Documents


class Value(Protocol):
    """What a record holds."""

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self: ...


V = TypeVar("V", bound=Value)


class Records(Generic[V]):
    """Values by name."""

    def __init__(self, documents: Documents, kind: str, cls: type[V]) -> None:
        """kind: what the keys of the documents begin with."""
        self._documents = documents
        self._prefix = f"{kind}/"
        self._cls = cls
        self._values: dict[str, V] = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read all of them; before the first use."""

        def work() -> dict[str, V]:
            found = self._documents.items(self._prefix)
            return {key.removeprefix(self._prefix): self._read(key, document) for key, document in found}

        self._values = await asyncio.to_thread(work)

    def get(self, name: str) -> V | None:
        """The value, None if there is none."""
        return self._values.get(name)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Names that begin so, in order."""
        return iter(sorted(name for name in self._values if name.startswith(prefix)))

    async def change(self, name: str, change: Callable[[V | None], V | None]) -> V | None:
        """Put what `change` makes of the value, None for none, durably; that. `change` may be called again."""

        def work() -> V | None:
            key = self._prefix + name
            while True:
                document = self._documents.get(key)
                before = None if document is None else self._read(key, document)
                after = change(before)
                if after == before or self._write(key, after, document):
                    return after

        async with self._changing:
            after = await asyncio.to_thread(work)
            if after is None:
                self._values.pop(name, None)
            else:
                self._values[name] = after
            return after

    async def add(self, name: str, value: V) -> bool:
        """Put a value where there is none; False: there is one."""
        added = False

        def change(before: V | None) -> V:
            nonlocal added
            added = before is None
            return value if before is None else before

        await self.change(name, change)
        return added

    async def remove(self, name: str) -> None:
        """Have there be none."""
        await self.change(name, lambda before: None)

    def _read(self, key: str, document: Document) -> V:
        try:
            return self._cls.from_json(json.loads(document.value))
        except (ValueError, LookupError, TypeError) as error:
            raise CorruptRecord(f"document {key} is of no known form: {error!r}") from error

    def _write(self, key: str, value: V | None, before: Document | None) -> bool:
        """False: another was quicker."""
        expected = None if before is None else before.version
        try:
            if value is not None:
                self._documents.put(key, json.dumps(value.to_json(), sort_keys=True).encode(), expected=expected)
            else:
                self._documents.delete(key, expected=expected)
        except DocumentChanged:
            return False
        return True
