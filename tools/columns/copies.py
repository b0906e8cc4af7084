"""Stores that are named by their copies in object storage: the partitions of one, and what a task needs of it."""

import re
from collections.abc import Iterator
from pathlib import Path

from ...replica.copied_store import CopiedEnvironment, CopiedStore, Excerpt
from ...store.codec.format import PartitionState
from .sealed import Sealed

_URL = re.compile(r"(s3|s3a|gs|az|abfs|abfss|file|memory):/{1,3}(.*)")


def copy_url(store: Path | str) -> str | None:
    """The URL of a copy that a store is named by; None: it is a directory. A Path has taken out slashes.

    >>> copy_url(Path("s3://bucket/orders")), copy_url(Path("data"))
    ('s3://bucket/orders', None)
    """
    found = _URL.fullmatch(str(store))
    if found is None:
        return None
    return f"{found[1]}://{'/' if found[1] in ('file', 'memory') else ''}{found[2]}"


def store_name(store: Path) -> str:
    """The name of a store as it is shown: the URL of its copy, or the directory."""
    return copy_url(store) or str(store)


def copied_partitions(copy: CopiedStore) -> Iterator[tuple[Sealed, PartitionState, CopiedEnvironment]]:
    """Each partition of a copy as its catalog has it, its state, and where it is fetched from."""
    for start_ms, part in copy.parts.items():
        record = copy.catalog[start_ms]
        size = sum(file.size for file in part.manifest.files)
        yield Sealed(part.url, start_ms, record.end_ms, record.generation, size), record.state, part


def excerpt(copy: CopiedStore, start_ms: int) -> Excerpt:
    """The part of a store that a task on one partition reads, and main with that partition alone."""
    return Excerpt(copy.main, {start_ms: copy.catalog[start_ms]}, copy.parts[start_ms], str(copy.path))
