"""A recording of a process by strace, as operations on files and directories in the order in which they happened.

Only what lies under the recorded directory counts. Descriptors and paths are resolved to the files and directories
they stood for at that moment, so that a file keeps its writes when it is renamed.

A write counts from its beginning, a synchronous one from its end; a sync, from its end, covers the writes that had
ended when it began.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from tests.conftest import present

CALLS = (
    "open,openat,creat,close,write,pwrite64,writev,pwritev,pwritev2,lseek,fsync,fdatasync,sync_file_range,"
    "ftruncate,truncate,fallocate,rename,renameat,renameat2,link,linkat,symlink,symlinkat,mkdir,mkdirat,"
    "unlink,unlinkat,rmdir,dup,dup2,dup3,fcntl,msync,io_submit,io_getevents"
)

_SYNCS = ("fsync", "fdatasync")
_STRING = re.compile(r'"([^"]*)"')
"""A string; with `-xx` strace writes every byte of it as \\xNN."""
_VECTOR = re.compile(r'iov_base="([^"]*)"')
_NUMBER = re.compile(r"-?\d+")
_SUBMITTED = re.compile(r"aio_data=(\w+), aio_lio_opcode=(\w+), aio_fildes=(\d+)")
_ENDED = re.compile(r"data=(\w+), obj=\w+, res=0,")


_SEGMENT = re.compile(r"\d{12}\.(wal|tmp)")
"""The name under which a segment of the write-ahead log was made."""


class NotUnderstood(Exception):
    """The recorded process did something to its files that this model does not know."""


@dataclass(eq=False)
class File:
    """A file, whatever it is called."""

    name: str


@dataclass(eq=False)
class Directory:
    """A directory, whatever it is called; `live` is what is in it at the moment that the trace has come to."""

    name: str
    live: dict[str, Node] = field(default_factory=dict)


Node = File | Directory


@dataclass(eq=False)
class Write:
    """Bytes written into a file; `data` None: cut to `offset` bytes. `synced`: on disk when the call has ended."""

    file: File
    offset: int
    data: bytes | None
    synced: bool
    number: int


@dataclass(eq=False)
class Sync:
    """A sync of a file or directory has ended; of a file's writes it covers those with a lower number than `limit`."""

    node: Node
    limit: int


@dataclass(eq=False)
class Edit:
    """Entries of directories changed, all or none: (directory, name, what it now is or None)."""

    entries: list[tuple[Directory, str, Node | None]]


@dataclass(eq=False)
class Fact:
    """A fact that the process said."""

    fact: list[Any]


Operation = Write | Sync | Edit | Fact


def command(log: Path, program: Sequence[str]) -> list[str]:
    """The command that runs `program` and records it to `log`."""
    calls = ",".join(f"?{call}" for call in CALLS.split(","))
    return ["strace", "-f", "-qq", "-xx", "-s", "10000000", "--seccomp-bpf", "-e", f"trace={calls}",
            "-o", str(log), *program]  # fmt: skip


def record(log: Path, program: Sequence[str]) -> None:
    """Run a program to its end under strace. Raises CalledProcessError, with what it said."""
    subprocess.run(command(log, program), check=True, capture_output=True, text=True)


def _bytes(hexed: str) -> bytes:
    return bytes.fromhex(hexed.replace("\\x", ""))


