"""`duelog check`: a store looked at from outside, whatever its files hold, without dying of it.

First the pages of every environment are read as bytes, which nothing can die of. Where they are whole, LMDB reads them
safely, and the check of an open store runs here; else it runs in a child process, and its death becomes a finding.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import lmdb

from .. import DuelogError, Finding
from ..backup import MANIFEST, describe
from ..check.check_store import check_lateness
from ..partitions.away import AWAY, Away, directory_in_use
from ..store.errors import AlreadyOpen, DamagedStore, StoreUnavailable
from ..store.files import pages
from ..store.files.directory import children
from ..store.files.system_errors import explain, explained
from .values import open_to_read, stored_identity

_RESTORE = "run `duelog repair` on a copy of the store, or restore a backup"
_ANOTHER = "this copy is not what was written: take another backup, or use another copy of this one"


def _error(code: str, address: Path, message: str) -> Finding:
    return Finding("error", code, str(address), message, _RESTORE)


Progress = Callable[[int, int], object]
"""Called with how much has been read, and of how much: of environments by their pages, then by their entries."""


def check_store(path: Path, *, deep: bool = False, progress: Progress = lambda done, total: None) -> list[Finding]:
    """Every problem of the store in `path`, beside a writing process too; nothing is changed.

    O(pages) and O(headers of the entries); `deep`: O(bytes). Raises nothing for what the files hold; StoreUnavailable
    where this process may not read them, or has too little to: that is no damage.
    """
    with explained(path):
        try:
            stored_identity(path)
        except StoreUnavailable:
            raise
        except (DuelogError, ValueError) as error:
            return [Finding("error", "store-file", str(path / "STORE"), str(error), "restore the file from a backup")]
        findings = list(check_backup(path, deep=deep))
        directories = environments(path)
        for done, directory in enumerate(directories):
            progress(done, 2 * len(directories))
            findings += check_file(directory)
        read = len(directories)
        progress(read, 2 * read)
        if findings:  # reading on may be the death of the process
            findings += _check_in_child(path, deep)
        else:
            findings += check_opened(path, deep, lambda done, partitions: progress(read + done, read + partitions + 1))
        return list(dict.fromkeys(findings))


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


def check_punctuality(path: Path) -> list[Finding]:
    """Find late and overdue messages in a store without a finding, as warnings, by topic."""
    with open_to_read(path) as opened:
        engine = opened._engine
        return list(check_lateness(engine.storage.main, engine.storage.partitions, engine.clock.now_ms()))


def environments(path: Path) -> list[Path]:
    """The directories of a store's environments, whether the catalog knows them or not."""
    partitions = children(path / "partitions")
    generations = [found for directory in partitions for found in children(directory) if found.name[0] in "ag"]
    return [path / "main", *(found for found in generations if found.is_dir())]


def away_in(path: Path) -> Counter[str]:
    """How many partitions of a store are in a copy alone, by its URL. Raises DamagedStore."""
    used = (directory_in_use(directory / "g000001") for directory in children(path / "partitions"))
    return Counter(Away.read(each).url for each in used if (each / AWAY).is_file())


def check_file(directory: Path) -> Iterator[Finding]:
    """Findings about the pages of one environment, which this process must not have open."""
    address = directory / "data.mdb"
    try:
        problems = _problems(directory, pages.inspect(directory))
    except DamagedStore as error:
        if directory.exists():  # else the writing process has just removed it
            yield _error("damaged-file", address, error.reason)
        return
    for problem in problems:
        yield _error("page", address, problem)


def _problems(directory: Path, known: pages.DataFile) -> list[str]:
    """Problems of the pages as of one commit, also while another process writes.

    Raises DamagedStore, StoreUnavailable, and AlreadyOpen where this process has the environment open.
    """
    map_bytes = max(known.file_bytes * 2, 1 << 20)
    try:
        with lmdb.open(os.fspath(directory), map_size=map_bytes, readonly=True, create=False, max_dbs=0) as environment:
            while True:
                with environment.begin() as transaction:  # reads no page but the two meta pages
                    found = pages.find_problems(directory, transaction.id())
                if found is not None:
                    return found
    except lmdb.Error as error:
        explanation = explain(directory / "data.mdb", error)
        if isinstance(explanation, (StoreUnavailable, AlreadyOpen)):  # no fault of the file's
            raise explanation from error
        raise DamagedStore(directory / "data.mdb", f"cannot be opened: {error}") from error


def check_opened(path: Path, deep: bool, progress: Progress | None = None) -> list[Finding]:
    """Findings of the store opened read-only; an error at opening is one."""
    try:
        with open_to_read(path) as opened:
            return list(opened.check(deep=deep, progress=progress))
    except DamagedStore as error:
        return [_error("damaged-store", error.path, error.reason)]
    except StoreUnavailable:
        raise
    except (DuelogError, lmdb.Error, ValueError, LookupError) as error:
        return [_error("unreadable", path, f"the check could not go on ({type(error).__name__}: {error})")]


def _check_in_child(path: Path, deep: bool) -> list[Finding]:
    command = [sys.executable, "-m", __name__, os.fspath(path), *(["--deep"] if deep else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    except subprocess.TimeoutExpired:
        return [_error("hangs", path, "reading it does not come to an end")]
    findings = [Finding(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode < 0:
        findings.append(_error("kills-its-reader", path, f"reading it kills a process (signal {-done.returncode})"))
    elif done.returncode:
        lines = done.stderr.strip().splitlines()
        last = lines[-1] if lines else done.returncode
        findings.append(_error("unreadable", path, f"the check of what can be read failed: {last}"))
    return findings


def main(arguments: list[str]) -> None:
    """Print the findings of the store opened read-only, as JSON lines. For the child process."""
    for finding in check_opened(Path(arguments[0]), "--deep" in arguments[1:]):
        print(json.dumps(asdict(finding)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
