"""What a store holds, so that a test can see that nothing has changed."""

from __future__ import annotations

from pathlib import Path

from duelog import DelayedStore
from duelog.store.environment import Environment


def records(store: DelayedStore) -> dict[str, object]:
    """Every record of an open store, by environment and key, and every directory."""
    engine = store._engine
    found: dict[str, object] = {"tree": sorted(str(path.relative_to(store.path)) for path in store.path.rglob("*"))}
    found["main"] = _all(engine.main)
    for partition in engine.partitions:
        with engine.partitions.lease(partition):
            found[partition.name] = _all(partition.environment)
    return found


def _all(environment: Environment) -> dict[bytes, bytes]:
    with environment.read() as raw:
        return {bytes(key): bytes(value) for key, value in raw.cursor()}


def files(path: Path) -> dict[str, bytes | None]:
    """Every file under a path with its content, and every directory. REQUIRES: nobody has a store in it open.

    Without the files of locks, which opening may touch.
    """
    locks = {"LOCK", "lock.mdb"}
    return {
        str(found.relative_to(path)): found.read_bytes() if found.is_file() else None
        for found in sorted(path.rglob("*"))
        if found.name not in locks
    }