class Trace:
    """Reads a log of strace; `root` is the recorded directory, which existed before and was empty."""

    def __init__(self, log: Path, root: Path) -> None:
        self._log = log
        self.base = str(root)
        self.root = Directory("")
        self._open: dict[int, tuple[Node, bool] | None] = {}  # descriptor -> file, synchronous
        self._offsets: dict[int, int] = {}
        self._unfinished: dict[tuple[str, str], str] = {}
        self._number = 0
        self._syncing: dict[str, int] = {}  # thread -> limit of the sync that it is at
        self._writing: dict[str, Write] = {}  # thread -> the write that it is at
        self._submitted: dict[str, Sync | None] = {}  # syncs that the kernel is at, by what they were submitted with
        self._rest = b""

    def operations(self) -> Iterator[Operation]:
        """Operations in order. Raises NotUnderstood."""
        with self._log.open(encoding="ascii") as lines:
            for line in lines:
                thread, _, said = line.rstrip("\n").partition(" ")
                said = said.lstrip()
                head, _, tail = said.rpartition("= ")
                result = _NUMBER.match(tail)
                call, opened, arguments = head.rstrip().removesuffix(")").partition("(")
                if said.startswith("<... "):
                    call, _, rest = head.rstrip().removesuffix(")").removeprefix("<... ").partition(" resumed>")
                    begun = self._unfinished.pop((thread, call))
                    if result is None:
                        continue
                    self._writing.pop(thread, None)
                    if not self._counts_from_beginning(call, begun):
                        yield from self._take(call, begun + rest, int(result[0]), self._syncing.pop(thread, None))
                elif said.endswith(" <unfinished ...>"):
                    call, _, arguments = said.removesuffix(" <unfinished ...>").partition("(")
                    self._unfinished[thread, call] = arguments
                    if call in _SYNCS:
                        self._syncing[thread] = self._limit(int(arguments))
                    if self._counts_from_beginning(call, arguments):
                        for operation in self._take(call, arguments, None):
                            if isinstance(operation, Write):
                                self._writing[thread] = operation
                            yield operation
                elif opened and result is not None:
                    yield from self._take(call, arguments, int(result[0]))
                elif not said.startswith(("--- ", "+++ ")) and tail != "?":
                    raise NotUnderstood(line[:200])

    def _take(self, call: str, arguments: str, result: int | None, limit: int | None = None) -> Iterator[Operation]:
        if result is not None and result < 0:
            return
        if _writes(call):
            yield from self._write(call, arguments, result)
        elif call in _SYNCS:
            entry = self._open.get(int(arguments))
            if entry is not None:
                yield Sync(entry[0], self._limit(int(arguments)) if limit is None else limit)
        elif call == "io_submit":
            for data, opcode, descriptor in _SUBMITTED.findall(arguments):
                if opcode not in ("IOCB_CMD_FDSYNC", "IOCB_CMD_FSYNC"):
                    raise NotUnderstood(opcode)
                entry = self._open.get(int(descriptor))
                self._submitted[data] = None if entry is None else Sync(entry[0], self._limit(int(descriptor)))
        elif call == "io_getevents":
            ended = [self._submitted.pop(data) for data in _ENDED.findall(arguments)]
            yield from (sync for sync in ended if sync is not None)
        elif call in ("open", "openat", "creat"):
            yield from self._opened(call, arguments, result or 0)
        elif call == "close":
            self._open.pop(int(arguments), None)
        elif call == "lseek":
            self._offsets[int(arguments.split(",", 1)[0])] = result or 0
        elif call in ("dup", "dup2", "dup3") or (call == "fcntl" and "F_DUPFD" in arguments):
            self._open[result or 0] = self._open.get(int(arguments.split(",", 1)[0]))
        elif call != "fcntl":
            yield from self._edit(call, arguments)

    def _limit(self, descriptor: int) -> int:
        """The number below which every write to a file has ended."""
        entry = self._open.get(descriptor)
        under_way = [write.number for write in self._writing.values() if entry is not None and write.file is entry[0]]
        return min([self._number, *under_way])

    def _counts_from_beginning(self, call: str, arguments: str) -> bool:
        """True if a call counts from its beginning: a write may be on disk then, a closed descriptor in use again."""
        if not _writes(call):
            return call == "close"
        entry = self._open.get(int(arguments.split(",", 1)[0]))
        return entry is None or not entry[1]

    def _write(self, call: str, arguments: str, result: int | None) -> Iterator[Operation]:
        descriptor = int(arguments.split(",", 1)[0])
        data = b"".join(_bytes(found) for found in (_VECTOR if "writev" in call else _STRING).findall(arguments))
        if descriptor == 1 and 1 not in self._open:
            yield from self._said(data)
            return
        entry = self._open.get(descriptor)
        if entry is None:
            return
        if result is not None and result != len(data):
            raise NotUnderstood(f"a short write: {result} of {len(data)} bytes")
        if call in ("pwrite64", "pwritev"):
            offset = int(arguments.rsplit(",", 1)[1])
        elif call == "pwritev2":
            offset = int(arguments.rsplit(",", 2)[1])
        elif call in ("write", "writev"):
            offset = self._offsets.get(descriptor, 0)
            self._offsets[descriptor] = offset + len(data)
        else:
            raise NotUnderstood(call)
        assert isinstance(entry[0], File)
        yield self._numbered(entry[0], offset, data, entry[1])

    def _numbered(self, file: File, offset: int, data: bytes | None, synced: bool = False) -> Write:
        self._number += 1
        return Write(file, offset, data, synced, self._number - 1)

    def _said(self, data: bytes) -> Iterator[Operation]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield Fact(json.loads(line))

    def _find(self, path: bytes, at: str | None) -> tuple[Directory, str] | None:
        """The directory of a path and the last name in it; None: outside of what is recorded."""
        text = os.fsdecode(path)
        if text.startswith("/"):
            if not text.startswith(self.base + "/"):
                return None
            node: Node = self.root
            text = text[len(self.base) + 1 :]
        elif at is None or "AT_FDCWD" in at or self._open.get(int(at)) is None:
            return None
        else:
            entry = present(self._open[int(at)])
            node = entry[0]
        *parents, name = text.rstrip("/").split("/")
        for parent in parents:
            assert isinstance(node, Directory)
            if parent not in node.live:
                return None
            node = node.live[parent]
        assert isinstance(node, Directory)
        return node, name

    def _opened(self, call: str, arguments: str, descriptor: int) -> Iterator[Operation]:
        at = arguments.split(",", 1)[0].strip() if call == "openat" else None
        hexed = _STRING.search(arguments)
        path = b"" if hexed is None else _bytes(hexed[1])
        self._open.pop(descriptor, None)
        self._offsets[descriptor] = 0
        if os.fsdecode(path) == self.base:
            self._open[descriptor] = (self.root, False)
            return
        found = self._find(path, at)
        if found is None:
            return
        parent, name = found
        node = parent.live.get(name)
        if node is None:
            if "O_CREAT" not in arguments:
                raise NotUnderstood(f"{name} was opened, and was never made")
            node = File(name)
            parent.live[name] = node
            yield Edit([(parent, name, node)])
        elif "O_TRUNC" in arguments and isinstance(node, File):
            yield self._numbered(node, 0, None)
        self._open[descriptor] = (node, "O_DSYNC" in arguments or "O_SYNC" in arguments)

    def _edit(self, call: str, arguments: str) -> Iterator[Operation]:
        paths = [_bytes(found) for found in _STRING.findall(arguments)]
        ats = re.findall(r"(?:^|, )(AT_FDCWD|\d+)(?=, \")", arguments)
        if call == "ftruncate":
            entry = self._open.get(int(arguments.split(",", 1)[0]))
            if entry is not None and isinstance(entry[0], File):
                yield self._numbered(entry[0], int(arguments.split(",")[1]), None)
            return
        places = [self._find(path, ats[at] if at < len(ats) else None) for at, path in enumerate(paths)]
        if not any(places):
            return
        there = [place for place in places if place is not None]
        assert len(there) == len(places)
        source, target = there[0], there[-1]
        entries: list[tuple[Directory, str, Node | None]]
        if call in ("mkdir", "mkdirat"):
            entries = [(*source, Directory(source[1]))]
        elif call in ("unlink", "unlinkat", "rmdir"):
            entries = [(*source, None)]
        elif call in ("rename", "renameat", "renameat2"):
            entries = [(*source, None), (*target, source[0].live[source[1]])]
        elif call in ("link", "linkat"):
            entries = [(*target, source[0].live[source[1]])]
        else:
            raise NotUnderstood(f"{call} under the recorded directory")
        for directory, name, node in entries:
            if node is None:
                directory.live.pop(name)
            else:
                directory.live[name] = node
        yield Edit(entries)


def _writes(call: str) -> bool:
    return "write" in call


def is_group(operation: Operation) -> TypeGuard[Write]:
    """True if it writes a group to a segment of the write-ahead log: a file that may have been renamed since."""
    return isinstance(operation, Write) and operation.offset > 0 and _SEGMENT.fullmatch(operation.file.name) is not None
