"""Damage to single small records of a closed store: flipped, missing, alone or with the copy that each has."""

from collections.abc import Callable
from pathlib import Path

import lmdb

from duelog.store.codec.format import Table, copy_key

Damage = Callable[[Path, bytes], None]


def keys(directory: Path, table: Table) -> list[bytes]:
    """Keys of the records of a table in an environment's directory."""
    with lmdb.open(str(directory), readonly=True, lock=False, max_dbs=0) as environment, environment.begin() as raw:
        return [bytes(key) for key, _ in raw.cursor() if key[0] == table]


def environments(store: Path) -> list[Path]:
    """The directories of main and of every generation of a partition."""
    return [store / "main", *sorted(store.glob("partitions/*/g*"))]


def forget_applied(store: Path) -> None:
    """Leave nothing in the segments of the write-ahead log, all of which are applied: else a repair draws on them."""
    for segment in (store / "wal").glob("*.wal"):
        with segment.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(segment.stat().st_size - 4096))


def flip(directory: Path, key: bytes, at: int | None = None) -> None:
    """Flip a bit of a value: of the byte `at`, else in the middle of a record's fields, or of its checksum."""
    with lmdb.open(str(directory), map_size=1 << 30) as environment, environment.begin(write=True) as raw:
        value = bytearray(raw.get(key, b""))
        value[max(len(value) - 4, 1) // 2 if at is None else at] ^= 1
        raw.put(key, bytes(value))


def remove(directory: Path, key: bytes) -> None:
    """Remove a record, and not its copy."""
    with lmdb.open(str(directory), map_size=1 << 30) as environment, environment.begin(write=True) as raw:
        assert raw.delete(key)


DAMAGES: dict[str, Damage] = {"flipped": flip, "missing": remove}


def both(damage: Damage) -> Damage:
    """The same damage to a record and to its copy, where it has one."""

    def damage_both(directory: Path, key: bytes) -> None:
        for each in {key, copy_key(key)} & {*keys(directory, Table(key[0])), *keys(directory, Table.COPY)}:
            damage(directory, each)

    return damage_both


IN_BOTH = {name: both(damage) for name, damage in DAMAGES.items()}
