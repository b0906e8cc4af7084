"""Arguments and options that several commands have, and what several do with them."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...store.duration import duration_seconds
from ..output import printable, progress_bar, say

if TYPE_CHECKING:
    from ...store.policy.policies import PolicyValue
    from ..fleet import Outcome

Store = Annotated[Path, typer.Argument(metavar="STORE", help="Directory of the store.", show_default=False)]
Stores = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[STORE]...",
        help="Directory of the store; or several, a glob in quotes, or a file with a placement table.",
        show_default=False,
    ),
]
TopicName = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC",
        help="Topic: a name, tenant/namespace/name, or persistent://tenant/namespace/name.",
        show_default=False,
    ),
]
SubscriptionName = Annotated[
    str,
    typer.Argument(metavar="SUBSCRIPTION", help="Subscription: its name, as clients know it.", show_default=False),
]
Create = Annotated[bool, typer.Option("--create", help="Make what is not there; without it that is refused.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else to standard output.")]
Master = Annotated[str | None, typer.Option(metavar="URL", help="Spark master, such as local[2]; with --spark.")]

Enable = Annotated[
    bool | None, typer.Option("--enable/--disable", "-e/-d", help="Delay messages, or deliver all of them at once.")
]
Tick = Annotated[
    str | None,
    typer.Option("--time", "-t", metavar="DURATION", help="The tick: due times are rounded up to a multiple of it."),
]
MaxDelay = Annotated[
    str | None,
    typer.Option(
        "--max-delay",
        "--maxDelay",
        "-md",
        metavar="DURATION",
        help="Longest delay that a producer may ask for; 0: any.",
    ),
]
FixedDelay = Annotated[
    str | None,
    typer.Option(
        "--fixed-delay",
        "--fixedDelay",
        "-fd",
        metavar="DURATION",
        help="Delay of every message, whatever was asked for; 0: none.",
    ),
]
Retention = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Keep acknowledged ledgers for so long; 0: not by age.")
]
RetentionBytes = Annotated[
    int | None, typer.Option(metavar="BYTES", help="Keep the newest acknowledged ledgers of so much; 0: not by size.")
]
Ttl = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Let unacknowledged messages expire after this; 0: never.")
]
MaxRedeliveries = Annotated[
    int | None, typer.Option(metavar="N", help="Deliveries after the first before a message is dead; -1: any number.")
]
DeadLetterTopic = Annotated[
    str | None,
    typer.Option(metavar="TOPIC", help="Where dead messages go; empty: names of topic and subscription, then -DLQ."),
]
AckTimeout = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Deliver again what is not acknowledged by then; 0: never.")
]
Backoff = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Hand out again after this what was given back, then doubled.")
]
MaxBackoff = Annotated[str | None, typer.Option(metavar="DURATION", help="The most that --backoff is doubled to.")]
MaxInFlight = Annotated[
    int | None, typer.Option(metavar="N", help="Messages that one consumer may hold unacknowledged; 0: any number.")
]
MaxPending = Annotated[
    int | None, typer.Option(metavar="N", help="Messages of a topic that may be pending; 0: any number.")
]


_POLICIES = {
    "enable": "active",
    "time": "tick_time_ms",
    "max_delay": "max_delivery_delay_ms",
    "fixed_delay": "fixed_delivery_delay_ms",
    "retention": "retention_ms",
    "retention_bytes": "retention_bytes",
    "ttl": "ttl_ms",
    "max_redeliveries": "max_redeliveries",
    "dead_letter_topic": "dead_letter_topic",
    "ack_timeout": "ack_timeout_ms",
    "backoff": "nack_backoff_ms",
    "max_backoff": "nack_backoff_max_ms",
    "max_in_flight": "max_in_flight",
    "max_pending": "max_pending",
}
"""The policy that each of a command's parameters sets; one in ms is given as a duration."""


def policy_values(parameters: Mapping[str, Any]) -> dict[str, PolicyValue]:
    """The policies that a command's parameters set, by name. Raises InvalidArgument."""
    given = {name: parameters[name] for name in _POLICIES if parameters.get(name) is not None}
    return {
        _POLICIES[name]: _ms(f"--{name.replace('_', '-')}", value) if _POLICIES[name].endswith("_ms") else value
        for name, value in given.items()
    }


def _ms(option: str, text: str) -> int:
    return math.ceil(duration_seconds(option, text) * 1000)


T = TypeVar("T")


@contextmanager
def store_progress(stores: Sequence[Path]) -> Iterator[Callable[[Iterable[Outcome[T]]], list[Outcome[T]]]]:
    """A bar of stores while the block runs; what it yields collects outcomes."""
    with progress_bar("stores", time_left=False) as progress:

        def collect(outcomes: Iterable[Outcome[T]]) -> list[Outcome[T]]:
            found = []
            progress(0, len(stores))
            for outcome in outcomes:
                found.append(outcome)
                progress(len(found), len(stores))
            return found

        yield collect


def end_fleet(outcomes: Sequence[Outcome[Any]], *, worse: bool) -> None:
    """Name the stores that could not be used; exit status 2 if there is one, else 1 if `worse`."""
    failed = [each for each in outcomes if each.result is None]
    for each in failed:
        say(printable(f"{each.store}: {each.reason}"))
    say(f"stores: {len(outcomes):,}, of which failed: {len(failed):,}")
    if failed or worse:
        raise typer.Exit(2 if failed else 1)


def allow_every_descriptor() -> None:
    """Have this process use as many as it may: a copy of a store in use takes two a partition, a connection one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
