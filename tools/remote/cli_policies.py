"""The commands `duelog policies get | set | unset | remove`: what a store keeps, and the delay policies of PIP-437.

The delay policies have the flags of Pulsar's admins. A server has delays, retention and time to live of namespaces and
topics, in Pulsar's units.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ... import Policies
from ...store.errors import InvalidArgument
from ..cli import options
from ..output import answer, write_json, write_json_lines, write_table
from .operations import Effective, Scope
from .places import Place, Server, ServerCommand, Token, Trust, administered

app = typer.Typer(
    name="policies",
    no_args_is_help=True,
    help="Policies of a store, a namespace, a topic or a subscription: look at them, set, unset and remove them.",
)

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Of this namespace: tenant/namespace.")
]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Of this topic.")]
Subscription = Annotated[
    str | None, typer.Option("--subscription", "-s", metavar="SUBSCRIPTION", help="Of this subscription of --topic.")
]


@app.command("get", cls=ServerCommand)
def get_(
    store: Place,
    namespace: Namespace = None,
    topic: Topic = None,
    subscription: Subscription = None,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: options.Json = False,
) -> None:
    """Show what is set: at every scope, or at one; for a topic or a subscription what is in force, by which scope.

    ```
    duelog policies get data --topic reminders --subscription mailer
    duelog policies get --server http://localhost:8080 --topic reminders
    ```
    """
    scope = Scope(namespace, topic, subscription)
    with administered(server or store, token, trust) as there:
        if topic is not None or subscription is not None:
            _show_topic(there.effective(scope), subscription, json_)
            return
        scopes = there.policies(scope)
    if json_:
        write_json_lines({"scope": scope, **asdict(policies)} for scope, policies in scopes.items())
        return
    rows = [
        (scope if at == 0 else "", name, value)
        for scope, policies in scopes.items()
        for at, (name, value) in enumerate(policies.fields_set().items())
    ]
    write_table("policies", ["scope", "policy", ">value"], rows)


def _show_topic(found: Effective, subscription: str | None, json_: bool) -> None:
    here = None if found.here is None else asdict(found.here)
    if json_:
        write_json(
            {"topic": found.topic, "subscription": subscription, "set": here, "effective": found.values,
             "set_at": found.set_at}
        )  # fmt: skip
        return
    rows = [
        (name, None if here is None else here[name], value, None if found.set_at is None else found.set_at[name])
        for name, value in found.values.items()
    ]
    of = found.topic if subscription is None else f"subscription {subscription} of {found.topic}"
    write_table(f"policies of {of}", ["policy", ">set here", ">in force", "set at"], rows)


@app.command("set", cls=ServerCommand)
def set_(
    ctx: typer.Context,
    store: Place,
    namespace: Namespace = None,
    topic: Topic = None,
    subscription: Subscription = None,
    enable: options.Enable = None,
    time: options.Tick = None,
    max_delay: options.MaxDelay = None,
    fixed_delay: options.FixedDelay = None,
    retention: options.Retention = None,
    retention_bytes: options.RetentionBytes = None,
    ttl: options.Ttl = None,
    max_redeliveries: options.MaxRedeliveries = None,
    dead_letter_topic: options.DeadLetterTopic = None,
    ack_timeout: options.AckTimeout = None,
    backoff: options.Backoff = None,
    max_backoff: options.MaxBackoff = None,
    max_in_flight: options.MaxInFlight = None,
    max_pending: options.MaxPending = None,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: options.Json = False,
) -> None:
    """Set policies of the store, a namespace, a topic or a subscription; what is not named stays as it is.

    ```
    duelog policies set data --namespace public/default --enable --time 1s --max-delay 7d
    duelog policies set data --topic reminders --retention 7d --max-redeliveries 5
    ```
    """
    values = options.policy_values(ctx.params)
    if not values:
        raise InvalidArgument("policies", None, "give one of --enable, --max-delay, --retention, ...; see --help")
    with administered(server or store, token, trust, writes=True) as there:
        _say(there.update_policies(Scope(namespace, topic, subscription), values), json_)


@app.command("unset", cls=ServerCommand)
def unset_(
    store: Place,
    fields: Annotated[list[str], typer.Argument(metavar="POLICY...", help="Such as retention_ms, as `get` shows it.")],
    namespace: Namespace = None,
    topic: Topic = None,
    subscription: Subscription = None,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: options.Json = False,
) -> None:
    """Unset single policies at one scope, so that the next wider one counts; the others stay.

    ```
    duelog policies unset data --topic reminders retention_ms
    ```
    """
    with administered(server or store, token, trust, writes=True) as there:
        _say(there.update_policies(Scope(namespace, topic, subscription), dict.fromkeys(fields)), json_)


def _say(policies: Policies, json_: bool) -> None:
    line = ", ".join(f"{name}={value}" for name, value in policies.fields_set().items())
    answer(asdict(policies), line or "nothing is set there", json_=json_)


@app.command("remove", cls=ServerCommand)
def remove_(
    store: Place,
    namespace: Namespace = None,
    topic: Topic = None,
    subscription: Subscription = None,
    server: Server = None,
    token: Token = None,
    trust: Trust = None,
    json_: options.Json = False,
) -> None:
    """Remove everything that is set at one scope, so that the next wider one counts; of the store: the defaults.

    ```
    duelog policies remove data --topic reminders
    ```
    """
    with administered(server or store, token, trust, writes=True) as there:
        removed = there.remove_policies(Scope(namespace, topic, subscription))
    answer({"removed": removed}, "removed" if removed else "nothing was set there", json_=json_)
