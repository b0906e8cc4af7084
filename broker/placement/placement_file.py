"""The placement table's file: taken anew when it changes, and the one line that moving a namespace changes.

A file that cannot be read any more is logged once, and the table before it stays.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...store.errors import DuelogError, InvalidArgument
from ...store.files.directory import write_file
from .placement import Placement, parse_placement, read_placement

_log = logging.getLogger("duelog.broker.placement")

_HEADER = re.compile(r"\s*\[[^\[\]]+\]\s*(#.*)?")
_NAMESPACES = re.compile(r"\s*\[\s*namespaces\s*\]\s*(#.*)?")


class PlacementFile:
    """A table that is kept up with its file. `table` may be read by any thread."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises InvalidArgument, OSError."""
        self.path = path
        self._stamp = self._stamp_now()
        self.table = read_placement(path)

    def refresh(self) -> bool:
        """Take the table anew if the file has changed; False: it is as it was. For a timer; waits for the disk."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.table = read_placement(self.path)
        except (DuelogError, OSError, UnicodeDecodeError) as error:
            _log.error("%s cannot be used; the table before it stays: %s", self.path, error)
            return False
        _log.info("%s: a new placement is in use", self.path)
        return True

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def place_namespace(path: Path, namespace: str, broker: str) -> Placement:
    """Have a broker serve a namespace from now on: one line of the file is changed, the rest stays as it is.

    The file is replaced as a whole and durably; two callers at one moment, in two processes too, change it one after
    the other. Raises InvalidArgument, OSError.
    """
    with _locked_directory(path.parent):
        return _place(path, namespace, broker)


@contextmanager
def _locked_directory(path: Path) -> Iterator[None]:
    """Keep others that do the same out. The lock is the directory's: the file is another one each time it changes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _place(path: Path, namespace: str, broker: str) -> Placement:
    text = path.read_text(encoding="utf-8")
    before = parse_placement(text, path)
    if broker not in before.brokers:
        raise InvalidArgument("broker", broker, f"expected a broker of {path}: {', '.join(before.brokers)}")
    wanted = replace(before, namespaces={**before.namespaces, namespace: broker})
    if path.suffix == ".json":
        found = json.loads(text)
        found.setdefault("namespaces", {})[namespace] = broker
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    else:
        text = _with_line(text, namespace, broker)
    after = parse_placement(text, path)
    if after != wanted:
        raise InvalidArgument("placement", str(path), f'write "{namespace}" = "{broker}" into [namespaces] by hand')
    write_file(path, text.encode())
    return after


def _with_line(text: str, namespace: str, broker: str) -> str:
    """TOML with `namespace` placed; every other line as it was."""
    entry = f"{json.dumps(namespace)} = {json.dumps(broker)}"
    ours = re.compile(rf"""\s*["']{re.escape(namespace)}["']\s*=""")
    lines = text.splitlines()
    header = next((at for at, line in enumerate(lines) if _NAMESPACES.fullmatch(line)), None)
    if header is None:
        return "\n".join([*lines, "", "[namespaces]", entry, ""])
    end = next((at for at in range(header + 1, len(lines)) if _HEADER.fullmatch(lines[at])), len(lines))
    for at in range(header + 1, end):
        if ours.match(lines[at]):
            lines[at] = entry
            return "\n".join([*lines, ""])
    lines.insert(header + 1, entry)
    return "\n".join([*lines, ""])
