"""What a connection has proven, and methods of proving it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ...store.errors import DuelogError


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
