"""Directories made, renamed and removed so that a power cut leaves the old state or the new one.

LMDB never syncs a directory, and a file system may forget a rename that was not synced: so every change
of a store's tree is made here.
"""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidArgument, StoreUnavailable
from .system_calls import sync_data


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create `path` and missing parents, and make them durable. An existing directory is fine.

    Raises OSError, StoreUnavailable where the file system makes none.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError as error:  # as in /proc: nothing is missing
        raise StoreUnavailable(path, f"no directory can be made in {path.parent}", error.errno) from error
    sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Create or replace a small file: a reader after a power cut finds the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(temporary))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    move(temporary, path)


def flush_file(path: Path) -> None:
    """Make the content of a file durable, whichever process wrote it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        sync_data(descriptor)
    finally:
        os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """Rename within one file system: `target` is there durably, `source` may come back at a power cut.

    For what is moved out of a place that is cleared at every open.
    """
    os.rename(source, target)
    sync_directory(target.parent)


def move_away(source: Path, target: Path) -> None:
    """Rename within one file system: `source` is gone durably, `target` may be gone too at a power cut.

    For what is moved to a place that is cleared at every open.
    """
    os.rename(source, target)
    sync_directory(source.parent)


def move_to_trash(store: Path, directory: Path) -> Path:
    """Move a directory of a store out of its place, whole, if it is there; where it is, until the next opening."""
    trash = store / "trash" / f"{directory.parent.name}-{directory.name}"
    make_directory(trash.parent)
    if directory.exists():
        remove_tree(trash)
        move_away(directory, trash)
    return trash


def remove_tree(path: Path) -> None:
    """Remove a directory and what is in it, if it is there. At a power cut parts of it may come back."""
    if path.exists():
        shutil.rmtree(path)


def discard_tree(path: Path) -> None:
    """Remove the leftovers of a failed operation, as far as possible: the next opening removes the rest."""
    with suppress(OSError):
        remove_tree(path)


def checked_path(field: str, path: object) -> Path:
    """The absolute path that a caller gives. Raises InvalidArgument, also for one without a UTF-8 form."""
    try:
        where = Path(path).absolute()  # type: ignore[arg-type]  # refused here
        encoded = str(where).encode()
    except TypeError:
        raise InvalidArgument(field, path, "expected a path") from None
    except UnicodeEncodeError:
        raise InvalidArgument(field, path, "has no UTF-8 form") from None
    if b"\0" in encoded:
        raise InvalidArgument(field, path, "has a NUL character")
    return where


def refuse_inside(field: str, path: Path, store: Path) -> None:
    """Refuse a place for new files that lies inside a store, where opening it would remove them; links are followed.

    Raises InvalidArgument for `field`.
    """
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store)):  # which stops at a link to itself
        raise InvalidArgument(field, str(path), f"lies inside the store {store}")


def children(path: Path) -> list[Path]:
    """List a directory by name; nothing where none is: another process may just have removed it."""
    try:
        return sorted(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def size_bytes(path: Path) -> int:
    """Bytes that the files under `path` occupy on disk (blocks, not lengths)."""
    total = 0
    for root, _, names in os.walk(path):
        total += sum(occupied_bytes(Path(root, name)) for name in names)
    return total


DISK_PARTS = ("main", "partitions", "wal", "attempts", "other")
"""The parts of a store by which its disk space is counted.

`wal` and `attempts` are files made in full before they are written to.
"""


def disk_parts(path: Path) -> dict[str, int]:
    """Bytes on disk of each part of the store in `path`, as of `size_bytes`; the store takes their sum."""
    named = {name: size_bytes(path / name) for name in DISK_PARTS[:-1]}
    for second in children(path / "wal" / "bodies"):  # names of files that are counted where they are used
        with suppress(FileNotFoundError):
            named["wal"] -= occupied_bytes(second) if second.stat().st_nlink > 1 else 0
    others = [child for child in path.iterdir() if child.name not in named]
    return named | {"other": sum(size_bytes(child) if child.is_dir() else occupied_bytes(child) for child in others)}


def occupied_bytes(file: Path | str) -> int:
    """Bytes that a file occupies on disk (blocks, not its length); 0 where it is not there, or not any more."""
    try:
        return os.lstat(file).st_blocks * 512
    except FileNotFoundError:
        return 0


LOOK_NS = 10_000_000
"""Time between two looks whether a file is still in its place.

Each look lets go of the interpreter lock: one in every group of sixteen threads' sends cost 12 to 25 % of their
processor time (on one processor).
"""


class InPlace:
    """Tells whether an open file is still where it was opened: one that was removed takes writes, and keeps none.

    The system goes on taking writes to a file whose directory was removed, and what they hold is gone with the process.
    """

    def __init__(self, file: Path | str) -> None:
        """Take the file that is there now for the right one."""
        self._path = os.fspath(file)
        self._look_at_ns = 0
        self._identity: tuple[int, int] | None = None
        try:
            self._identity = self._look()
        except OSError:  # another process has just removed it: it is only read
            return

    def _look(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino

    @property
    def is_replaced(self) -> bool:
        """True where another file has its name by now."""
        with suppress(OSError):
            return self._identity not in (None, self._look())
        return False

    def verify(self, now_ns: int | None = None) -> None:
        """Raise FileNotFoundError when the file was removed, moved, or replaced by another.

        now_ns: time.perf_counter_ns(); nothing is looked at within LOOK_NS of the last look. None: always look.
        """
        if now_ns is not None:
            if now_ns < self._look_at_ns:
                return
            self._look_at_ns = now_ns + LOOK_NS
        try:
            in_place = self._identity in (None, self._look())
        except (FileNotFoundError, NotADirectoryError):
            in_place = False
        except OSError:  # it cannot be told: no permission any more, say
            return
        if not in_place:
            raise FileNotFoundError(errno.ENOENT, "the file was removed or moved while the store was open", self._path)
