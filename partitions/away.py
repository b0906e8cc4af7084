"""Away: of a partition whose rows are in the copy of the store, so that this machine has given their space back.

In place of the directory of its generation it has that of a *rest*, `a000001` and up: an environment with its small
records, the end of each log, and what was appended since; and the file AWAY, which names the objects that have all
else. Appending, replaying and applying the log need no more. Who reads messages has it fetched
(`PartitionSet.at_hand`).

Order of writes. A day goes: its rest is complete on disk beside it, then the directory of the generation goes. A day
comes: the generation is complete on disk, then the rest goes. So one rule says which directory counts: that of the
generation if it is there, else the last rest. What else a crash leaves is removed by the next opening. An away day goes
again, with what was appended: the next rest is complete on disk, and counts from then on.

No other process is told, and nothing of it is in the log or the catalog: who applies the log elsewhere has a day whole.
While directories change no commit is made to the one that goes, and none afterwards (`Environment.superseded`).
"""

from pathlib import Path
from typing import NamedTuple, Self

from ..store.codec.sealed_json import pack_json, unpack_json
from ..store.errors import DamagedStore
from ..store.files.system_errors import explained

AWAY = "AWAY"
_FORMAT = 1


class Piece(NamedTuple):
    """An object that has rows of a partition: those behind the piece before, up to the group `applied`.

    ledger: of an object that is a body file, and has no rows; `applied` is its length then.
    """

    name: str
    size: int
    crc: int
    applied: int
    ledger: int | None = None


class Away(NamedTuple):
    """Where the rows of an away partition are: the prefix, and its objects in order."""

    url: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of the objects."""
        return sum(piece.size for piece in self.pieces)

    @property
    def applied(self) -> int:
        """The last group with rows of the objects."""
        return max(piece.applied for piece in self.pieces if piece.ledger is None)

    def pack(self) -> bytes:
        """The content of the file AWAY."""
        fields = {"format": _FORMAT, "url": self.url, "pieces": [list(piece) for piece in self.pieces]}
        return pack_json(fields)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read that of a directory. Raises DamagedStore."""
        with explained(directory / AWAY):
            content = (directory / AWAY).read_bytes()
        try:
            fields, is_whole = unpack_json(content)
            pieces = tuple(Piece(*piece) for piece in fields["pieces"])
            if fields["format"] == _FORMAT and is_whole:
                return cls(fields["url"], pieces)
        except (ValueError, KeyError, TypeError):
            pass
        raise DamagedStore(directory / AWAY, f"cannot be read: {content[:80]!r}")


def rests(partition: Path) -> list[Path]:
    """The directories of rests of a partition, whose own directory is `partition`, the last first."""
    return sorted((each for each in partition.glob("a*") if each.name[1:].isdecimal()), reverse=True)


def is_rest(directory: Path) -> bool:
    """Return whether the directory of an environment is that of a rest."""
    return directory.name.startswith("a")


def directory_in_use(generation: Path) -> Path:
    """The directory that a partition is in: that of its generation, or the last rest where that is not there."""
    if (generation / "data.mdb").is_file():
        return generation
    return next(iter(rests(generation.parent)), generation)
