"""The command `duelog worker`: a program's worker, run until it is told to stop."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Annotated

import typer

from ... import Worker
from ...store.errors import InvalidArgument
from ..values import alone
from .options import allow_every_descriptor


def worker(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:WORKER",
            help="A module, from the current directory or installed, and the name in it of a duelog.Worker.",
            show_default=False,
        ),
    ],
    log: Annotated[str, typer.Option(metavar="LEVEL", help="What is logged to standard error.")] = "info",
) -> None:
    """Run the tasks of a worker until SIGTERM or Ctrl-C; then what is running may end, and the rest is given back.

    How long it may take is the worker's `drain`; a second signal ends the waiting. Start and end are logged, each
    failure of a task as a warning, each message that is given up as an error, with the id that it had at first.

    ```
    duelog worker shop.tasks:worker
    ```
    """
    if log.upper() not in logging.getLevelNamesMapping():
        raise InvalidArgument("--log", log, "expected debug, info, warning or error")
    found = _find(target)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=log.upper(), format=form)  # unless the program has seen to it
    allow_every_descriptor()
    with alone("a worker opens the store itself: end it first, or run the tasks in that program (`Worker(store)`)"):
        found.run()


def _find(target: str) -> Worker:
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InvalidArgument("MODULE:WORKER", target, "expected the form module:name")
    sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it was found, and imports one that is not there
        raise InvalidArgument("MODULE:WORKER", target, f"there is no module {error.name!r}") from None
    found = getattr(imported, name, None)
    if not isinstance(found, Worker):
        raise InvalidArgument("MODULE:WORKER", target, f"expected a duelog.Worker, it is {found!r}")
    return found
