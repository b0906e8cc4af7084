"""CONNECT, AUTH_RESPONSE, and credentials that expire."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from duelog.broker.protocol.commands import AuthData, AuthResponse, Connect, FeatureFlags
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.security.authentication import Authentication, InvalidCredentials, Proven
from duelog.broker.server.connection import Login


class Names:
    """Takes any name but the empty one for a proof of itself; `name@10` until then."""

    def prove(self, data: bytes) -> Proven:
        name, _, expires = data.decode().partition("@")
        if not name:
            raise InvalidCredentials("no name")
        return Proven(name, "token", int(expires) if expires else None)


AUTHENTICATION = Authentication({"token": Names()})


def begun(authentication: Authentication, method: str | None = None, data: bytes | None = None) -> Proven:
    """Authenticate a CONNECT."""
    return asyncio.run(authentication.begin(Connect("test", auth_method_name=method, auth_data=data)))


@pytest.mark.parametrize(
    ("method", "data", "proven", "as_guest"),
    [
        ("token", b"me@10", ("me", "token", 10), ("me", "token", 10)),
        ("token", b"", None, None),
        ("token", None, None, None),
        (None, None, None, ("guest", "none", None)),
        ("none", b"", None, ("guest", "none", None)),
        ("tls", b"me", None, ("guest", "none", None)),
        ("", b"me", None, ("guest", "none", None)),
    ],
)
def test_credentials_prove_a_role_or_are_refused_or_those_of_anybody(
    method: str | None, data: bytes | None, proven: object, as_guest: object
) -> None:
    """Wrong ones are not taken for none; those of a method that is not configured are the anonymous role's, if any.

    A broker without methods asks for none, and passes over those that it is given.
    """
    for authentication, expected in ((AUTHENTICATION, proven), (Authentication({"token": Names()}, "guest"), as_guest)):
        if expected is None:
            with pytest.raises(Refused) as caught:
                begun(authentication, method, data)
            assert caught.value.error == ServerError.AUTHENTICATION
        else:
            assert begun(authentication, method, data) == expected
    assert begun(Authentication({}), method, data).role is None


def responded(data: AuthData | None) -> Proven:
    """Authenticate an AUTH_RESPONSE on a connection of `me`."""
    return asyncio.run(AUTHENTICATION.respond(Proven("me", "token", 10), AuthResponse(response=data)))


def test_a_response_proves_the_same_role_anew() -> None:
    """By the same method where it names none."""
    assert responded(AuthData("token", b"me@20")) == ("me", "token", 20)
    assert responded(AuthData(None, b"me@20")) == ("me", "token", 20)


@pytest.mark.parametrize("data", [None, AuthData(), AuthData("token", b"you@20"), AuthData("basic", b"me")])
def test_a_response_that_proves_another_role_or_none_is_refused(data: AuthData | None) -> None:
    """A connection keeps its role."""
    with pytest.raises(Refused) as caught:
        responded(data)
    assert caught.value.error == ServerError.AUTHENTICATION


@pytest.mark.parametrize(
    ("expires_ms", "challenged", "can_refresh", "outcome"),
    [
        (None, False, False, "goes on"),
        (11, False, True, "goes on"),
        (30, True, True, "goes on"),
        (10, False, True, "asked"),
        (10, True, True, "closed"),
        (10, False, False, "closed"),
    ],
)
async def test_expired_credentials_are_asked_for_once_and_then_the_connection_is_closed(
    expires_ms: int | None, challenged: bool, can_refresh: bool, outcome: str
) -> None:
    """At once if the client does not know the question."""
    outcomes: list[str] = []
    flags = FeatureFlags(supports_auth_refresh=can_refresh)
    session: Any = SimpleNamespace(flags=flags, challenge=lambda data: outcomes.append("asked"))
    login = Login(AUTHENTICATION, session, lambda: 10, 60, lambda error, text: outcomes.append("closed"))
    login._proven, login._challenged = Proven("me", "token", expires_ms), challenged
    login._check()
    assert (outcomes or ["goes on"], login._timer is None) == ([outcome], outcome == "closed")
    login.close()
