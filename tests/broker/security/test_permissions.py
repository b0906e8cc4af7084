"""Permissions of roles."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.security.permissions import Action, Permissions


class Kept:
    """Tenant `t` with administrator `boss`; `w` may produce in t/n, `r` consume."""

    def administrators(self, tenant: str) -> Collection[str]:
        return ("boss",) if tenant == "t" else ()

    def granted(self, namespace: str) -> Mapping[str, Collection[Action]]:
        return {"w": {Action.PRODUCE}, "r": {Action.CONSUME}} if namespace == "t/n" else {}


PERMISSIONS = Permissions(Kept(), ["root"])


@pytest.mark.parametrize(
    ("role", "namespace", "allowed"),
    [
        ("root", "t/n", "pc"),
        ("root", "x/y", "pc"),
        ("boss", "t/n", "pc"),
        ("boss", "t/other", "pc"),
        ("boss", "x/y", ""),
        ("w", "t/n", "p"),
        ("r", "t/n", "c"),
        ("w", "t/other", ""),
        ("stranger", "t/n", ""),
        ("", "t/n", ""),
        (None, "t/n", ""),
    ],
)
def test_a_role_may_do_what_it_was_granted(role: str | None, namespace: str, allowed: str) -> None:
    """Superusers everywhere, administrators in their tenant, others by namespace and action."""
    assert PERMISSIONS.allows(role, namespace, Action.PRODUCE) == ("p" in allowed)
    assert PERMISSIONS.allows(role, namespace, Action.CONSUME) == ("c" in allowed)
    assert PERMISSIONS.allows(role, namespace, *Action) == bool(allowed)
    assert PERMISSIONS.is_superuser(role) == (role == "root")


def test_a_refusal_is_an_authorization_error() -> None:
    """With role, action and namespace."""
    with pytest.raises(Refused) as caught:
        PERMISSIONS.require("r", "t/n", Action.PRODUCE)
    assert caught.value.error == ServerError.AUTHORIZATION
    assert caught.value.message == "role 'r' may not produce in namespace t/n"


def test_without_authorization_everything_is_allowed() -> None:
    """To connections without a role, too."""
    permissions = Permissions()
    assert permissions.allows(None, "x/y", Action.PRODUCE)
    assert permissions.is_superuser(None)
