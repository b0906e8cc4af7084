"""Generations that were compacted from a copy: they lie beside it until the process that ships there takes them.

    <prefix>/compacted/<partition>-g<generation>-<unique>-<bytes>-<crc>.mdb

Whoever compacts puts one once it is verified, and the store that ships there decides, as about those that it finds on
its own disk (cleanup/adoption.py): of two for one partition it takes one, and what does not fit any more it refuses.
"""

import logging
import re
import uuid
from pathlib import Path

from duelog.backup import describe
from duelog.cleanup.compaction import Staged, hand_over
from duelog.partitions.timespan import directory_name, parse_directory_name
from duelog.store.errors import ReplicaDamaged
from duelog.store.files.directory import remove_tree
from duelog.store.files.system_errors import explained, require_space

from .bucket import COMPACTED, Bucket
from .file_download import download
from .manifest import ReplicaFile

_log = logging.getLogger("duelog.replica")

_NAME = re.compile(rf"{COMPACTED}/(\w+)-g(\d+)-(\w+)-(\d+)-([0-9a-f]{{8}})\.mdb")


def put_compacted(bucket: Bucket, staged: Staged) -> str:
    """Put a verified generation beside the copy; the object's name. Raises ReplicaUnreachable."""
    path = Path(staged.directory) / "data.mdb"
    size, crc = describe(path)
    partition, unique = directory_name(staged.start_ms), uuid.uuid4().hex
    name = f"{COMPACTED}/{partition}-g{staged.generation:06d}-{unique}-{size}-{crc:08x}.mdb"
    bucket.put(name, path)
    return name


def compacted_waiting(bucket: Bucket) -> frozenset[tuple[int, int]]:
    """(start, generation) of what lies there and is not taken yet. Raises ReplicaUnreachable."""
    names = [_NAME.fullmatch(each.name) for each in bucket.listing(COMPACTED)]
    return frozenset((parse_directory_name(each[1]), int(each[2])) for each in names if each is not None)


def take_compacted(bucket: Bucket, store: Path, kept_bytes: int) -> None:
    """Fetch what was compacted elsewhere to where a store looks for finished generations.

    kept_bytes: of the disk that stay free. One that is damaged is removed. Raises ReplicaUnreachable, StoreFull.
    """
    for listed in bucket.listing(COMPACTED):
        found = _NAME.fullmatch(listed.name)
        if found is not None:
            partition, generation, unique, size, crc = found.groups()
            start_ms = parse_directory_name(partition)
            directory = store / "staging" / f"compact-{partition}-{unique}"
            require_space(store, int(size) + kept_bytes, "for a partition that was compacted elsewhere")
            file = ReplicaFile(start_ms, int(generation), 0, listed.name, int(size), int(crc, 16))
            try:
                with explained(store):
                    download(bucket, file, directory)
                    hand_over(store, Staged(str(directory), start_ms, int(generation), int(size), 0, 0, 0))
            except ReplicaDamaged as error:
                _log.error("%s", error)
            finally:
                remove_tree(directory)
        bucket.delete([listed.name])
