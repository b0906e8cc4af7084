"""The command that shows a store in a browser: ui."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.errors import InvalidArgument
from ..output import write_line
from ..values import alone, open_to_read, require_store
from .options import Store, allow_every_descriptor

if TYPE_CHECKING:
    from ...operations.operations import Ask

app = typer.Typer()

_RECONNECT_S = 300.0


@app.command()
def ui(
    store: Store,
    port: Annotated[int, typer.Option(help="Port to listen at. 0: one that is free.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    only_look: Annotated[bool, typer.Option("--only-look", help="Let nothing be changed from the page.")] = False,
) -> None:
    """Show a store in a browser, until SIGTERM or Ctrl-C.

    Needs `pip install 'duelog[broker]'`. It asks the process that has the store open, where there is one; else it opens
    the store itself, and fires what falls due. The address that it prints has a token: who has it may do everything.

    ```
    duelog ui data
    ```
    """
    try:
        from ...broker.page.page_server import serve_page
    except ModuleNotFoundError as error:
        raise InvalidArgument("ui", error.name, "is not installed; pip install 'duelog[broker]'") from error
    require_store(store)
    allow_every_descriptor()

    async def serve(ask: Ask) -> None:
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await serve_page(ask, announce, ended, host=host, port=port, only_look=only_look)

    def announce(address: str) -> None:
        write_line(f"{store} is shown at {address}")
        sys.stdout.flush()

    with _asked(store, only_look) as ask:
        asyncio.run(serve(ask))


@contextmanager
def _asked(path: Path, only_look: bool) -> Iterator[Ask]:
    """Ask the process that has the store open, for as long as one comes again; else this one, which opens it."""
    from ... import DelayedStore, StoreConfig
    from ...broker.page.operation_resource import asking
    from ...opening import stored_span_ms
    from ...operations.wire_client import Connection

    first = Connection.to(path, _RECONNECT_S)
    if first is not None:
        first.introduce("duelog ui")
        mine, made = threading.local(), [first]  # a connection does one operation at a time

        def ask_there(name: str, arguments: Mapping[str, object]) -> Any:
            if not hasattr(mine, "connection"):
                mine.connection = Connection.to(path, _RECONNECT_S) or first
                made.append(mine.connection)
            return mine.connection.ask(name, arguments)

        try:
            yield ask_there
        finally:
            for each in made:
                each.close()
        return
    with alone("it takes no commands: end it first, or --only-look"):
        span_ms = stored_span_ms(path) or StoreConfig().partition_ms
        opened = open_to_read(path) if only_look else DelayedStore.open(path, StoreConfig(partition_ms=span_ms))
    with opened:
        yield asking(opened)
