"""Permissions of roles, by namespace.

Superusers may do everything, administrators of a tenant everything in it, other roles what the namespace grants them.
Whether a namespace or topic exists makes no difference to the answer, so that a refusal tells nothing.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Protocol

from ..protocol.failures import Refused, ServerError


class Action(StrEnum):
    """A right that a namespace grants a role."""

    PRODUCE = "produce"
    CONSUME = "consume"


class Grants(Protocol):
    """Rights that tenants and namespaces grant roles."""

    def administrators(self, tenant: str) -> Collection[str]:
        """Roles that may do everything in a tenant."""
        ...

    def granted(self, namespace: str) -> Mapping[str, Collection[Action]]:
        """By role, what it may do in `tenant/namespace`."""
        ...


class Permissions:
    """Decides on requests by the role of a connection."""

    def __init__(
        self, grants: Grants | None = None, superusers: Collection[str] = (), viewers: Collection[str] = ()
    ) -> None:
        """grants: None allows everything to every connection that got in. viewers: may look at the whole store."""
        self._grants = grants
        self._superusers = frozenset(superusers)
        self._viewers = frozenset(viewers)

    def may_look(self, role: str | None) -> bool:
        """Return True for a role that may ask for every operation that changes nothing."""
        return self.is_superuser(role) or role in self._viewers

    def is_superuser(self, role: str | None) -> bool:
        return self._grants is None or role in self._superusers

    def administers(self, role: str | None, tenant: str) -> bool:
        return self._grants is None or role in self._superusers or role in self._grants.administrators(tenant)

    def allows(self, role: str | None, namespace: str, *actions: Action) -> bool:
        if self._grants is None or self.administers(role, namespace.partition("/")[0]):
            return True
        if role is None:
            return False
        granted = self._grants.granted(namespace).get(role, ())
        return any(action in granted for action in actions)

    def require(self, role: str | None, namespace: str, *actions: Action) -> None:
        """Refused: Authorization, if `allows` says no."""
        if not self.allows(role, namespace, *actions):
            asked = " or ".join(actions)
            raise Refused(ServerError.AUTHORIZATION, f"role {role!r} may not {asked} in namespace {namespace}")
