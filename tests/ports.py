"""Ports of this machine for what tests begin."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

_LOWEST_PORT, _PORTS, _BLOCK = 10_000, 20_000, 100
_BLOCKS = Path(tempfile.gettempdir(), f"duelog-test-ports-{os.getuid()}")
"""A file for each block of ports, locked by the process that gives them out."""


def _own_ports() -> Iterator[int]:
    """Ports that no other process gives out meanwhile: those of one block after another."""
    _BLOCKS.mkdir(exist_ok=True)
    for number in count(os.getpid() * 7_919):
        block = number % (_PORTS // _BLOCK)
        with (_BLOCKS / str(block)).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield from range(_LOWEST_PORT + block * _BLOCK, _LOWEST_PORT + (block + 1) * _BLOCK)


_ports = _own_ports()


def free_port() -> int:
    """A port of this machine that is free now, and that nobody takes by chance before it is used, or while it is not.

    The kernel gives those above 32,767 to any socket that asks for no certain one, other tests' connections among them.
    """
    for port in _ports:
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("blocks end never")
