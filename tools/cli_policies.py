"""The commands `duelog policies get | set | remove`: delay policies (PIP-437), with the flags of Pulsar's admins."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import typer

from .. import DelayedDeliveryPolicies, DelayedStore
from ..store.errors import InvalidArgument
from ..store.policies import POLICY_FIELDS
from .output import write_json, write_line, write_table
from .traffic import Json, Store
from .values import duration_seconds, open_to_read, open_to_write

app = typer.Typer(
    name="policies",
    no_args_is_help=True,
    help="Delay policies of a store, a namespace or a topic (PIP-437): look at them, set them, remove them.",
)

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Of this namespace: tenant/namespace.")
]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Of this topic.")]


@app.command("get")
def get_(store: Store, namespace: Namespace = None, topic: Topic = None, json_: Json = False) -> None:
    """Show what is set: at every scope, or at one; for a topic also what is in force, and which scope says so.

    ```
    duelog policies get data --topic reminders
    ```
    """
    with open_to_read(store) as opened:
        if topic is not None:
            _show_topic(opened, namespace, topic, json_)
            return
        if namespace is not None:
            found = opened.policies(namespace=namespace)
            scopes = {} if found is None else {f"namespace {namespace}": found}
        else:
            scopes = opened.all_policies()
    if json_:
        write_json([{"scope": scope, **asdict(policies)} for scope, policies in scopes.items()])
        return
    rows = [(scope, *(getattr(policies, name) for name in POLICY_FIELDS)) for scope, policies in scopes.items()]
    write_table("delay policies", ["scope", *(f">{name}" for name in POLICY_FIELDS)], rows)


def _show_topic(store: DelayedStore, namespace: str | None, topic: str, json_: bool) -> None:
    set_here = store.policies(namespace=namespace, topic=topic)
    effective = store.effective_policies(topic)
    here = None if set_here is None else asdict(set_here)
    if json_:
        values = {name: getattr(effective, name) for name in POLICY_FIELDS}
        write_json(
            {"topic": store.topic(topic).name, "set": here, "effective": values, "set_at": dict(effective.set_at)}
        )
        return
    rows = [
        (name, None if here is None else here[name], getattr(effective, name), effective.set_at[name])
        for name in POLICY_FIELDS
    ]
    write_table(f"delay policies of {store.topic(topic).name}", ["policy", ">set here", ">in force", "set at"], rows)


@app.command("set")
def set_(
    store: Store,
    namespace: Namespace = None,
    topic: Topic = None,
    enable: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Delay messages, or deliver all of them at once.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time", "-t", metavar="DURATION", help="The tick: due times are rounded up to a multiple of it."
        ),
    ] = None,
    max_delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Longest delay that a producer may ask for; 0: any.")
    ] = None,
    fixed_delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Delay of every message, whatever was asked for; 0: none.")
    ] = None,
    json_: Json = False,
) -> None:
    """Set policies of the store, a namespace or a topic; what is not named stays as it is.

    ```
    duelog policies set data --namespace public/default --enable --time 1s --max-delay 7d
    ```
    """
    tick_ms, max_ms, fixed_ms = _ms("--time", time), _ms("--max-delay", max_delay), _ms("--fixed-delay", fixed_delay)
    if enable is None and tick_ms is None and max_ms is None and fixed_ms is None:
        raise InvalidArgument("policies", None, "give one of --enable, --disable, --time, --max-delay, --fixed-delay")
    with open_to_write(store, background=False, create=False) as opened:
        before = opened.policies(namespace=namespace, topic=topic) or DelayedDeliveryPolicies()
        policies = DelayedDeliveryPolicies(
            before.active if enable is None else enable,
            before.tick_time_ms if tick_ms is None else tick_ms,
            before.max_delivery_delay_ms if max_ms is None else max_ms,
            before.fixed_delivery_delay_ms if fixed_ms is None else fixed_ms,
        )
        opened.set_policies(policies, namespace=namespace, topic=topic)
    if json_:
        write_json(asdict(policies))
    else:
        write_line(", ".join(f"{name}={value}" for name, value in asdict(policies).items() if value is not None))


@app.command("remove")
def remove_(store: Store, namespace: Namespace = None, topic: Topic = None, json_: Json = False) -> None:
    """Remove what is set at one scope, so that the next wider one counts.

    ```
    duelog policies remove data --topic reminders
    ```
    """
    with open_to_write(store, background=False, create=False) as opened:
        removed = opened.remove_policies(namespace=namespace, topic=topic)
    if json_:
        write_json({"removed": removed})
    else:
        write_line("removed" if removed else "nothing was set there")


def _ms(field: str, text: str | None) -> int | None:
    return None if text is None else math.ceil(duration_seconds(field, text) * 1000)
