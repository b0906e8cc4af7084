"""The commands `duelog policies get | set | unset | remove`: what a store keeps, and the delay policies of PIP-437.

The delay policies have the flags of Pulsar's admins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ... import DelayedStore, Policies
from ...store.errors import InvalidArgument
from ...store.policy.policies import POLICY_FIELDS
from ..output import answer, write_json, write_table
from ..values import open_to_read, open_to_write
from . import options

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
    str | None, typer.Option("--subscription", "-s", metavar="NAME", help="Of this subscription of --topic.")
]


@app.command("get")
def get_(
    store: options.Store,
    namespace: Namespace = None,
    topic: Topic = None,
    subscription: Subscription = None,
    json_: options.Json = False,
) -> None:
    """Show what is set: at every scope, or at one; for a topic or a subscription what is in force, by which scope.

    ```
    duelog policies get data --topic reminders --subscription mailer
    ```
    """
    scope = {"namespace": namespace, "topic": topic, "subscription": subscription}
    with open_to_read(store) as opened:
        if topic is not None or subscription is not None:
            _show_topic(opened, scope, json_)
            return
        if namespace is not None:
            found = opened.policies(namespace=namespace)
            scopes = {} if found is None else {f"namespace {namespace}": found}
        else:
            scopes = opened.all_policies()
    if json_:
        write_json([{"scope": scope, **asdict(policies)} for scope, policies in scopes.items()])
        return
    rows = [
        (scope if at == 0 else "", name, value)
        for scope, policies in scopes.items()
        for at, (name, value) in enumerate(policies.fields_set().items())
    ]
    write_table("policies", ["scope", "policy", ">value"], rows)


def _show_topic(store: DelayedStore, scope: Mapping[str, str | None], json_: bool) -> None:
    set_here = store.policies(**scope)
    topic, subscription = store.topic(str(scope["topic"])).name, scope["subscription"]
    effective = store.effective_policies(topic, subscription)
    here = None if set_here is None else asdict(set_here)
    if json_:
        values = {name: getattr(effective, name) for name in POLICY_FIELDS}
        write_json(
            {"topic": topic, "subscription": subscription, "set": here, "effective": values,
             "set_at": dict(effective.set_at)}
        )  # fmt: skip
        return
    rows = [
        (name, None if here is None else here[name], getattr(effective, name), effective.set_at[name])
        for name in POLICY_FIELDS
    ]
    of = topic if subscription is None else f"subscription {subscription} of {topic}"
    write_table(f"policies of {of}", ["policy", ">set here", ">in force", "set at"], rows)


@app.command("set")
def set_(
    ctx: typer.Context,
    store: options.Store,
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
    _update(store, {"namespace": namespace, "topic": topic, "subscription": subscription}, values, json_)


@app.command("unset")
def unset_(
    store: options.Store,
    fields: Annotated[list[str], typer.Argument(metavar="POLICY...", help="Such as retention_ms, as `get` shows it.")],
    namespace: Namespace = None,
    topic: Topic = None,
    subscription: Subscription = None,
    json_: options.Json = False,
) -> None:
    """Unset single policies at one scope, so that the next wider one counts; the others stay.

    ```
    duelog policies unset data --topic reminders retention_ms
    ```
    """
    scope = {"namespace": namespace, "topic": topic, "subscription": subscription}
    _update(store, scope, dict.fromkeys(fields), json_)


def _update(store: Any, scope: Mapping[str, str | None], values: Mapping[str, Any], json_: bool) -> None:
    with open_to_write(store, create=False) as opened:
        policies: Policies = opened.update_policies(**scope, **values)
    line = ", ".join(f"{name}={value}" for name, value in policies.fields_set().items())
    answer(asdict(policies), line or "nothing is set there", json_=json_)


@app.command("remove")
def remove_(
    store: options.Store,
    namespace: Namespace = None,
    topic: Topic = None,
    subscription: Subscription = None,
    json_: options.Json = False,
) -> None:
    """Remove everything that is set at one scope, so that the next wider one counts; of the store: the defaults.

    ```
    duelog policies remove data --topic reminders
    ```
    """
    with open_to_write(store, create=False) as opened:
        removed = opened.remove_policies(namespace=namespace, topic=topic, subscription=subscription)
    answer({"removed": removed}, "removed" if removed else "nothing was set there", json_=json_)
