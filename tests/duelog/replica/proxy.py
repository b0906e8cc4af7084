"""A proxy before an S3 server, by which the puts of log objects go wrong in every way that a network and a server have.

Or requests are changed, and held up, as a test says; then nothing else goes wrong.

- "lost": it is stored, and there is no answer.
- "late": there is no answer, and it is stored at some time after.
- "twice": it is sent twice, and the second answer is what the client gets: it is there already.
- "500": it is stored, and the answer says that the server failed.
- "503": it is not stored, nor after "409", which says that others were at it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from random import Random

FAULTS = ("lost", "late", "twice", "500", "503", "409")
Change = Callable[[bytes], Awaitable[bytes]]
"""Gives what is passed on for a request."""
_ANSWERS = {"500": "500 Internal Server Error", "503": "503 Slow Down", "409": "409 Conflict"}


class Proxy:
    """Passes requests on, each by a connection of its own; half of all puts under log/ go wrong."""

    def __init__(self, target: str, seed: int, change: Change | None = None) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = host, int(port)
        self._random = Random(seed)
        self._change = change
        self._late: set[asyncio.Task[bytes]] = set()
        self.puts = 0
        """Puts of log objects."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        with closing(writer), suppress(OSError, asyncio.IncompleteReadError):
            await self.answer(reader, writer)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one request on, or not."""
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        request = head + await reader.readexactly(int(fields.get("content-length", 0)))
        fault, method, path = None, *lines[0].split()[:2]
        if self._change is not None:
            request = await self._change(request)
        elif method == "PUT" and "/log/" in path:
            self.puts += 1
            fault = self._random.choice((*FAULTS, *(None for _ in FAULTS)))
        if fault == "late":
            self._late.add(asyncio.ensure_future(self._pass_on(request)))
        if fault in ("lost", "twice", "500"):
            await self._pass_on(request)
        if fault in _ANSWERS:
            writer.write(f"HTTP/1.1 {_ANSWERS[fault]}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        elif fault in (None, "twice"):
            writer.write(await self._pass_on(request))
        await writer.drain()

    async def _pass_on(self, request: bytes) -> bytes:
        """Send a request on; the answer."""
        reader, writer = await asyncio.open_connection(*self._target)
        line, _, rest = request.partition(b"\r\n")
        writer.write(line + b"\r\nconnection: close\r\n" + rest)
        answer = await reader.read(-1)
        writer.close()
        return answer


@contextmanager
def proxy(
    target: str, seed: int = 0, change: Change | None = None, kind: type[Proxy] = Proxy
) -> Iterator[tuple[str, Proxy]]:
    """The address of a proxy before a server, and the proxy."""
    made, loop = kind(target, seed, change), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(made.serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        await asyncio.gather(*made._late, return_exceptions=True)
        for task in (left := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", made
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
