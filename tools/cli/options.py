"""Arguments and options that several commands have, and what several do with them.

A command is a function of its own arguments. `completed` gives it what its parameters stand for: options that several
commands have (`Group`), a directory or a server (`Place`), --json. It is called as a command is built: reading the
types of all of them takes longer than all else that a short command does.
"""

from __future__ import annotations

import inspect
import math
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import CommandInfo

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument
from ..output import AS_JSON, printable, progress_bar, say

if TYPE_CHECKING:
    from ...operations.operations import Asked
    from ...store.policy.policies import PolicyValue
    from ..fleet import Outcome

T = TypeVar("T")

TOKEN = "DUELOG_TOKEN"


def option(*words: str, **more: Any) -> Any:
    """Make an option of its names, the word for its value, and what the help says; all but the last may be left out."""
    *names, text = words
    metavar = names.pop() if names and not names[-1].startswith("-") else None
    return typer.Option(*names, metavar=metavar, help=text, **more)


def argument(metavar: str, text: str, **more: Any) -> Any:
    """Make an argument of the word for it, and what the help says."""
    return typer.Argument(metavar=metavar, help=text, **more)


Store = Annotated[Path, argument("STORE", "Directory of the store.", show_default=False)]
_STORES = "Directory of the store, or URL of its copy; several, a glob in quotes, or a file with a placement table."
Stores = Annotated[list[Path] | None, argument("[STORE]...", _STORES, show_default=False)]
_TOPIC = "Topic: a name, tenant/namespace/name, or persistent://tenant/namespace/name."
TopicName = Annotated[str, argument("TOPIC", _TOPIC, show_default=False)]
SubscriptionName = Annotated[
    str, argument("SUBSCRIPTION", "Subscription: its name, as clients know it.", show_default=False)
]
Create = Annotated[bool, option("--create", "Make what is not there; without it that is refused.")]
Master = Annotated[str | None, option("URL", "Spark master, such as local[2]; with --spark.")]


class Group(dict[str, Any]):
    """Options that several commands have: the annotated type of each, by the name that its value is handed over under.

    A command has them as one parameter, `Annotated[Given, Group(...)]`, and gets a mapping of them.
    """


Given: TypeAlias = Mapping[str, Any]
NOTHING: Given = MappingProxyType({})
"""The default of a group, which typer never sees."""


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

            server = Server(self.text, self.token, self.trust)
            with server.understood():
                yield Asked(server.ask)
            return
        from ..asking import Directory

        with asked(Path(self.text), writes=writes) as store:
            yield Directory(store.ask)


def asked(path: Path, *, writes: bool, create: bool = False) -> AbstractContextManager[Asked]:
    """See `asking.asked`, whose imports a command needs that asks, and no other."""
    from ..asking import asked as ask

    return ask(path, writes=writes, create=create)


_STORE = argument("STORE", "Directory of the store; left out with --server.", show_default=False)
Place = Annotated[StorePlace, _STORE]
_SERVER = {
    "server": Annotated[
        str | None, option("--server", "URL", "A server in place of a directory: http:// or https://host:port.")
    ],
    "token": Annotated[str | None, option("TOKEN", "With --server: who asks.", envvar=TOKEN, show_envvar=True)],
    "trust": Annotated[
        Path | None, option("--tls-trust", "FILE", "With https: certificates that are trusted, in PEM.")
    ],
}
_EXAMPLE = re.compile(r"(?m)^\$ .+(\n\$ .+)*")
_JSON = {"json_": Annotated[bool, option("--json", "Print JSON and nothing else to standard output.")]}


