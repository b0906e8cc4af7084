"""CONNECT, AUTH_RESPONSE, passwords, tokens, credentials that expire; certificates of the listeners."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bcrypt
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from duelog.broker.configuration import BrokerConfig
from duelog.broker.protocol.commands import AuthData, AuthResponse, Connect, FeatureFlags
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.security.authentication import (
    Authentication,
    Certificate,
    InvalidCredentials,
    PasswordMethod,
    Proven,
    TokenMethod,
    UnusableSecurity,
)
from duelog.broker.server.connection import Login
from tests.broker.security.certificates import write_pair


class Names:
    """Takes any name but the empty one for a proof of itself; `name@10` until then."""

    def prove(self, data: bytes) -> Proven:
        name, _, expires = data.decode().partition("@")
        if not name:
            raise InvalidCredentials("no name")
        return Proven(name, "token", int(expires) if expires else None)


AUTHENTICATION = Authentication({"token": Names().prove})


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
    for authentication, expected in (
        (AUTHENTICATION, proven),
        (Authentication({"token": Names().prove}, "guest"), as_guest),
    ):
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


def test_a_response_proves_the_same_role_anew_or_is_refused() -> None:
    """By the same method where it names none; a connection keeps its role."""
    assert responded(AuthData("token", b"me@20")) == ("me", "token", 20)
    assert responded(AuthData(None, b"me@20")) == ("me", "token", 20)
    for data in (None, AuthData(), AuthData("token", b"you@20"), AuthData("basic", b"me")):
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


def line(user: str, password: str, prefix: bytes = b"2b") -> bytes:
    """A line in the form of htpasswd."""
    stored = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4))
    return user.encode() + b":" + stored.replace(b"$2b$", b"$" + prefix + b"$") + b"\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two users."""
    path = tmp_path / "htpasswd"
    path.write_bytes(b"# users\n\n" + line("me", "secret", b"2y") + line("you", "other:one"))
    return path


def refused(method: PasswordMethod, data: bytes) -> str:
    """The text that the client is sent."""
    with pytest.raises(InvalidCredentials) as caught:
        method.prove(data)
    return str(caught.value)


def test_a_right_password_proves_the_user_and_a_refusal_does_not_tell_whether_there_is_one(path: Path) -> None:
    """It may have a colon in it; an unknown user's password is hashed, too, so that the time does not tell either."""
    method = PasswordMethod(path)
    assert method.prove(b"me:secret") == ("me", "basic", None)
    assert method.prove(b"you:other:one").role == "you"
    assert refused(method, b"me:wrong") == refused(method, b"nobody:wrong")
    assert "secret" not in refused(method, b"me:wrong")


@pytest.mark.parametrize("data", [b"", b"me", b":", b":secret", b"\xff:x", b"me:" + b"x" * 73, b"me:a\0b"])
def test_what_is_no_user_and_password_is_refused(path: Path, data: bytes) -> None:
    """Bcrypt takes 72 bytes."""
    assert "72" in refused(PasswordMethod(path), data)


def test_a_right_password_is_hashed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one each time."""
    method, calls = PasswordMethod(path), []
    check = bcrypt.checkpw

    def counted(*given: Any) -> bool:
        calls.append(given[0])
        return check(*given)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    for _ in range(3):
        method.prove(b"me:secret")
        refused(method, b"me:wrong")
    assert calls == [b"secret", b"wrong", b"wrong", b"wrong"]


def test_a_change_of_the_file_counts_at_once(path: Path) -> None:
    """A password that was right before, and remembered, is wrong then."""
    method = PasswordMethod(path)
    method.prove(b"me:secret")
    path.write_bytes(line("me", "new one") + line("third", "x"))
    refused(method, b"me:secret")
    assert method.prove(b"me:new one").role == "me"
    assert method.prove(b"third:x").role == "third"
    refused(method, b"you:other:one")


@pytest.mark.parametrize("content", [b"me:{SHA}abc\n", b"me:$2b$04$short\n", None])
def test_a_file_that_cannot_be_used_is_told_at_the_start_and_later_leaves_what_was(
    path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once."""
    method = PasswordMethod(path)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(UnusableSecurity) as caught:
        PasswordMethod(path)
    assert str(path) in str(caught.value)
    with caplog.at_level(logging.ERROR, "duelog.broker"):
        for _ in range(3):
            assert method.prove(b"me:secret").role == "me"
    assert len(caplog.records) == 1


