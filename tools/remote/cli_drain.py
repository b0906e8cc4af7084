"""The command `duelog drain`: what is pending goes to another broker."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from ... import DelayedStore
from ...engine import open_engine
from ...opening import stored_span_ms
from ...store.clock import SystemClock
from ...store.config import StoreConfig
from ...store.errors import InvalidArgument
from ...store.names import TopicName
from ..cli.options import Json, Store
from ..output import progress_bar, say, write_json, write_line
from ..values import alone, iso_time, require_store

if TYPE_CHECKING:
    from .draining import Drained

TOKEN = "DUELOG_TOKEN"


def drain(
    store: Store,
    to: Annotated[str, typer.Option(metavar="URL", help="The other broker: pulsar:// or pulsar+ssl://host:port.")],
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic; may be repeated.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Copy: cancel nothing here, and work beside a process that has it open.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count what would be sent, and what is left.")
    ] = False,
    subscriptions: Annotated[
        bool, typer.Option("--subscriptions/--no-subscriptions", help="Make the topics' subscriptions there first.")
    ] = True,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", envvar=TOKEN, show_envvar=True, help="A token for the other broker.")
    ] = None,
    trust: Annotated[
        Path | None, typer.Option("--tls-trust", metavar="FILE", help="Certificates that are trusted, in PEM.")
    ] = None,
    json_: Json = False,
) -> None:
    """Send what is pending to a Pulsar cluster or another duelog broker, with its due times, and cancel it here.

    Needs `pip install 'duelog[drain]'`, and the store for itself: stop its broker first. A message is cancelled here
    once it is confirmed there. Run it again after whatever ended it: nothing is lost, and at most 512 entries come
    twice, none where the other broker deduplicates. Key, ordering key, properties, event time and null values are
    carried; batches become single messages, payloads are sent uncompressed. What cannot be carried is counted, stays
    here and makes exit status 1. What has fired is not pending: let its subscriptions receive it here.

    ```
    duelog drain data --to pulsar://cluster.example:6650 --dry-run
    duelog drain data --to pulsar+ssl://cluster.example:6651 --token "$TOKEN"
    ```
    """
    try:
        from .draining import Drain
        from .pulsar_target import PulsarTarget
    except ModuleNotFoundError as error:
        raise InvalidArgument("drain", error.name, "is not installed; pip install 'duelog[drain]'") from error
    require_store(store)
    topics = [TopicName.parse(each) for each in topic] if topic else None
    target = PulsarTarget(to, token=token, trust=trust)
    config = StoreConfig(partition_ms=stored_span_ms(store) or StoreConfig().partition_ms, background=False)
    with alone("draining cancels here what is there: end it first, or copy with --keep"):
        engine = open_engine(store.absolute(), config, SystemClock(), read_only=keep or dry_run, records_defaults=False)
    with closing(target), DelayedStore(engine) as opened:
        total = opened.stats().pending
        with progress_bar("messages", MofNCompleteColumn(), TimeRemainingColumn()) as progress:
            work = Drain(
                engine,
                None if dry_run else target,
                topics=topics,
                keep=keep,
                subscriptions=subscriptions,
                progress=lambda done: progress(done.entries, total),
            )
            try:
                work.run()
            except BaseException:
                say(f"{work.done.entries:,} entries were sent; the same command goes on with the others")
                raise
    _show(work.done, dry_run, json_)
    if work.done.left:
        raise typer.Exit(1)


def _show(done: Drained, dry_run: bool, json_: bool) -> None:
    if json_:
        write_json(asdict(done))
        return
    due = (
        "" if done.first_due_ms is None else f", due {iso_time(done.first_due_ms)} to {iso_time(done.last_due_ms or 0)}"
    )
    what = "would be sent" if dry_run else "are there"
    write_line(f"{done.messages:,} messages in {done.entries:,} entries of {done.topics:,} topics {what}{due}")
    if done.before:
        say(f"{done.before:,} entries had been sent before")
    for reason, count in sorted(done.left.items()):
        say(f"{count:,} entries are left: {reason}")
