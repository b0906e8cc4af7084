"""The command `duelog`: its commands put together, and what all of them have in common.

Exit status: 0; 1: there are findings (`check`, `audit`) or a demo did not verify; 2: usage, bad input, or a store, file
or standard output that cannot be used, with one line on standard error that says which value or path it was; 141, and
not a word, where the program that reads the output has closed the pipe (as a shell reports a process killed by
SIGPIPE), so that a command that was cut short never says that it found nothing.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]  # as typer does
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

from ...store.errors import DuelogError, InvalidArgument
from ..output import drop_output, fill_closed, flush_output, say, write_line
from ..values import extra
from . import cli_consuming, cli_inspection, cli_messages, cli_replica, cli_serve, cli_transfer, cli_upkeep
from .options import argument, completed, option

HELP = """An embedded, durable log of messages that are due later.

A STORE is a directory; `init` makes it. Messages go to a topic with a due time, and each subscription of the topic
receives them when they are due.

```
duelog send data reminders "pay the bill" --after 10s --create
duelog receive data reminders mailer --create
```

One process at a time has a store open for writing: a program, `serve`, or a command for as long as it runs. Commands
reach it by the socket CONTROL in the store's directory, which its user and root alone may use, and do the same as if
they had opened the store themselves; those that only look work beside any process. These need a store that no process
has open: repair, snapshot verify and rebuild, drain without --keep, move-namespace, import --parquet, and those that
serve it: serve, worker.

Times are ISO 8601 with a zone (2026-11-21T09:00:00Z) or milliseconds since 1970; durations are seconds, 90s, 1h30m,
500ms, 2w, or ISO 8601 (PT1H30M).