def completed(info: CommandInfo, *, has_json: bool) -> CommandInfo:
    """Give a command the options that its groups and its `Place` stand for, and --json; mark its examples as code."""
    command: Any = info.callback
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Group] = {}
    added: dict[str, Any] = {**_SERVER} if hints.get("store") == Place else {}
    parameters: list[Parameter] = []
    for each in inspect.signature(command).parameters.values():
        kind = hints[each.name]
        (*_, last) = getattr(kind, "__metadata__", (None,))
        if isinstance(last, Group):
            groups[each.name] = last
            parameters += [each.replace(name=name, default=None, annotation=last[name]) for name in last]
        else:
            parameters.append(each.replace(annotation=Annotated[str, _STORE] if kind == Place else kind))
    at_place = bool(added)
    added |= _JSON if has_json else {}
    kind_ = Parameter.POSITIONAL_OR_KEYWORD
    parameters += [Parameter(name, kind_, default=None, annotation=each) for name, each in added.items()]

    def run(**given: Any) -> Any:
        if has_json:
            AS_JSON.set(bool(given.pop("json_")))
        if at_place:
            given["store"] = StorePlace(given.pop("server") or given["store"], given.pop("token"), given.pop("trust"))
        for group, options in groups.items():
            given[group] = {name: given.pop(name) for name in options}
        return command(**given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__ = command.__name__
    found = copy(info)
    found.callback = run
    found.cls = ServerCommand if at_place else info.cls
    help_ = info.help or command.__doc__ or ""
    found.help = _EXAMPLE.sub(lambda lines: f"```\n{lines[0][2:]}\n```".replace("\n$ ", "\n"), inspect.cleandoc(help_))
    return found


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
    return re.fullmatch(r"https?://[^\s/?#@]+/?", place) is not None  # credentials are a token's


_POLICIES = {
    "tick_time_ms": ("--time -t", "DURATION", "The tick: due times are rounded up to a multiple of it."),
    "max_delivery_delay_ms": ("--max-delay --maxDelay -md", "DURATION",
                              "Longest delay that a producer may ask for; 0: any."),
    "fixed_delivery_delay_ms": ("--fixed-delay --fixedDelay -fd", "DURATION",
                                "Delay of every message, whatever was asked for; 0: none."),
    "retention_ms": ("--retention", "DURATION", "Keep acknowledged ledgers for so long; 0: not by age."),
    "retention_bytes": ("--retention-bytes", "BYTES",
                        "Keep the newest acknowledged ledgers of so much; 0: not by size."),
    "ttl_ms": ("--ttl", "DURATION", "Let unacknowledged messages expire after this; 0: never."),
    "max_redeliveries": ("--max-redeliveries", "N",
                         "Deliveries after the first before a message is dead; -1: any number."),
    "dead_letter_topic": ("--dead-letter-topic", "TOPIC",
                          "Where dead messages go; empty: names of topic and subscription, then -DLQ."),
    "ack_timeout_ms": ("--ack-timeout", "DURATION", "Deliver again what is not acknowledged by then; 0: never."),
    "nack_backoff_ms": ("--backoff", "DURATION", "Hand out again after this what was given back, then doubled."),
    "nack_backoff_max_ms": ("--max-backoff", "DURATION", "The most that --backoff is doubled to."),
    "max_in_flight": ("--max-in-flight", "N", "Messages that one consumer may hold unacknowledged; 0: any number."),
    "max_pending": ("--max-pending", "N", "Messages of a topic that may be pending; 0: any number."),
}  # fmt: skip
"""The options that set each policy, the value that they take, and what they say."""


_NUMBERS = ("BYTES", "N")
_EVERY: dict[str, Any] = {
    name: Annotated[int | None if metavar in _NUMBERS else str | None, option(*names.split(), metavar, text)]
    for name, (names, metavar, text) in _POLICIES.items()
}
_DELAYS, _FLOW = ("tick_time_ms", "max_delivery_delay_ms", "fixed_delivery_delay_ms"), ("max_in_flight", "max_pending")
_ENABLE = option("--enable/--disable", "-e/-d", "Delay messages, or deliver all of them at once.")

PolicyOptions = Annotated[Given, Group({"active": Annotated[bool | None, _ENABLE], **_EVERY})]
KeptPolicies = Annotated[Given, Group({name: each for name, each in _EVERY.items() if name not in (*_DELAYS, *_FLOW)})]
"""Those of what is kept, delivered again, and given up."""


def policy_values(given: Given) -> dict[str, PolicyValue]:
    """The policies that options set, by name; one in ms is given as a duration. Raises InvalidArgument."""
    return {
        name: _ms(_POLICIES[name][0].split()[0], value) if name.endswith("_ms") else value
        for name, value in given.items()
        if value is not None
    }


def _ms(option: str, text: str) -> int:
    return math.ceil(duration_seconds(option, text) * 1000)


def in_fleet(
    job: Callable[..., Iterable[Outcome[T]]], stores: Sequence[Path], spark: bool, master: str | None, **how: Any
) -> list[Outcome[T]]:
    """The outcomes of a job in each store, on Spark where that is asked for, while a bar of stores is shown."""
    from ..spark.session import session_for

    found: list[Outcome[T]] = []
    with (
        session_for("duelog", None, master) if spark else nullcontext() as session,
        progress_bar("stores", time_left=False) as progress,
    ):
        progress(0, len(stores))
        for outcome in job(stores, session=session, **how):
            found.append(outcome)
            progress(len(found), len(stores))
    return found


def end_fleet(
    outcomes: Sequence[Outcome[T]], show: Callable[[Path, T], object] | None, is_worse: Callable[[T], object]
) -> None:
    """Show each result, and name the stores that could not be used.

    Exit status 2 if there is one of those, else 1 if a result is worse than it should be.
    """
    done = [(each.store, each.result) for each in outcomes if each.result is not None]
    if show is not None:
        for store, result in done:
            show(store, result)
    failed = [each for each in outcomes if each.result is None]
    for each in failed:
        say(printable(f"{each.name}: {each.reason}"))
    say(f"stores: {len(outcomes):,}, of which failed: {len(failed):,}")
    if failed or any(is_worse(result) for _, result in done):
        raise typer.Exit(2 if failed else 1)


def allow_every_descriptor() -> None:
    """Have this process use as many as it may: a copy of a store in use takes two a partition, a connection one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
