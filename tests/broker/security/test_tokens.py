"""Tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from duelog.broker.configuration import BrokerConfig
from duelog.broker.security.authentication import InvalidCredentials, TokenMethod, UnusableSecurity

SECRET = b"0123456789abcdef0123456789abcdef"
KEY = "data:;base64," + base64.b64encode(SECRET).decode()


def token(key: Any = SECRET, algorithm: str = "HS256", **claims: Any) -> bytes:
    """A token with these claims."""
    return jwt.encode(claims, key, algorithm).encode()


def pem(key: Any) -> bytes:
    """Its public key."""
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def test_a_token_proves_the_role_of_its_subject() -> None:
    """Until it expires."""
    method = TokenMethod(BrokerConfig(token_secret_key=KEY))
    assert method.prove(token(sub="me")) == ("me", "token", None)
    soon = int(time.time()) + 60
    assert method.prove(token(sub="me", exp=soon)).expires_ms == soon * 1_000


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


def test_the_role_may_stand_in_another_claim() -> None:
    """The first of several; other claims are not looked at, nor whose clock was ahead."""
    method = TokenMethod(BrokerConfig(token_secret_key=KEY, token_auth_claim="roles"))
    assert method.prove(token(roles="me", sub="you")).role == "me"
    assert method.prove(token(roles=["me", "you"])).role == "me"
    later = int(time.time()) + 60
    assert method.prove(token(roles="me", iat=later)).role == "me"
    number = {"sub": 7, "roles": "me"}
    assert method.prove(jwt.PyJWS().encode(json.dumps(number).encode(), SECRET, "HS256").encode()).role == "me"


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
        BrokerConfig(
            token_secret_key=KEY,
            token_algorithms=(
                "HS256",
                "HS512",
            ),
        ),
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
