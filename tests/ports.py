"""Ports of this machine for what tests begin."""

import os
import socket
from itertools import count

_LOWEST_PORT, _PORTS = 10_000, 20_000
_ports = count(os.getpid() * 7_919)


def free_port() -> int:
    """A port of this machine that is free now, and that nobody takes by chance before it is used, or while it is not.

    The kernel gives those above 32,767 to any socket that asks for no certain one, other tests' connections among them.
    """
    for number in _ports:
        port = _LOWEST_PORT + number % _PORTS
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("count ends never")
