"""The power goes for a real file system: one on a loop device is shut down in the middle of a run, then mounted.

What the page cache holds and the file system's log has not is gone then; a simulated power cut (test_power_cut) is
harsher, and this shows that it asks for nothing that a kernel would not do. Needs root and a loop device.
`DUELOG_SHUT_DOWNS=100` in the environment makes more rounds than the default.
"""

import fcntl
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disaster.power_work import WorkFacts
from tests.disaster.running import memory, module
from tests.proof import length

CUTS = length("DUELOG_SHUT_DOWNS", 1, 3)
FILE_SYSTEMS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
DISK_BYTES = 320 << 20
FACTS = 2_400
"""A run tells about so many before it ends; the power goes after some of them."""

_SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN of the kernel's include/uapi/linux/fs.h."""
_NO_LOG_FLUSH = b"\2\0\0\0"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Disk:
    """A file system in a file of a directory, mounted on `root`."""

    def __init__(self, directory: Path, file_system: str) -> None:
        self._file_system = file_system
        self._image = directory / "disk.img"
        self.root = directory / "mounted"
        self.root.mkdir(exist_ok=True)
        with self._image.open("wb") as image:
            image.truncate(DISK_BYTES)
        _run(*FILE_SYSTEMS[file_system], str(self._image))
        self.mount()

    def mount(self) -> None:
        options = "loop,nouuid" if self._file_system == "xfs" else "loop"
        _run("mount", "-o", options, str(self._image), str(self.root))

    def unmount(self) -> None:
        _run("umount", str(self.root))

    def mount_again(self) -> None:
        """Mount a copy of what the disk has: a mount namespace that has begun meanwhile keeps it mounted, shut down."""
        self.unmount()
        copy = self._image.with_name("copy.img")
        _run("cp", "--sparse=always", str(self._image), str(copy))
        self._image = copy
        self.mount()

    def shut_down(self) -> None:
        """Have nothing more of it reach the disk, its log neither."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(descriptor)


@pytest.fixture(params=FILE_SYSTEMS)
def disk(request: pytest.FixtureRequest) -> Iterator[Disk]:
    """An empty disk; skips where no file system of the kind can be mounted."""
    if os.geteuid():
        pytest.skip("not root")
    for name in (FILE_SYSTEMS[request.param][0], "mount", "umount"):
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")
    with tempfile.TemporaryDirectory(prefix="duelog-disk-", dir=memory()) as directory:
        try:
            disk = Disk(Path(directory), request.param)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device can be mounted: {error}")
        try:
            yield disk
        finally:
            disk.unmount()


@pytest.mark.fault
@pytest.mark.series
@pytest.mark.parametrize("durability", ["commit", "relaxed"])
@pytest.mark.parametrize("cut", range(CUTS))
def test_what_was_acknowledged_outlives_a_file_system_that_is_shut_down(disk: Disk, cut: int, durability: str) -> None:
    """The store opens on what the file system has after it, and the rules of the kill test hold."""
    facts_told = WorkFacts()
    told = facts_told.told
    wait_for = random.Random(cut).randrange(20, FACTS)
    asked = ["--store", str(disk.root / "store"), "--seed", str(cut), "--durability", durability]
    command = module("tests.disaster.power_cut", "power_work", *asked)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        facts = []
        for line in child.stdout:
            if not line.endswith(b"\n"):  # it was killed in the middle of it
                break
            facts.append(json.loads(line))
            if len(facts) == wait_for:
                disk.shut_down()
                child.kill()
    for number, fact in enumerate(facts):
        if number < wait_for or fact[0] != "trouble":  # a disk that is gone is one to a program
            told.take(fact)
    assert told.listeners
    assert len(facts) >= wait_for, f"{len(facts)} facts, {wait_for} were waited for"
    disk.mount_again()
    assert not facts_told.troubles_of(disk.root / "store", relaxed=durability == "relaxed")
