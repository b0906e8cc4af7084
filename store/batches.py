"""Items gathered into batches of a bounded size: what is read, written or removed in one transaction."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(
    items: Iterable[T], size_of: Callable[[T], int], max_size: int, max_items: int | None = None
) -> Iterator[list[T]]:
    """`items` in order, as many at a time as have `max_size` together; a larger one is a batch of its own."""
    batch: list[T] = []
    size = 0
    for item in items:
        needed = size_of(item)
        if batch and (size + needed > max_size or len(batch) == max_items):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += needed
    if batch:
        yield batch
