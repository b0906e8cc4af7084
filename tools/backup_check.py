"""A backup held against its manifest, as long as no process has opened it for writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .. import Finding
from ..backup import MANIFEST, describe

_ANOTHER = "this copy is not what was written: take another backup, or use another copy of this one"


def check_backup(path: Path, *, deep: bool = False) -> Iterator[Finding]:
    """Files that are missing or not as the backup in `path` was written; nothing for what is no untouched backup.

    A LOCK beside the manifest says that the copy has been opened for writing since: it is a store of its own then.
    `deep` compares every byte by its checksum, else sizes are compared.
    """
    manifest = path / MANIFEST
    if not manifest.exists() or (path / "LOCK").exists():
        return
    try:
        files: dict[str, tuple[int, int]] = {
            str(name): (int(size), int(crc)) for name, (size, crc) in json.loads(manifest.read_bytes())["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield Finding("error", "backup-manifest", str(manifest), f"cannot be read: {error}", _ANOTHER)
        return
    problems: dict[Path, str] = {}
    for name, (size, crc) in sorted(files.items()):
        file = path / name
        if not file.is_file():
            problems[file] = "is missing"
        elif (found := file.stat().st_size) != size:
            problems[file] = f"is {found} bytes, was written with {size}"
        elif deep and describe(file)[1] != crc:
            problems[file] = "does not match the checksum in the manifest"
    more = set(path.glob("partitions/*/g*/data.mdb")) - {path / name for name in files}
    problems |= dict.fromkeys(sorted(more), "is not in the manifest")
    for file, message in problems.items():
        yield Finding("error", "backup-file", str(file), message, _ANOTHER)
