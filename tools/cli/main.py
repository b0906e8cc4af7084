"""The command `duelog`: its commands put together, and what all of them have in common.

Exit status: 0; 1: there are findings (`check`, `audit`) or a demo did not verify; 2: usage, bad input, or a store, file
or standard output that cannot be used, with one line on standard error that says which value or path it was; 141, and
not a word, where the program that reads the output has closed the pipe (as a shell reports a process killed by
SIGPIPE), so that a command that was cut short never says that it found nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import lmdb
import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]  # as typer does
from typer.core import TyperGroup

from ...store.errors import DuelogError, InvalidArgument
from ..consuming import cli_backlog, cli_receive
from ..output import drop_output, flush_output, say, write_line
from ..remote import cli_drain, cli_figures, cli_policies, cli_topics
from ..remote.places import ServerCommand
from . import (
    cli_audit,
    cli_dead_letters,
    cli_export,
    cli_init,
    cli_inspection,
    cli_schedules,
    cli_serve,
    cli_snapshot,
    cli_traffic,
    cli_upkeep,
    cli_worker,
)

HELP = """An embedded, durable log of messages that are due later.

A STORE is a directory; `init` makes it. Messages go to a topic with a due time, and each subscription of the topic
receives them when they are due.

```
duelog send data reminders "pay the bill" --after 10s --create
duelog receive data reminders mailer --create
```

One process at a time has a store open for writing: a program, `serve`, or a command for as long as it runs. Commands
reach it by the socket CONTROL in the store's directory, which its user and root alone may use, and do the same as if
they had opened the store themselves; those that only look work beside any process. A store that no process has open
need repair, snapshot verify and rebuild, drain without --keep, move-namespace and import --parquet, and what serves it:
serve, worker.

Times are ISO 8601 with a zone (2026-11-21T09:00:00Z) or milliseconds since 1970; durations are seconds, 90s, 1h30m,
500ms, 2w, or ISO 8601 (PT1H30M).

With --json a command prints JSON and nothing else to standard output: one object on a line, of a list one for each of
its elements. Names are those of the Python interface, with units: `due_ms` is milliseconds since 1970, beside it `due`
is ISO 8601; ids and positions are text, LEDGER:ENTRY; a payload is text in `payload`, or `payload_base64` where it is
no UTF-8. What goes wrong is a line on standard error and an exit status: 1: found or not done, 2: refused.
"""


BROKEN_PIPE = 141

COMPLETE = "_DUELOG_COMPLETE"
"""The environment variable by which a shell asks for completions."""

completion_init()


@contextmanager
def _errors_to_status() -> Iterator[None]:
    """See that all that was printed is written; an error becomes a line on standard error and an exit status."""
    try:
        try:
            yield
        finally:
            flush_output()
        return
    except InvalidArgument as error:  # None: it was not given
        say(f"{error.field}: {error.reason}" if error.value is None else str(error))
    except DuelogError as error:
        say(str(error))
    except BrokenPipeError:
        drop_output()
        raise typer.Exit(BROKEN_PIPE) from None
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # so rich, which prints the help, ends the process itself
            raise typer.Exit(BROKEN_PIPE) from None
        raise
    except OSError as error:
        if error.filename is None:  # all others say which file it is
            drop_output()
        say(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except (lmdb.Error, MemoryError) as error:
        say(str(error) or "there is not enough memory")
    raise typer.Exit(2) from None


class ErrorsToStatus(TyperGroup):
    """Runs a command; what cannot be done becomes a line on standard error and an exit status, never a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What of the arguments is left to the command; prints the help and the version."""
        with _errors_to_status():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that `ctx` names."""
        with _errors_to_status():
            return super().invoke(ctx)


app = typer.Typer(
    name="duelog",
    cls=ErrorsToStatus,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"duelog {version('duelog')}")
        raise typer.Exit()


@app.callback()
def _common(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class Shell(StrEnum):
    """A shell that completes what is typed."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print what has a shell complete commands, options and their values.

    ```
    duelog completion bash > ~/.local/share/bash-completion/completions/duelog
    duelog completion zsh > ~/.zfunc/_duelog
    duelog completion fish > ~/.config/fish/completions/duelog.fish
    ```
    """
    write_line(get_completion_script(prog_name="duelog", complete_var=COMPLETE, shell=shell.value))


def demo(
    store: Annotated[
        Path | None, typer.Argument(metavar="STORE", help="Where to make the store; a temporary one if left out.")
    ] = None,
    years: Annotated[int, typer.Option(min=1, help="How many of the last years of the trace.")] = 5,
    all_: Annotated[bool, typer.Option("--all", help="All 21 years of the trace.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Where to write the plot (PNG).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON value.")] = False,
) -> None:
    """Replay a real trace of delayed messages through the whole life of a store, and verify each of them.

    The trace is the history of Git's own repository: a change is written (published) at one time and taken in (due)
    at another, hours to years later. A simulated clock sends, fires, receives and acknowledges all of it; the
    store trims and deletes meanwhile.

    ```
    duelog demo --years 1
    ```
    """
    from ..demo.demo_run import run_demo

    if not run_demo(store, years, all_, plot, json_):
        raise typer.Exit(1)


for command in (
    cli_init.init,
    cli_traffic.send,
    cli_receive.receive,
    cli_backlog.pause,
    cli_backlog.resume,
    cli_traffic.import_,
    cli_inspection.check,
    cli_audit.audit,
    cli_inspection.dump,
    cli_upkeep.backup,
    cli_upkeep.move_namespace,
    cli_upkeep.repair,
    cli_upkeep.compact,
    cli_upkeep.tick,
    cli_export.export,
    cli_export.table,
    cli_drain.drain,
    cli_serve.serve,
    cli_serve.proxy,
    cli_worker.worker,
    completion,
    demo,
):
    app.command(command.__name__.rstrip("_").replace("_", "-"))(command)
for of_server in (
    cli_figures.scheduled,
    cli_figures.stats,
    cli_figures.partitions,
    cli_topics.cancel,
    cli_topics.reschedule,
    cli_backlog.peek,
    cli_backlog.seek,
    cli_backlog.skip,
    cli_backlog.expire,
):
    app.command(of_server.__name__, cls=ServerCommand)(of_server)
for also, name, same in (
    ("unsubscribe", "subscriptions delete", cli_topics.delete_subscription),
    ("delete-topic", "topics delete", cli_topics.delete_topic),
):
    help_ = inspect.cleandoc(same.__doc__ or "").replace(f"duelog {name}", f"duelog {also}")
    app.command(also, cls=ServerCommand, help=f"{help_}\n\nThe same as `duelog {name}`.")(same)
app.add_typer(cli_topics.topics)
app.add_typer(cli_topics.subscriptions)
app.add_typer(cli_dead_letters.app)
app.add_typer(cli_policies.app)
app.add_typer(cli_schedules.app)
app.add_typer(cli_snapshot.app, name="snapshot")


def main() -> None:
    """Run the command line: the entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
