"""Real file systems: one in memory that fills up; one in a file that does, or is shut down as if its power had gone."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.disaster.running import memory

FILE_SYSTEMS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}

_SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN of the kernel's include/uapi/linux/fs.h."""
_NO_LOG_FLUSH = b"\2\0\0\0"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Disk:
    """A file system in a file of a directory, mounted on `root`."""

    def __init__(self, directory: Path, file_system: str, size: int) -> None:
        self._file_system = file_system
        self._image = directory / "disk.img"
        self.root = directory / "mounted"
        self.root.mkdir(exist_ok=True)
        with self._image.open("wb") as image:
            image.truncate(size)
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
        """Have nothing more of it reach the disk, its log neither: whatever a program asks of it fails."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(descriptor)


@contextmanager
def loop_disk(file_system: str, size: int) -> Iterator[Disk]:
    """An empty disk of so many bytes; skips the test where no file system of the kind can be mounted."""
    if os.geteuid():
        pytest.skip("not root")
    for name in (FILE_SYSTEMS[file_system][0], "mount", "umount"):
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")
    with tempfile.TemporaryDirectory(prefix="duelog-disk-", dir=memory()) as directory:
        try:
            disk = Disk(Path(directory), file_system, size)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device can be mounted: {error}")
        try:
            yield disk
        finally:
            disk.unmount()


@contextmanager
def full_soon(path: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of that size at a directory, in memory; skips where none can be mounted."""
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("mounting needs root and mount(8)")
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
