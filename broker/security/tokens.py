"""Tokens: JSON Web Tokens, signed with a key that the configuration names.

The algorithms are the configuration's, never the token's own choice.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

from .authentication import InvalidCredentials, Proven, UnusableSecurity

if TYPE_CHECKING:
    from jwt.types import Options

_SECRET = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Algorithms of a secret key, and how many bytes it has at least (RFC 7518, section 3.2)."""

_PUBLIC = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}

_OPTIONS: Options = {"verify_aud": False, "verify_iat": False, "verify_jti": False, "verify_sub": False}
"""Signature, `exp` and `nbf` are verified; audience and role by the names that the configuration gives them."""


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Keys of tokens, and the claims that a token must have.

    A key is a path, `file://` and a path, or `data:;base64,` and the key.
    """

    secret_key: str | None = None
    """Key of HS256 and its like; this or `public_key`."""
    public_key: str | None = None
    """PEM or DER."""
    algorithms: Sequence[str] = ()
    """Algorithms accepted; empty: HS256 with a secret key, RS256 with a public one."""
    auth_claim: str = "sub"
    """The claim that names the role."""
    audience_claim: str = "aud"
    audience: str | None = None
    """The audience that a token must name; None: the claim is not checked."""


class TokenMethod:
    """Checks tokens. Thread-safe."""

    def __init__(self, settings: TokenSettings) -> None:
        """Reads the key. Raises UnusableSecurity."""
        self._settings = settings
        if (settings.secret_key is None) == (settings.public_key is None):
            raise UnusableSecurity("tokens need a secret key or a public key, and not both")
        allowed = set(_SECRET) if settings.public_key is None else _PUBLIC
        self._algorithms = list(settings.algorithms) or ["HS256" if settings.public_key is None else "RS256"]
        if not set(self._algorithms) <= allowed:
            raise UnusableSecurity(f"algorithms of such a key are {', '.join(sorted(allowed))}")
        data = _read_key(settings.public_key or settings.secret_key or "")
        self._key = data if settings.public_key is None else _public_key(data)
        for name in self._algorithms:
            if len(data) < _SECRET.get(name, 0):
                raise UnusableSecurity(f"a secret key of {name} has {_SECRET[name]} bytes at least")
            try:
                jwt.get_algorithm_by_name(name).prepare_key(self._key)
            except (jwt.PyJWTError, TypeError) as error:
                raise UnusableSecurity(f"the key of tokens is none of {name}") from error

    def prove(self, data: bytes) -> Proven:
        """The role of a token. Raises InvalidCredentials."""
        try:
            claims = jwt.decode(data, self._key, algorithms=self._algorithms, options=_OPTIONS)
        except (jwt.PyJWTError, ValueError) as error:
            raise InvalidCredentials(f"the token is refused: {error}") from error
        self._check_audience(claims)
        role = claims.get(self._settings.auth_claim)
        if isinstance(role, list) and role:
            role = role[0]
        if not isinstance(role, str) or not role:
            raise InvalidCredentials(f"the token has no role in claim {self._settings.auth_claim!r}")
        expires = claims.get("exp")
        return Proven(role, "token", None if expires is None else int(expires) * 1_000)

    def _check_audience(self, claims: dict[str, Any]) -> None:
        if self._settings.audience is None:
            return
        found = claims.get(self._settings.audience_claim)
        if self._settings.audience not in (found if isinstance(found, list) else [found]):
            raise InvalidCredentials("the token is for another audience")


def _read_key(place: str) -> bytes:
    try:
        if place.startswith("data:"):
            return base64.b64decode(place.partition(",")[2], validate=True)
        return Path(place.removeprefix("file://")).read_bytes()
    except OSError as error:
        raise UnusableSecurity(f"the key of tokens cannot be read: {place}: {error.strerror}") from error
    except ValueError as error:
        raise UnusableSecurity(f"the key of tokens cannot be read: {error}") from error


def _public_key(data: bytes) -> Any:
    try:
        key = load_pem_public_key(data) if data.lstrip().startswith(b"-----") else load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UnusableSecurity(f"the public key of tokens is none: {error}") from error
    if isinstance(key, RSAPublicKey) and key.key_size < 2048:
        raise UnusableSecurity("the public key of tokens has less than 2,048 bits")
    return key
