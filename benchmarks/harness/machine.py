"""Figures of the kernel about processes and files: memory, descriptors, bytes on disk (Linux)."""

import ctypes
import gc
import os
import time
from collections.abc import Iterable
from pathlib import Path


def settle_memory() -> None:
    """Give back what this process has freed, so that what is left is held."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def anonymous_bytes(pids: Iterable[int] = ()) -> int:
    """Anonymous memory of processes (this one by default), shared pages counted once: Pss_Anon and what is swapped."""
    total = 0
    for pid in pids or (os.getpid(),):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "SwapPss:")):
                total += int(line.split()[1]) * 1_024
    return total


def cpu_seconds(pids: Iterable[int] = ()) -> float:
    """Processor time that this process and others have used so far: what other work on the machine disturbs least."""
    own = os.getpid()
    total = time.process_time()
    for pid in pids:
        if pid != own:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def open_files() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def disk_bytes(directory: Path, *, logs: bool = True) -> int:
    """Bytes allocated to the files below a directory; `logs`: duelog's write-ahead log counts."""
    total = 0
    for folder, _, names in os.walk(directory):
        if not logs and os.path.basename(folder) == "wal":
            continue
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def written_bytes(directory: Path) -> int | None:
    """Bytes that the device of a directory has written, with all that waits to be written; None: it does not say."""
    os.sync()
    device = os.stat(directory).st_dev
    try:
        figures = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except FileNotFoundError:
        return None
    return int(figures[6]) * 512


def children(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for known in found:
        for task in Path(f"/proc/{known}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split() if int(child) not in found]
    return found
