"""A disk to which operations are done one after the other, and what a power cut could leave of it at any moment.

What was synced stands. Of the rest:

- of the writes to a file since its last sync any subset may be on disk, each also in part: sectors of 512 bytes are
  written as a whole, in any order. A file may have its new length or end where its last written sector ends;
- of the changes of directories any selection may be on disk in which the changes of one directory are a beginning of
  what was done to it: a directory that was not synced may have forgotten what was last done. A rename is one change
  of two directories. Syncing a file does not sync its name.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.disaster.power_trace import Directory, Edit, File, Node, Operation, Sync, Write

SECTOR_BYTES = 512

Keep = Literal["none", "all", "some", "torn"]
"""Which of the operations that were not synced a state has."""

MODES: tuple[tuple[Keep, Keep], ...] = (
    ("none", "none"),
    ("all", "none"),
    ("none", "all"),
    ("some", "all"),
    ("torn", "all"),
    ("some", "some"),
    ("torn", "some"),
    ("all", "some"),
)
"""The share that is kept of (writes, changes of directories) in state after state."""


@dataclass(eq=False)
class _Image:
    synced: bytearray = field(default_factory=bytearray)
    writes: list[Write] = field(default_factory=list)
    """In order; those before the first that is not synced are in `synced` already."""

    def sync(self, limit: int) -> None:
        while self.writes and (self.writes[0].number < limit or self.writes[0].synced):
            _apply(self.synced, self.writes.pop(0))

    def add(self, write: Write) -> None:
        if write.synced and not self.writes:
            _apply(self.synced, write)
        else:
            self.writes.append(write)


class Disk:
    """The state of a disk while operations are done to it."""

    def __init__(self, root: Directory) -> None:
        self._root = root
        self._images: dict[File, _Image] = {}
        self._entries: dict[Directory, dict[str, Node]] = {root: {}}
        self._edits: list[Edit] = []

    def do(self, operation: Operation) -> None:
        if isinstance(operation, Write):
            self._images.setdefault(operation.file, _Image()).add(operation)
        elif isinstance(operation, Edit):
            self._edits.append(operation)
        elif isinstance(operation, Sync):
            if isinstance(operation.node, File):
                self._images.setdefault(operation.node, _Image()).sync(operation.limit)
            else:
                self._sync_directory(operation.node)

    def _sync_directory(self, directory: Directory) -> None:
        """Changes of it stand, with those made before them to other directories of the same changes."""
        covered = {directory}
        standing = []
        for edit in reversed(self._edits):
            touched = {entry[0] for entry in edit.entries}
            if touched & covered:
                covered |= touched
                standing.append(edit)
        self._edits = [edit for edit in self._edits if edit not in standing]
        for edit in reversed(standing):
            _rename(self._entries, edit)

    def leave(self, target: Path, mode: tuple[Keep, Keep], rng: random.Random) -> None:
        """Write what a power cut now could leave into the directory `target`; lock.mdb does not survive a boot."""
        entries = {directory: dict(names) for directory, names in self._entries.items()}
        forgetful: set[Directory] = set()
        for edit in self._edits:
            touched = {entry[0] for entry in edit.entries}
            if touched & forgetful or not (mode[1] == "all" or (mode[1] == "some" and rng.random() < 0.7)):
                forgetful |= touched
            else:
                _rename(entries, edit)
        self._leave(self._root, target, entries, lambda image: _content(image, mode[0], rng))

    def _leave(
        self,
        directory: Directory,
        target: Path,
        entries: dict[Directory, dict[str, Node]],
        content: Callable[[_Image], bytes],
    ) -> None:
        target.mkdir(exist_ok=True)
        for name, node in entries.get(directory, {}).items():
            if isinstance(node, Directory):
                self._leave(node, target / name, entries, content)
            elif name != "lock.mdb":
                (target / name).write_bytes(content(self._images.get(node, _Image())))


def _rename(entries: dict[Directory, dict[str, Node]], edit: Edit) -> None:
    for directory, name, node in edit.entries:
        names = entries.setdefault(directory, {})
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _apply(content: bytearray, write: Write, sectors: Callable[[], bool] | None = None) -> None:
    """Do a write, or those of its sectors for which `sectors` says so."""
    if write.data is None:
        del content[write.offset :]
        content.extend(bytes(write.offset - len(content)))
        return
    at, limit = write.offset, write.offset + len(write.data)
    while at < limit:
        end = limit if sectors is None else min(limit, at - at % SECTOR_BYTES + SECTOR_BYTES)
        if sectors is None or sectors():
            if len(content) < at:
                content.extend(bytes(at - len(content)))
            content[at:end] = write.data[at - write.offset : end - write.offset]
        at = end


def _content(image: _Image, keep: Keep, rng: random.Random) -> bytes:
    if not image.writes:
        return bytes(image.synced)
    content = bytearray(image.synced)
    share = rng.random()
    for write in image.writes:
        if write.synced or keep == "all":
            _apply(content, write)
        elif keep == "torn":
            _apply(content, write, lambda: rng.random() < share)
        elif keep == "some" and rng.random() < share:
            _apply(content, write)
    if rng.random() < 0.5:  # the new length, without what was to be there
        ends = [write.offset + len(write.data) for write in image.writes if write.data is not None]
        content.extend(bytes(max(0, max(ends, default=0) - len(content))))
    return bytes(content)
