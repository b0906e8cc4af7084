"""Login of a connection: its credentials at CONNECT, and again when they expire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ..protocol import commands
from ..protocol.failures import Refused, ServerError
from ..protocol.states import Session
from ..security.authentication import Authentication, Proven, Verdict, check

Fail = Callable[[ServerError, str], object]
"""Ends a connection with an error."""


class Admission(Protocol):
    """Lets a connection in."""

    @property
    def role(self) -> str | None:
        """None: it has shown no credentials, or the broker asks for none."""
        ...

    async def connect(self, command: commands.Connect) -> None:
        """Have the session accept the client, or end the connection."""
        ...

    async def respond(self, command: commands.AuthResponse) -> None:
        """Take new credentials."""
        ...

    def close(self) -> None:
        """The connection is gone."""
        ...


_REFRESH = b"PulsarAuthRefresh"
"""Text of an AUTH_CHALLENGE at which clients fetch new credentials."""


class Login:
    """Authentication of one connection. Runs on the event loop's thread."""

    def __init__(
        self,
        authentication: Authentication,
        session: Session,
        clock: Callable[[], int],
        check_s: float,
        fail: Fail,
    ) -> None:
        """clock: ms since 1970. check_s: between two looks at credentials. fail: ends the connection with an error."""
        self._authentication = authentication
        self._session = session
        self._clock = clock
        self._check_s = check_s
        self._fail = fail
        self._proven: Proven | None = None
        self._challenged = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def role(self) -> str | None:
        """None: it has shown no credentials, or the broker asks for none."""
        return None if self._proven is None else self._proven.role

    async def connect(self, command: commands.Connect) -> None:
        """Look at the credentials of CONNECT. Those that expire are looked at again."""
        try:
            self._proven = await self._authentication.begin(command)
        except Refused as error:
            self._fail(error.error, error.message)
            return
        if self._proven.expires_ms is not None:
            self._check_later()
        self._session.accept()

    async def respond(self, command: commands.AuthResponse) -> None:
        """Take new credentials, of the same role."""
        if self._proven is None:
            return
        try:
            self._proven = await self._authentication.respond(self._proven, command)
            self._challenged = False
        except Refused as error:
            self._fail(error.error, error.message)

    def close(self) -> None:
        """The connection is gone."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        if not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._check_s, self._check)

    def _check(self) -> None:
        if self._proven is None:
            return
        can_refresh = self._session.flags.supports_auth_refresh
        verdict = check(self._proven, self._clock(), challenged=self._challenged, can_refresh=can_refresh)
        if verdict is Verdict.CLOSE:
            self._fail(ServerError.AUTHENTICATION, "the credentials have expired")
            return
        if verdict is Verdict.CHALLENGE:
            self._challenged = True
            self._session.challenge(commands.AuthData(self._proven.method, _REFRESH))
        self._check_later()