With --json a command prints JSON and nothing else to standard output: one object on a line, of a list one for each of
its elements. Names are those of the Python interface, with units: `due_ms` is milliseconds since 1970, beside it `due`
is ISO 8601; ids and positions are text, LEDGER:ENTRY; a payload is text in `payload`, or `payload_base64` where it is
not UTF-8. An error is a line on standard error and an exit status: 1, something was found or not done; 2, refused.
"""


BROKEN_PIPE = 141

WITHOUT_JSON = ("completion", "demo", "proxy", "serve", "table", "ui", "worker")
"""Commands that print no JSON, or say themselves what of it they print."""

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
    except MemoryError:
        say("there is not enough memory")
    except Exception as error:
        lmdb = sys.modules.get("lmdb")  # which a command that has not opened a store never loads
        if lmdb is None or not isinstance(error, lmdb.Error):
            raise
        say(str(error))
    raise typer.Exit(2) from None


class Commands(TyperGroup):
    """Runs a command; what cannot be done becomes a line on standard error and an exit status, never a traceback.

    A command is built when it is called for: to build all of them takes three times as long as all else that a short
    command does.
    """

    _lists = False

    @property
    def commands(self) -> dict[str, Any]:
        """All of them, for those that walk the commands."""
        return {name: _built(name) for name in self.list_commands(None)}

    @commands.setter
    def commands(self, _: object) -> None:
        """Keep nothing of what typer knows."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help: `init` makes what the others need."""
        return sorted(REGISTERED, key=lambda name: name != "init")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Build a command, or a group, for the help without its options; None: there is none of this name."""
        if cmd_name not in REGISTERED:
            return None
        if not self._lists:
            return _built(cmd_name)
        known: Any = REGISTERED[cmd_name]
        help_ = known.help or known.callback.__doc__ if isinstance(known, CommandInfo) else known.info.help
        return TyperCommand(cmd_name, help=inspect.cleandoc(str(help_)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with a line for each command: plainly, as rich would take longer than all the rest."""
        self._lists = True
        super().format_help(ctx, formatter)
        self._lists = False

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Print the text with its examples as they are, which stand between lines of three backticks."""
        formatter.write_paragraph()
        formatter.write_text(re.sub(r"^```\n(.*?)\n```$", r"\b\n\1", HELP, flags=re.MULTILINE | re.DOTALL))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what arguments say to `duelog` itself; prints the help and the version."""
        with _errors_to_status():
            if not args and not ctx.resilient_parsing:
                write_line(ctx.get_help())
                raise typer.Exit(2)
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that `ctx` names."""
        with _errors_to_status():
            return super().invoke(ctx)


@cache
def _built(name: str) -> Any:
    registered = REGISTERED[name]
    one = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    if isinstance(registered, CommandInfo):
        one.registered_commands = [completed(registered, has_json=name not in WITHOUT_JSON)]
        return typer.main.get_command(one)
    registered.registered_commands = [completed(each, has_json=True) for each in registered.registered_commands]
    one.add_typer(registered)
    group: Any = typer.main.get_command(one)
    return group.commands[name]


app = typer.Typer(
    name="duelog",
    cls=Commands,
    help=HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

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


def completion(shell: Annotated[Shell, argument("SHELL", "bash, zsh or fish.")]) -> None:
    """Print what has a shell complete commands, options and their values.

    $ duelog completion bash > ~/.local/share/bash-completion/completions/duelog
    $ duelog completion zsh > ~/.zfunc/_duelog
    $ duelog completion fish > ~/.config/fish/completions/duelog.fish
    """
    write_line(get_completion_script(prog_name="duelog", complete_var=COMPLETE, shell=shell.value))


def demo(
    store: Annotated[Path | None, argument("STORE", "Where to make the store; a temporary one if left out.")] = None,
    years: Annotated[int, option("How many of the last years of the trace.", min=1)] = 5,
    all_: Annotated[bool, option("--all", "All 21 years of the trace.")] = False,
    plot: Annotated[Path | None, option("Where to write the plot (PNG).")] = None,
    json_: Annotated[bool, option("--json", "Print the figures as one JSON value.")] = False,
    ui: Annotated[bool, option("--ui", "Replay it live, compressed, with the page open on it.")] = False,
    speed: Annotated[float, option("With --ui: how many times faster than it was.", min=1)] = 20_000,
) -> None:
    """Replay a real trace of delayed messages through the whole life of a store, and verify each of them.

    The trace is the history of Git's own repository: a change is written (published) at one time and taken in (due)
    at another, hours to years later. A simulated clock sends, fires, receives and acknowledges all of it; the
    store trims and deletes meanwhile.

    $ duelog demo --years 1
    """
    if ui:
        with extra("--ui", "broker"):
            from ..demo.demo_live import show_demo
        show_demo(store, years, all_, speed)
        return
    from ..demo.demo_run import run_demo

    if not run_demo(store, years, all_, plot, json_):
        raise typer.Exit(1)


for rooms in (cli_messages, cli_consuming, cli_inspection, cli_upkeep, cli_transfer, cli_replica, cli_serve):
    app.registered_commands += rooms.app.registered_commands
app.command()(completion)
app.command()(demo)
for also, name, same in (
    ("unsubscribe", "subscriptions delete", cli_consuming.delete_subscription),
    ("delete-topic", "topics delete", cli_consuming.delete_topic),
):
    help_ = inspect.cleandoc(same.__doc__ or "").replace(f"duelog {name}", f"duelog {also}")
    app.command(also, help=f"{help_}\n\nThe same as `duelog {name}`.")(same)

GROUPS = (cli_consuming.topics, cli_consuming.subscriptions, cli_consuming.dead_letters, cli_upkeep.policies_app,
          cli_messages.schedules, cli_inspection.snapshots, cli_replica.group)  # fmt: skip
REGISTERED: dict[str, CommandInfo | typer.Typer] = {
    each.name or str(getattr(each.callback, "__name__", "")): each for each in app.registered_commands
}
REGISTERED |= {str(group.info.name): group for group in GROUPS}
app.registered_commands = []


def main() -> None:
    """Run the command line: the entry point of the console script."""
    fill_closed()
    app()


if __name__ == "__main__":
    main()
