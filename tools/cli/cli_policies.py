"""The commands `duelog policies get | set | unset | remove`: what a store keeps, and the delay policies of PIP-437.

The delay policies have the flags of Pulsar's admins. A server has delays, retention and time to live of namespaces and
topics, in Pulsar's units.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.errors import InvalidArgument, short_names
from ...store.names import TopicName
from ..output import answer, write_json, write_json_lines, write_table
from .options import NOTHING, Given, Group, Json, PolicyOptions, policy_values
from .place import Place, command_at_place

if TYPE_CHECKING:
    from ... import Policies

app = typer.Typer(
    name="policies",
    no_args_is_help=True,
    help="Policies of a store, a namespace, a topic or a subscription: look at them, set, unset and remove them.",
)

Scope = Annotated[
    Given,
    Group(
        namespace=Annotated[
            str | None,
            typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Of this namespace: tenant/namespace."),
        ],
        topic=Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Of this topic.")],
        subscription=Annotated[
            str | None,
            typer.Option("--subscription", "-s", metavar="SUBSCRIPTION", help="Of this subscription of --topic."),
        ],
    ),
]
"""Where policies are set; nothing: in the store."""


@command_at_place(app, "get")
def get_(
    store: Place,
    scope: Scope = NOTHING,
    json_: Json = False,
) -> None:
    """Show what is set: at every scope, or at one; for a topic or a subscription what is in force, by which scope.

    ```
    duelog policies get data --topic reminders --subscription mailer
    duelog policies get --server http://localhost:8080 --topic reminders
    ```
    """
    namespace, topic, subscription = scope.values()
    with store.opened() as there:
        here = there.policies(**scope)
        if topic is not None or subscription is not None:
            _show_topic(str(topic), subscription, here, there.effective(str(topic), subscription), json_)
            return
    scopes = here or {}
    if namespace is not None and here is not None:
        scopes = {f"namespace {namespace}": here}
    if json_:
        write_json_lines({"scope": name, **policies} for name, policies in scopes.items())
        return
    rows = [
        (short_names(of) if at == 0 else "", name, value)
        for of, policies in scopes.items()
        for at, (name, value) in enumerate((name, value) for name, value in policies.items() if value is not None)
    ]
    write_table("policies", ["scope", "policy", ">value"], rows)


def _show_topic(
    topic: str, subscription: str | None, here: dict[str, Any] | None, found: dict[str, Any], json_: bool
) -> None:
    name, values, set_at = str(TopicName.parse(topic)), found["values"], found["set_at"]  # None: a server does not say
    if json_:
        write_json({"topic": name, "subscription": subscription, "set": here, "effective": values, "set_at": set_at})
        return
    rows = [
        (policy, here and here[policy], value, set_at and set_at[policy] and short_names(set_at[policy]))
        for policy, value in values.items()
    ]
    of = name if subscription is None else f"subscription {subscription} of {name}"
    write_table(f"policies of {short_names(of)}", ["policy", ">set here", ">in force", "set at"], rows)


@command_at_place(app, "set")
def set_(
    store: Place,
    scope: Scope = NOTHING,
    policies: PolicyOptions = NOTHING,
    json_: Json = False,
) -> None:
    """Set policies of the store, a namespace, a topic or a subscription; what is not named stays as it is.

    ```
    duelog policies set data --namespace public/default --enable --time 1s --max-delay 7d
    duelog policies set data --topic reminders --retention 7d --max-redeliveries 5
    ```
    """
    values = policy_values(policies)
    if not values:
        raise InvalidArgument("policies", None, "give one of --enable, --max-delay, --retention, ...; see --help")
    with store.opened(writes=True) as there:
        _say(there.update_policies(values, **scope), json_)


@command_at_place(app, "unset")
def unset_(
    store: Place,
    fields: Annotated[list[str], typer.Argument(metavar="POLICY...", help="Such as retention_ms, as `get` shows it.")],
    scope: Scope = NOTHING,
    json_: Json = False,
) -> None:
    """Unset single policies at one scope, so that the next wider one counts; the others stay.

    ```
    duelog policies unset data --topic reminders retention_ms
    ```
    """
    with store.opened(writes=True) as there:
        _say(there.update_policies(dict.fromkeys(fields), **scope), json_)


def _say(policies: Policies, json_: bool) -> None:
    line = ", ".join(f"{name}={value}" for name, value in policies.fields_set().items())
    answer(asdict(policies), line or "nothing is set there", json_=json_)


@command_at_place(app, "remove")
def remove_(
    store: Place,
    scope: Scope = NOTHING,
    json_: Json = False,
) -> None:
    """Remove everything that is set at one scope, so that the next wider one counts; of the store: the defaults.

    ```
    duelog policies remove data --topic reminders
    ```
    """
    with store.opened(writes=True) as there:
        removed = there.remove_policies(**scope)
    answer({"removed": removed}, "removed" if removed else "nothing was set there", json_=json_)
