"""Clients of duelog's own protocol over TCP: their role by the broker's tokens, their rights by its permissions."""

from __future__ import annotations

from collections.abc import Callable

from ...operations.operation import Right
from ...operations.wire import NotAllowed
from ...operations.wire_calls import Guard
from ...store.names import TopicName
from .authentication import Authentication, InvalidCredentials
from .permissions import Action, Permissions

_ACTIONS = {
    Right.READ: (Action.PRODUCE, Action.CONSUME),
    Right.PRODUCE: (Action.PRODUCE,),
    Right.CONSUME: (Action.CONSUME,),
}


class WireAdmission:
    """Lets clients in by their credentials."""

    def __init__(self, authentication: Authentication, permissions: Permissions, now_ms: Callable[[], int]) -> None:
        self._authentication = authentication
        self._permissions = permissions
        self._now_ms = now_ms

    def __call__(self, method: str, credentials: bytes) -> Guard:
        """Return what checks the requests of a client. In a thread that may wait. Raises NotAllowed."""
        try:
            checks = self._authentication.methods.get(method)
            proven = self._authentication.anonymous() if checks is None else checks.prove(credentials)
        except InvalidCredentials as error:
            raise NotAllowed(str(error)) from error
        role, permissions = proven.role, self._permissions

        def guard(right: Right, topic: str | None) -> None:
            if proven.expires_ms is not None and self._now_ms() >= proven.expires_ms:
                raise NotAllowed("the token is refused: it has expired")
            if right is Right.NONE:
                return
            if right is Right.ADMIN or topic is None:
                if not permissions.is_superuser(role):
                    raise NotAllowed(f"role {role!r} may not do what concerns the whole store")
                return
            namespace = TopicName.parse(topic).namespace_name
            if not permissions.allows(role, namespace, *_ACTIONS[right]):
                asked = " or ".join(_ACTIONS[right])
                raise NotAllowed(f"role {role!r} may not {asked} in namespace {namespace}")

        return guard
