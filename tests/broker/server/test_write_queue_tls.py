"""The write queue over TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import cast

from duelog.broker.security.tls import Certificate
from duelog.broker.server.write_queue import WriteQueue
from tests.broker.security.certificates import write_pair


class Answering(asyncio.Protocol):
    """Answers what comes with two pieces, the second one in a later turn of the loop."""

    queue: WriteQueue

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self.queue = WriteQueue(
            cast(asyncio.Transport, transport), loop.call_soon, high=1_000, low=10, on_low=lambda: None
        )

    def data_received(self, data: bytes) -> None:
        self.queue.put(b"one")
        asyncio.get_running_loop().call_later(0.01, self.queue.put, b"two")

    def pause_writing(self) -> None:
        self.queue.pause()

    def resume_writing(self) -> None:
        self.queue.resume()


def test_what_is_queued_for_a_connection_over_tls_leaves_though_nothing_comes(tmp_path: Path) -> None:
    """A transport over TLS that may buffer no byte at all counts as full when it is empty."""
    certificate, key = write_pair(tmp_path)

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Answering, "127.0.0.1", 0, ssl=Certificate(certificate, key).context)
        context = ssl.create_default_context(cafile=str(certificate))
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"?")
        try:
            return await asyncio.wait_for(reader.readexactly(6), 5)
        finally:
            writer.close()
            await writer.wait_closed()
            server.close()

    assert asyncio.run(run()) == b"onetwo"