SECRET = b"0123456789abcdef0123456789abcdef"
KEY = "data:;base64," + base64.b64encode(SECRET).decode()


def token(key: Any = SECRET, algorithm: str = "HS256", **claims: Any) -> bytes:
    """A token with these claims."""
    return jwt.encode(claims, key, algorithm).encode()


def pem(key: Any) -> bytes:
    """Its public key."""
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def test_a_token_proves_the_role_of_its_subject_or_of_the_claim_that_is_set() -> None:
    """Until it expires; the first role of several. Other claims are not looked at, nor whose clock was ahead."""
    method = TokenMethod(BrokerConfig(token_secret_key=KEY))
    assert method.prove(token(sub="me")) == ("me", "token", None)
    soon = int(time.time()) + 60
    assert method.prove(token(sub="me", exp=soon)).expires_ms == soon * 1_000
    method = TokenMethod(BrokerConfig(token_secret_key=KEY, token_auth_claim="roles"))
    assert method.prove(token(roles="me", sub="you")).role == "me"
    assert method.prove(token(roles=["me", "you"])).role == "me"
    later = int(time.time()) + 60
    assert method.prove(token(roles="me", iat=later)).role == "me"
    number = {"sub": 7, "roles": "me"}
    assert method.prove(jwt.PyJWS().encode(json.dumps(number).encode(), SECRET, "HS256").encode()).role == "me"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        token(sub="me", exp=1),
        token(sub="me", nbf=4_000_000_000),
        token(b"another key of thirty-two bytes!", sub="me"),
        token(SECRET * 2, "HS512", sub="me"),
        jwt.encode({"sub": "me"}, "", "none").encode(),
        token(),
        token(sub=""),
        token(role="me"),
    ],
)
def test_a_token_that_is_not_right_proves_nothing(data: bytes) -> None:
    """Expired, not yet valid, of another key, of an algorithm that is not configured, unsigned, without a role."""
    with pytest.raises(InvalidCredentials):
        TokenMethod(BrokerConfig(token_secret_key=KEY)).prove(data)


def test_an_audience_that_is_set_has_to_be_there() -> None:
    """The audience is the claim's value or one of its values; without a configured one it is not checked."""
    method = TokenMethod(BrokerConfig(token_secret_key=KEY, token_audience="here"))
    assert method.prove(token(sub="me", aud="here")).role == "me"
    assert method.prove(token(sub="me", aud=["there", "here"])).role == "me"
    for claims in ({}, {"aud": "there"}, {"aud": ["there"]}):
        with pytest.raises(InvalidCredentials):
            method.prove(token(sub="me", **claims))
    assert TokenMethod(BrokerConfig(token_secret_key=KEY)).prove(token(sub="me", aud="there")).role == "me"
    other = TokenMethod(BrokerConfig(token_secret_key=KEY, token_audience="here", token_audience_claim="for"))
    assert other.prove(token(sub="me", **{"for": "here"})).role == "me"


@pytest.mark.parametrize("form", [Encoding.PEM, Encoding.DER])
def test_a_public_key_takes_its_tokens_and_no_others(tmp_path: Path, form: Encoding) -> None:
    """A token signed with the public key as if it were a secret is none."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path = tmp_path / "key"
    public = key.public_key().public_bytes(form, PublicFormat.SubjectPublicKeyInfo)
    path.write_bytes(public)
    method = TokenMethod(BrokerConfig(token_public_key=f"file://{path}"))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    assert method.prove(token(private, "RS256", sub="me")).role == "me"
    header, claims = (base64.urlsafe_b64encode(part).rstrip(b"=") for part in (b'{"alg":"HS256"}', b'{"sub":"me"}'))
    signature = base64.urlsafe_b64encode(hmac.digest(public, header + b"." + claims, hashlib.sha256))
    with pytest.raises(InvalidCredentials):
        method.prove(header + b"." + claims + b"." + signature.rstrip(b"="))


def test_elliptic_curves_are_asked_for_by_name(tmp_path: Path) -> None:
    """The algorithm is the configuration's."""
    key = ec.generate_private_key(ec.SECP256R1())
    path = tmp_path / "key.pem"
    path.write_bytes(pem(key))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    method = TokenMethod(BrokerConfig(token_public_key=str(path), token_algorithms=("ES256",)))
    assert method.prove(token(private, "ES256", sub="me")).role == "me"
    with pytest.raises(UnusableSecurity):
        TokenMethod(BrokerConfig(token_public_key=str(path)))


