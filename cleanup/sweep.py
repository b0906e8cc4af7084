"""The sweep: the remains of a crash are finished or removed when a store is opened for writing.

Deletions that were recorded, ledgers that were trimmed, directories in staging/ and trash/, and
partition directories that were never registered: nothing in those was ever acknowledged to a producer.
Finished generations in staging/ready/ are left to adoption.
"""

from pathlib import Path

from ..partitions.away import directory_in_use
from ..partitions.partition import partition_path
from ..store.codec.format import PartitionState
from ..store.env.environment import Environment
from ..store.errors import DamagedStore
from ..store.files import pages
from ..store.files.directory import make_directory, move_to_trash, remove_tree
from ..store.log import catalog
from .compaction import READY
from .deletion import remove_recorded
from .trim import remove_ledgers, remove_unnamed_bodies, unfinished


def sweep(path: Path, main: Environment) -> None:
    """Finish or remove the remains of a crash. REQUIRES: the store's lock, and no partition open.

    Raises DamagedStore, and removes nothing, for a partition that holds messages and that the catalog does not know:
    one is registered before it is used, so the catalog has lost it.
    """
    with main.read() as raw:
        registered = catalog.partitions(raw)
    paths = {partition_path(path, start_ms, record.generation): record for start_ms, record in registered}
    _refuse_lost_partitions(path, {generation.parent for generation in paths})
    for start_ms, record in registered:
        if record.state is PartitionState.DELETING:
            remove_recorded(path, main, start_ms, record.generation)
    remove_ledgers(main, unfinished(main))
    remove_unnamed_bodies(main)
    _clear(path / "trash")
    _clear(path / "staging", keep=READY)
    kept = {
        directory_in_use(generation)
        for generation, record in paths.items()
        if record.state is not PartitionState.DELETING
    }
    make_directory(path / "partitions")
    for directory in sorted((path / "partitions").iterdir()):
        for generation in sorted(directory.iterdir()) if directory.is_dir() else ():
            if generation not in kept:
                throw_away(path, generation)
        if directory.is_dir() and not any(directory.iterdir()):
            throw_away(path, directory)


def _refuse_lost_partitions(path: Path, known: set[Path]) -> None:
    parent = path / "partitions"
    for directory in sorted(parent.iterdir()) if parent.is_dir() else ():
        if directory in known or not directory.is_dir():
            continue
        for generation in directory.glob("g*"):
            if (generation / "data.mdb").is_file() and was_used(generation):
                raise DamagedStore(generation, "holds messages and is not in the catalog")


def was_used(generation: Path) -> bool:
    """True where a generation has rows beside its description and the copy of that: messages. Raises DamagedStore."""
    return pages.inspect(generation).rows > 2


def _clear(directory: Path, keep: str | None = None) -> None:
    make_directory(directory)
    for child in sorted(child for child in directory.iterdir() if child.name != keep):
        remove_tree(child) if child.is_dir() else child.unlink()


def throw_away(path: Path, directory: Path) -> None:
    """Remove a directory that no record refers to, if it is there: it is whole until it is gone from its place."""
    remove_tree(move_to_trash(path, directory))
