"""Authentication of connections by tokens and passwords: CONNECT, AUTH_RESPONSE, and credentials that expire.

session: CONNECT -> begin -> Proven -> CONNECTED
later:   expired -> AUTH_CHALLENGE, AUTH_RESPONSE -> respond -> Proven

Tokens are JSON Web Tokens, signed with a key that the configuration names; their algorithms are the configuration's,
never the token's own choice. Passwords stand in a file as `htpasswd -B` writes it, read again when it changes. Clients
of duelog's own protocol over TCP are let in by the same credentials. The listeners' certificate is kept up with its
files.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import bcrypt
import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

from ...operations.operation import Right
from ...operations.wire import NotAllowed
from ...operations.wire_calls import Guard
from ...store.errors import DuelogError
from ...store.names import TopicName
from ..configuration import BrokerConfig
from ..protocol.commands import AuthResponse, Connect
from ..protocol.failures import Refused, ServerError
from ..protocol.loop_calls import KeptUp
from .permissions import Action, Permissions

if TYPE_CHECKING:
    from jwt.types import Options


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


Method = Callable[[bytes], Proven]
"""Proves a role by credentials: may wait for the disk or compute long. Raises InvalidCredentials."""


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
        return await self._prove(command.auth_method_name or "none", command.auth_data or b"")

    async def respond(self, held: Proven, command: AuthResponse) -> Proven:
        """Prove the same role again. Refused: Authentication."""
        given = command.response
        method = (given and given.method) or held.method
        found = await self._prove(method, (given and given.data) or b"")
        if found.role != held.role:
            raise Refused(ServerError.AUTHENTICATION, "the new credentials are of another role")
        return found

    def anonymous(self, method: str) -> Proven:
        """The role of clients that show no credentials, or by another method. Raises InvalidCredentials: none has."""
        if self.methods and self._anonymous_role is None:
            told = method not in ("", "none")
            raise InvalidCredentials(
                f"{method!r:.100} is no authentication method here" if told else "credentials are missing"
            )
        return Proven(self._anonymous_role)

    async def prove(self, method: str, data: bytes) -> Proven:
        """Prove a role by credentials, as a request over HTTP has them. Raises InvalidCredentials."""
        checks = self.methods.get(method)
        return self.anonymous(method) if checks is None else await asyncio.to_thread(checks, data)

    async def _prove(self, method: str, data: bytes) -> Proven:
        try:
            return await self.prove(method, data)
        except InvalidCredentials as error:
            raise Refused(ServerError.AUTHENTICATION, str(error)) from error


# -- tokens ------------------------------------------------------------------------------------------

_SECRET = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Algorithms of a secret key, and how many bytes it has at least (RFC 7518, section 3.2)."""

_PUBLIC = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}

_OPTIONS: Options = {"verify_aud": False, "verify_iat": False, "verify_jti": False, "verify_sub": False}
"""Signature, `exp` and `nbf` are verified; audience and role by the names that the configuration gives them."""


class TokenMethod:
    """Checks tokens. Thread-safe."""

    def __init__(self, config: BrokerConfig) -> None:
        """Reads the key. Raises UnusableSecurity."""
        self._config = config
        if (config.token_secret_key is None) == (config.token_public_key is None):
            raise UnusableSecurity("tokens need a secret key or a public key, and not both")
        allowed = set(_SECRET) if config.token_public_key is None else _PUBLIC
        self._algorithms = list(config.token_algorithms) or ["HS256" if config.token_public_key is None else "RS256"]
        if not set(self._algorithms) <= allowed:
            raise UnusableSecurity(f"algorithms of such a key are {', '.join(sorted(allowed))}")
        data = _read_key(config.token_public_key or config.token_secret_key or "")
        self._key = data if config.token_public_key is None else _public_key(data)
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
        role = claims.get(self._config.token_auth_claim)
        if isinstance(role, list) and role:
            role = role[0]
        if not isinstance(role, str) or not role:
            raise InvalidCredentials(f"the token has no role in claim {self._config.token_auth_claim!r}")
        expires = claims.get("exp")
        return Proven(role, "token", None if expires is None else int(expires) * 1_000)

    def _check_audience(self, claims: dict[str, Any]) -> None:
        if self._config.token_audience is None:
            return
        found = claims.get(self._config.token_audience_claim)
        if self._config.token_audience not in (found if isinstance(found, list) else [found]):
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


# -- passwords ---------------------------------------------------------------------------------------

_REMEMBERED = 1_000
"""Right passwords that need no bcrypt the next time, kept as a keyed hash; a check takes some 50 ms of a processor."""

_BCRYPT = re.compile(rb"\$2[aby]\$[0-9]{2}\$[./A-Za-z0-9]{53}")