@pytest.mark.parametrize(
    "settings",
    [
        BrokerConfig(),
        BrokerConfig(token_secret_key=KEY, token_public_key="/x"),
        BrokerConfig(token_secret_key="/not/there"),
        BrokerConfig(token_secret_key="data:;base64,???"),
        BrokerConfig(token_secret_key="data:;base64,c2hvcnQ="),
        BrokerConfig(token_secret_key=KEY, token_algorithms=("HS256", "HS512")),
        BrokerConfig(token_secret_key=KEY, token_algorithms=("none",)),
        BrokerConfig(token_secret_key=KEY, token_algorithms=("RS256",)),
        BrokerConfig(token_public_key=KEY),
        BrokerConfig(token_public_key=KEY, token_algorithms=("HS256",)),
    ],
)
def test_a_key_that_cannot_be_used_is_told_at_the_start(settings: BrokerConfig) -> None:
    """No key, two, one that is not there, short, or not for its algorithm; the text holds no key."""
    with pytest.raises(UnusableSecurity) as caught:
        TokenMethod(settings)
    assert KEY not in str(caught.value)


def shown(context: ssl.SSLContext, highest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED) -> bytes:
    """The certificate that a client is shown, after a handshake in memory."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    client_context.maximum_version = highest
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert(binary_form=True) or b""


def of(path: Path) -> bytes:
    """A certificate as a client sees it."""
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_a_client_is_shown_the_certificate_and_the_next_one_the_changed_one(tmp_path: Path) -> None:
    """By TLS 1.2 and 1.3, nothing older; the listener's context stays the same object."""
    pair = write_pair(tmp_path)
    certificate = Certificate(*pair)
    context = certificate.context
    assert shown(context) == shown(context, ssl.TLSVersion.TLSv1_2) == of(pair[0])
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert not certificate.refresh()
    pair = write_pair(tmp_path)
    assert certificate.refresh()
    assert shown(context) == of(pair[0])


@pytest.mark.parametrize("damage", ["gone", "garbage", "another key"])
def test_a_certificate_that_is_damaged_later_leaves_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once; a good one that follows is taken."""
    pair = write_pair(tmp_path)
    certificate, before = Certificate(*pair), of(pair[0])
    if damage == "gone":
        pair[1].unlink()
    elif damage == "garbage":
        pair[0].write_bytes(b"nonsense")
    else:
        key = pair[1].read_bytes()
        write_pair(tmp_path)
        pair[1].write_bytes(key)
    with caplog.at_level(logging.ERROR, "duelog.broker"):
        assert not certificate.refresh()
        assert not certificate.refresh()
    assert len(caplog.records) == 1
    assert shown(certificate.context) == before
    write_pair(tmp_path)
    assert certificate.refresh()
    assert shown(certificate.context) == of(pair[0])


@pytest.mark.parametrize("damage", ["no certificate", "no key", "garbage", "encrypted"])
def test_a_certificate_that_cannot_be_read_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    """It names the file; no password is asked for on the terminal."""
    certificate, key = write_pair(tmp_path, password=b"secret" if damage == "encrypted" else None)
    if damage == "no certificate":
        certificate = tmp_path / "not-there.pem"
    elif damage == "no key":
        key = tmp_path / "not-there.pem"
    elif damage == "garbage":
        key.write_bytes(b"nonsense")
    with pytest.raises(UnusableSecurity) as caught:
        Certificate(certificate, key)
    assert "\n" not in str(caught.value)
    assert ("not-there.pem cannot be read" in str(caught.value)) == damage.startswith("no ")
