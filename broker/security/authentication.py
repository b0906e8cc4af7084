"""Authentication of connections: CONNECT, AUTH_RESPONSE, and the checks of credentials that expire.

session: CONNECT -> begin -> Proven -> CONNECTED
later:   check, each minute: CHALLENGE -> AUTH_CHALLENGE, AUTH_RESPONSE -> respond -> Proven; CLOSE
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple, Protocol

from ...store.errors import DuelogError
from ..protocol.commands import AuthResponse, Connect
from ..protocol.failures import Refused, ServerError


class InvalidCredentials(DuelogError):
    """A client's credentials are missing, wrong or expired; the text names no secret."""


class UnusableSecurity(DuelogError):
    """A setting, key, password file or certificate that cannot be used: the broker does not start with it."""


class Proven(NamedTuple):
    """A role, and until when it holds."""

    role: str | None
    """None: the broker asks for no credentials."""
    method: str = "none"
    expires_ms: int | None = None
    """Milliseconds since 1970; None: never."""


class Method(Protocol):
    """A way to prove a role."""

    def prove(self, data: bytes) -> Proven:
        """May wait for the disk or compute long. Raises InvalidCredentials."""
        ...


REFRESH_CHECK_S = 60.0
"""Between two checks of a connection's credentials."""


class Verdict(Enum):
    """The next step for a connection whose credentials were checked."""

    GOOD = auto()
    CHALLENGE = auto()
    CLOSE = auto()


class Authentication:
    """Proves roles by the methods that are configured; without any, every connection is let in without a role."""

    def __init__(self, methods: Mapping[str, Method], anonymous_role: str | None = None) -> None:
        """methods: by the name that clients give, `token`, `basic`.

        anonymous_role: of clients that give no credentials, or of a method that is not among these.
        """
        self.methods = methods
        self._anonymous_role = anonymous_role

    async def begin(self, command: Connect) -> Proven:
        """Prove the role of a new connection. Refused: Authentication."""
        if not self.methods:
            return Proven(self._anonymous_role)
        method = command.auth_method_name or "none"
        if method not in self.methods and self._anonymous_role is not None:
            return Proven(self._anonymous_role)
        return await self._prove(method, command.auth_data or b"")

    async def respond(self, held: Proven, command: AuthResponse) -> Proven:
        """Prove the same role again. Refused: Authentication."""
        given = command.response
        method = (given and given.method) or held.method
        found = await self._prove(method, (given and given.data) or b"")
        if found.role != held.role:
            raise Refused(ServerError.AUTHENTICATION, "the new credentials are of another role")
        return found

    def anonymous(self) -> Proven:
        """The role of clients that show no credentials. Raises InvalidCredentials where there is none."""
        if self.methods and self._anonymous_role is None:
            raise InvalidCredentials("credentials are missing")
        return Proven(self._anonymous_role)

    async def prove(self, method: str, data: bytes) -> Proven:
        """Prove a role by credentials from elsewhere, as a request over HTTP. Raises InvalidCredentials."""
        checks = self.methods.get(method)
        if checks is None:
            raise InvalidCredentials(f"{method!r} is no authentication method here")
        return await asyncio.to_thread(checks.prove, data)

    async def _prove(self, method: str, data: bytes) -> Proven:
        try:
            return await self.prove(method, data)
        except InvalidCredentials as error:
            raise Refused(ServerError.AUTHENTICATION, str(error)) from error


def check(held: Proven, now_ms: int, *, challenged: bool, can_refresh: bool) -> Verdict:
    """Check a connection's credentials. challenged: an AUTH_CHALLENGE went out. can_refresh: the client answers one."""
    if held.expires_ms is None or now_ms < held.expires_ms:
        return Verdict.GOOD
    return Verdict.CLOSE if challenged or not can_refresh else Verdict.CHALLENGE
