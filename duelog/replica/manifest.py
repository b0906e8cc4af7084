"""A manifest: the files of a store as of one instant, and where in the log a restore from them goes on.

It stands at the log object of its number: everything that the instant's files rely on lies in log objects up to that
one, so it is put after it. Its files are LMDB environments, copied compacted. One is known by its partition, its
generation and the last group that is applied in it, and lies in the bucket once.
"""

from typing import Any, NamedTuple, Self

from duelog.store.codec.sealed_json import pack_json, unpack_json
from duelog.store.errors import ReplicaDamaged, ReplicaRefused

from .bucket import Bucket, manifest_name

FORMATS = (1, 2, 3)
"""2 has body files, 3 environments in several files."""

MAIN_START = -1
"""In place of a partition's start: the main environment."""


Content = tuple[int, int, int, int | None, int | None]


class ReplicaFile(NamedTuple):
    """A file of a manifest: the environment that it is a copy of, and the object that has it.

    start_ms: of the partition, MAIN_START. generation: of the partition; of the main environment the first segment that
    it says is not applied, 0 where the log was not begun. applied: the place of the last group that is applied in it.
    ledger: of a body file beside it; `applied` is how many of its bytes applied runs name then, which never change.
    None: it is LMDB's.
    after: of a file that has the rows of an environment behind another, the `applied` of that one.
    """

    start_ms: int
    generation: int
    applied: int
    name: str
    size: int
    crc: int
    ledger: int | None = None
    after: int | None = None

    @property
    def content(self) -> Content:
        """Tells its content: two files of a store with the same, put in one epoch, are of the same records."""
        return self.start_ms, self.generation, self.applied, self.ledger, self.after


class Manifest(NamedTuple):
    """The content of a manifest.

    seq: the log object that it stands at. first: the first log object that a restore applies; seq + 1: none before.
    oldest: the segment whose groups, and those after it, are not all applied; None: the log was not begun.
    next_place: groups from there on came after the instant. taken_ms: the store's time at the instant.
    """

    store_id: bytes
    partition_ms: int
    seq: int
    first: int
    oldest: int | None
    next_place: int
    taken_ms: int
    files: tuple[ReplicaFile, ...]
    epoch: int = 1

    def pack(self) -> bytes:
        """The bytes of the object: JSON, with a checksum."""
        fields: dict[str, Any] = {
            "format": self._format(),
            **self._asdict(),
            "store_id": self.store_id.hex(),
            "files": [_fields_of(each) for each in self.files],
        }
        return pack_json(fields, indent=1)

    def _format(self) -> int:
        if any(each.after is not None for each in self.files):
            return 3
        return 1 if all(each.ledger is None for each in self.files) else 2

    @classmethod
    def unpack(cls, url: str, name: str, content: bytes) -> Self:
        """Raises ReplicaDamaged, which names the object, ReplicaRefused for another format."""
        try:
            fields, is_whole = unpack_json(content)
            version = fields["format"]
            if not is_whole:
                raise ReplicaDamaged(url, name, "does not match its checksum")
            if version not in FORMATS:
                raise ReplicaRefused(url, f"{name} is of format {version}, expected {FORMATS[-1]}")
            files = tuple(ReplicaFile(**each) for each in fields["files"])
            store_id = bytes.fromhex(fields["store_id"])
            return cls(**{name: fields[name] for name in cls._fields} | {"store_id": store_id, "files": files})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReplicaDamaged(url, name, "cannot be read") from error


def _fields_of(file: ReplicaFile) -> dict[str, Any]:
    return {name: value for name, value in file._asdict().items() if value is not None}


def read_manifest(bucket: Bucket, seq: int) -> Manifest:
    """Read the manifest of a number. Raises ReplicaDamaged, ReplicaRefused, ReplicaUnreachable."""
    name = manifest_name(seq)
    content = bucket.get(name)
    if content is None:
        raise ReplicaDamaged(bucket.url, name, "is missing")
    return Manifest.unpack(bucket.url, name, content)
