"""The options in which the commands `policies set` and `init` take policies, and their values in a store's terms."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from ...store.policy.policies import PolicyValue
from ..values import duration_seconds

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
    str | None, typer.Option(metavar="TOPIC", help="Where dead messages go; empty: <topic>-<subscription>-DLQ.")
]
AckTimeout = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Deliver again what is not acknowledged by then; 0: never.")
]
Backoff = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Hand out again after this what was given back, then doubled.")
]
MaxBackoff = Annotated[str | None, typer.Option(metavar="DURATION", help="The most that --backoff is doubled to.")]


def delay_values(
    enable: bool | None, time: str | None, max_delay: str | None, fixed_delay: str | None
) -> dict[str, PolicyValue]:
    """The delay policies that these options set."""
    return _given(
        active=enable,
        tick_time_ms=_ms("--time", time),
        max_delivery_delay_ms=_ms("--max-delay", max_delay),
        fixed_delivery_delay_ms=_ms("--fixed-delay", fixed_delay),
    )


def kept_values(
    retention: str | None,
    retention_bytes: int | None,
    ttl: str | None,
    max_redeliveries: int | None,
    dead_letter_topic: str | None,
    ack_timeout: str | None,
    backoff: str | None,
    max_backoff: str | None,
) -> dict[str, PolicyValue]:
    """The other policies that these options set."""
    return _given(
        retention_ms=_ms("--retention", retention),
        retention_bytes=retention_bytes,
        ttl_ms=_ms("--ttl", ttl),
        max_redeliveries=max_redeliveries,
        dead_letter_topic=dead_letter_topic,
        ack_timeout_ms=_ms("--ack-timeout", ack_timeout),
        nack_backoff_ms=_ms("--backoff", backoff),
        nack_backoff_max_ms=_ms("--max-backoff", max_backoff),
    )


def _given(**values: PolicyValue | None) -> dict[str, PolicyValue]:
    return {name: value for name, value in values.items() if value is not None}


def _ms(field: str, text: str | None) -> int | None:
    return None if text is None else math.ceil(duration_seconds(field, text) * 1000)