class PasswordMethod:
    """Checks `user:password`; the role is the user. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises UnusableSecurity."""
        self._lock = threading.Lock()
        self._secret = os.urandom(32)
        self._right: dict[bytes, None] = {}
        self._users = KeptUp(partial(_read_users, path), path)
        self._unknown = bcrypt.hashpw(os.urandom(16).hex().encode(), bcrypt.gensalt(10))

    def prove(self, data: bytes) -> Proven:
        """The role. Raises InvalidCredentials, which is the same for an unknown user and a wrong password."""
        user, colon, password = data.partition(b":")
        try:
            name = user.decode()
        except UnicodeDecodeError:
            name = ""
        if not colon or not name or len(password) > 72 or b"\0" in password:
            raise InvalidCredentials("expected user:password, the password of at most 72 bytes")
        with self._lock:
            self._users.refresh()
            stored = self._users.value.get(name)
        if not self._matches(data, password, self._unknown if stored is None else stored) or stored is None:
            raise InvalidCredentials("the user or the password is wrong")
        return Proven(name, "basic")

    def _matches(self, data: bytes, password: bytes, stored: bytes) -> bool:
        mark = hmac.digest(self._secret, stored + data, hashlib.sha256)
        if mark in self._right:
            return True
        if not bcrypt.checkpw(password, stored):
            return False
        with self._lock:
            if len(self._right) >= _REMEMBERED:
                self._right.clear()
            self._right[mark] = None
        return True


def _read_users(path: Path) -> dict[str, bytes]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UnusableSecurity(f"the password file cannot be used: {path}: {error.strerror}") from error
    users = {}
    for number, line in enumerate(lines, 1):
        user, _, stored = line.strip().partition(b":")
        if not user or user.startswith(b"#"):
            continue
        if _BCRYPT.fullmatch(stored) is None:
            raise UnusableSecurity(
                f"the password file cannot be used: {path}, line {number}: no bcrypt hash; write it with htpasswd -B"
            )
        users[user.decode(errors="replace")] = stored
    return users


def authentication_of(config: BrokerConfig) -> Authentication:
    """Make the authentication. Reads keys and password files. Raises UnusableSecurity."""
    methods: dict[str, Method] = {}
    if "token" in config.authentication_providers:
        methods["token"] = TokenMethod(config).prove
    if "basic" in config.authentication_providers:
        if config.basic_auth_conf is None:
            raise UnusableSecurity("basic authentication needs basicAuthConf, a file of passwords")
        methods["basic"] = PasswordMethod(config.basic_auth_conf).prove
    return Authentication(methods, config.anonymous_user_role)


_ACTIONS = {
    Right.READ: (Action.PRODUCE, Action.CONSUME),
    Right.PRODUCE: (Action.PRODUCE,),
    Right.CONSUME: (Action.CONSUME,),
}


@dataclass(eq=False)
class WireAdmission:
    """Lets clients in by their credentials."""

    _authentication: Authentication
    _permissions: Permissions
    _now_ms: Callable[[], int]

    def __call__(self, method: str, credentials: bytes) -> Guard:
        """Return what checks the requests of a client. In a thread that may wait. Raises NotAllowed."""
        try:
            checks = self._authentication.methods.get(method)
            proven = self._authentication.anonymous(method) if checks is None else checks(credentials)
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


class Certificate(KeptUp[ssl.SSLContext]):
    """A certificate chain and its key, in PEM, kept up with their files; TLS 1.2 and later."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Reads the files. Raises UnusableSecurity."""
        self._certificate = certificate
        self._key = key
        self.context = self._load()
        """The one context, of which new connections get the certificate that was put in place last."""
        super().__init__(self._put_in_place, certificate, key)

    def _put_in_place(self) -> ssl.SSLContext:
        self._load()  # a failure would leave half of a pair in the context that is in use
        self.context.load_cert_chain(self._certificate, self._key, password=_refuse)
        return self.context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in (self._certificate, self._key):
            try:
                path.open("rb").close()
            except OSError as error:
                raise UnusableSecurity(f"{path} cannot be read: {error.strerror}") from error
        try:
            context.load_cert_chain(self._certificate, self._key, password=_refuse)
        except ssl.SSLError as error:
            reason = f" ({error.reason})" if error.reason else ""
            raise UnusableSecurity(
                f"{self._certificate} and {self._key} are not a certificate and its key in PEM{reason}"
            ) from error
        return context


def _refuse() -> NoReturn:
    """OpenSSL would ask for a password on the terminal."""
    raise UnusableSecurity("the key of the certificate is encrypted; the broker needs one that is not")
