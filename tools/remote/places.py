"""Where a store is: a directory, or with `--server URL` a server; the options that say so, and the way to it.

What is an address (`http://`, `https://`) is a server, anything else a directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ...store.errors import InvalidArgument
from .operations import Administration

TOKEN = "DUELOG_TOKEN"

Place = Annotated[
    str,
    typer.Argument(metavar="STORE", help="Directory of the store; left out with --server.", show_default=False),
]
Server = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="A server in place of a directory: http:// or https://host:port."),
]
Token = Annotated[
    str | None, typer.Option(metavar="TOKEN", envvar=TOKEN, show_envvar=True, help="With --server: who asks.")
]
Trust = Annotated[
    Path | None, typer.Option("--tls-trust", metavar="FILE", help="With https: certificates that are trusted, in PEM.")
]


class ServerCommand(TyperCommand):
    """A command whose first argument is a store: with --server URL the argument is left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The address takes the argument's place."""
        found: list[str] = []
        for at, each in enumerate(args):
            if each == "--":
                break
            if each == "--server" and at + 1 < len(args):
                found = [args[at + 1]]
            elif each.startswith("--server="):
                found = [each.partition("=")[2]]
        if found and not is_address(found[0]):
            expected = "expected http://host:port or https://host:port, where `duelog serve --http` listens"
            raise InvalidArgument("--server", found[0], expected)
        return super().parse_args(ctx, [*found, *args])


def is_address(place: str) -> bool:
    """Whether a place is a server.

    >>> is_address("http://localhost:8080"), is_address("data")
    (True, False)
    """
    return re.fullmatch(r"https?://[^\s/?#]+/?", place) is not None


@contextmanager
def administered(
    place: str, token: str | None, trust: Path | None, *, writes: bool = False
) -> Iterator[Administration]:
    """A store to look at, or to change. Raises StoreLocked for a directory that is to change and is open elsewhere."""
    if is_address(place):
        from .server_side import ServerSide

        yield ServerSide(place, token, trust)
        return
    from .directory_side import open_directory

    with open_directory(Path(place), writes=writes) as opened:
        yield opened
