"""A client's connection and one to a broker as one: bytes go both ways as they are.

Each side is read only while the other one takes what comes: what a proxy keeps of a connection is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from ..server.connection import Connection

_HIGH = 256 * 1024
"""Bytes that wait for a broker at which its client is not read."""

_LINGER_S = 5.0


class Splice(asyncio.Protocol):
    """The broker's side. Of the event loop's thread."""

    def __init__(self, client: Connection, first: bytes, count: Callable[[int], object]) -> None:
        """first: what is sent to the broker before anything of the client. count: told of bytes that were passed on."""
        self._client = client
        self._first = first
        self._count = count
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The broker is there."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH)
        self._transport.write(self._first)

    def write(self, data: bytes) -> None:
        """Pass on what the client has sent."""
        if self._transport is not None:
            self._count(len(data))
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Pass on what the broker has sent."""
        client, transport = self._client, self._transport
        self._count(len(data))
        client.send_frames(data)
        if not client.writable and not client.closed and transport is not None:
            transport.pause_reading()
            client.on_writable(self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The broker takes no more."""
        self._client.pause_reading("broker")

    def resume_writing(self) -> None:
        """The broker takes more."""
        self._client.resume_reading("broker")

    def connection_lost(self, exc: Exception | None) -> None:
        """The broker is gone: the client gets what came, and the end."""
        self._transport = None
        self._client.close("its broker has ended the connection")

    def close(self) -> None:
        """The client is gone: the broker gets what came, and the end."""
        if self._transport is not None:
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)
            self._transport.close()
