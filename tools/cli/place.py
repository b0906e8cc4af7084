"""A place where a store is: a directory, or with `--server URL` a server; and asking what is there for operations.

What is an address (`http://`, `https://`) is a server, anything else a directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from ...store.errors import InvalidArgument
from .options import argument, as_command, grouped, option

if TYPE_CHECKING:
    from ...operations.operations import Asked

C = TypeVar("C", bound=Callable[..., object])

TOKEN = "DUELOG_TOKEN"


@dataclass
class StorePlace:
    """A directory, or a server and how it is reached."""

    text: str
    token: str | None = None
    trust: Path | None = None
    """Certificates in PEM; None: those of this machine."""

    @property
    def name(self) -> str:
        """The address, or the directory's full path."""
        return self.text.rstrip("/") if is_address(self.text) else str(Path(self.text).absolute())

    @contextmanager
    def opened(self, *, writes: bool = False) -> Iterator[Asked]:
        """Ask for operations, with the names of subscriptions as clients know them.

        Raises StoreLocked for a directory that is to change and is open elsewhere, ServerRefused.
        """
        if is_address(self.text):
            from ...operations.operations import Asked
            from .server import Server

            yield Asked(Server(self.text, self.token, self.trust).ask)
            return
        from .client_names import Directory

        with asked(Path(self.text), writes=writes) as store:
            yield Directory(store.ask)


def asked(path: Path, *, writes: bool, create: bool = False) -> AbstractContextManager[Asked]:
    """See `asking.asked`, whose imports a command needs that asks, and no other."""
    from ..asking import asked as ask

    return ask(path, writes=writes, create=create)


_Argument = argument("STORE", "Directory of the store; left out with --server.", show_default=False)
Place = Annotated[StorePlace, _Argument]
_OPTIONS = {
    "server": Annotated[
        str | None,
        option("--server", "URL", "A server in place of a directory: http:// or https://host:port."),
    ],
    "token": Annotated[str | None, option("TOKEN", "With --server: who asks.", envvar=TOKEN, show_envvar=True)],
    "trust": Annotated[
        Path | None,
        option("--tls-trust", "FILE", "With https: certificates that are trusted, in PEM."),
    ],
}


def command_at_place(app: typer.Typer, name: str, **settings: Any) -> Callable[[C], C]:
    """Add a command whose first argument is a `Place`: --server, --token and --tls-trust say so of a server."""

    def add(command: C) -> C:
        taken = grouped(command)

        def run(store: str, server: str | None, token: str | None, trust: Path | None, **given: Any) -> Any:
            return taken(store=StorePlace(server or store, token, trust), **given)

        store, *others, json_ = signature(taken).parameters.values()
        ours = [Parameter(option, json_.kind, default=None, annotation=kind) for option, kind in _OPTIONS.items()]
        as_command(run, command, [store.replace(annotation=Annotated[str, _Argument]), *others, *ours, json_])
        app.command(name, cls=ServerCommand, **settings)(run)
        return command

    return add


class ServerCommand(TyperCommand):
    """A command whose first argument is a store: with --server URL the argument is left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the address in the argument's place."""
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
    """Return True if a place is a server.

    >>> is_address("http://localhost:8080"), is_address("data")
    (True, False)
    """
    return re.fullmatch(r"https?://[^\s/?#]+/?", place) is not None
