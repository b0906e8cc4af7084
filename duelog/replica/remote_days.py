"""Remote days of a restore: of those that are far off or over, objects lie under a new prefix, and a rest is made here.

A restored store ships to another prefix than the one that it comes from, where nothing would name the objects of its
away days, and pruning removes them. So each is put under the new prefix first, and read back from there: from then on
it is the only one. What a restore that was killed has put lies there under the same name when it is begun again.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

from duelog.partitions.away import Away, Piece
from duelog.partitions.partition import partition_path
from duelog.partitions.relocation import Ends, applied_rows, build_rest
from duelog.partitions.timespan import directory_name
from duelog.store.codec.format import PartitionRecord, PartitionState
from duelog.store.config import StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.errors import CorruptEntry, DamagedStore
from duelog.store.files.directory import discard_tree, make_directory, move
from duelog.store.files.failpoints import reach

from .bucket import Bucket
from .file_download import download, put_file
from .manifest import MAIN_START, Manifest, ReplicaFile
from .tiers import begins_to_come_ms

Days = dict[int, list[ReplicaFile]]
"""The files of days, by start."""


def files_by_day(manifest: Manifest) -> Days:
    """The files of each partition of a manifest."""
    days: Days = {}
    for file in manifest.files:
        if file.start_ms != MAIN_START:
            days.setdefault(file.start_ms, []).append(file)
    return days


def choose(days: Days, records: Mapping[int, PartitionRecord], kept_bytes: int, now_ms: int) -> set[int]:
    """The starts of days to leave away, so that the others take at most `kept_bytes`, as far as there are any.

    In the order in which an open store gives days back (tiers.py). records: those that main has.
    """
    preload_ms = StoreConfig().preload_ms
    left: set[int] = set()
    total = sum(map(size_of, days.values()))
    over = {start_ms for start_ms, record in records.items() if record.state is PartitionState.CLOSED}
    for start_ms in sorted(days, key=lambda each: (each not in over, -each)):
        if total <= kept_bytes:
            break
        size = size_of(days[start_ms])
        is_open = start_ms not in records or records[start_ms].state is PartitionState.OPEN
        if start_ms in over or (is_open and begins_to_come_ms(start_ms, size, 2 * preload_ms) > now_ms):
            left.add(start_ms)
            total -= size
    return left


def size_of(files: Iterable[ReplicaFile]) -> int:
    """Bytes of the objects."""
    return sum(file.size for file in files)


def leave_away(
    bucket: Bucket, home: Bucket, files: list[ReplicaFile], store: Path, told: Callable[[int], object]
) -> bool:
    """Put the files of a day under the prefix `home`, and a rest of it into a store that is being made.

    False: its logs cannot be read, and it is to be here. Raises ReplicaDamaged, ReplicaUnreachable, StoreFull.
    """
    start_ms, generation, name = files[0].start_ms, files[0].generation, directory_name(files[0].start_ms)
    staged = store / "staging" / f"away-{name}"
    try:
        for file in files:
            home.put(file.name, download(bucket, file, staged / "object", told, flush=False))
            discard_tree(staged / "object")
        for file in files:
            put_file(home, file, staged / "whole", flush=False)
        pieces = tuple(Piece(file.name, file.size, file.crc, file.applied, file.ledger) for file in files)
        whole = Environment(staged / "whole", name=f"partition {name}", read_only=True, lock=False)
        with closing(whole), applied_rows(whole) as raw:
            ends = Ends.of(raw, whole.name)
            build_rest(raw, whole.name, start_ms, staged / "rest", Away(home.url, pieces), ends)
        reach("away.staged")
        target = partition_path(store, start_ms, generation).with_name("a000001")
        make_directory(target.parent)
        move(staged / "rest", target)
        reach("away.gone")
    except (CorruptEntry, DamagedStore):
        return False
    finally:
        discard_tree(staged)
    return True
