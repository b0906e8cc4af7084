"""The command `duelog init`: a store is made with a partition span and defaults that fit what it is for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ... import DelayedStore, StoreConfig
from ...opening import stored_span_ms
from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument
from ...store.policy.policies import DEFAULTS
from ..output import answer
from . import options


def init(
    ctx: typer.Context,
    store: options.Store,
    partition: Annotated[
        str, typer.Option(metavar="DURATION", help="Span of due time of one partition; it cannot be changed later.")
    ] = "1d",
    retention: options.Retention = None,
    retention_bytes: options.RetentionBytes = None,
    ttl: options.Ttl = None,
    max_redeliveries: options.MaxRedeliveries = None,
    dead_letter_topic: options.DeadLetterTopic = None,
    ack_timeout: options.AckTimeout = None,
    backoff: options.Backoff = None,
    max_backoff: options.MaxBackoff = None,
    json_: options.Json = False,
) -> None:
    """Make a store, with what it is to keep unless a namespace, topic or subscription says otherwise.

    `send` and `import` make one too, with a day for the span and the defaults for the rest. What is set here
    `duelog policies` shows and changes; the span stays.

    ```
    duelog init data --partition 1h --retention 7d --max-redeliveries 5
    ```
    """
    if stored_span_ms(store) is not None:
        raise InvalidArgument("STORE", str(store), "there is a store already")
    values = options.policy_values(ctx.params)
    chosen: dict[str, Any] = {name: value for name, value in values.items() if value != DEFAULTS[name]}
    span_ms = round(1000 * duration_seconds("--partition", partition))
    config = StoreConfig(partition_ms=span_ms, background=False, **chosen)
    with DelayedStore.open(store, config) as opened:
        kept = opened.policies()
    shown = {} if kept is None else kept.fields_set()
    line = ", ".join(f"{name}={value}" for name, value in {"partition_ms": span_ms, **shown}.items())
    answer({"partition_ms": span_ms, "policies": shown}, line, json_=json_)
