"""Passwords."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from duelog.broker.security.authentication import InvalidCredentials, PasswordMethod, UnusableSecurity


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


def test_a_right_password_proves_the_user(path: Path) -> None:
    """It may have a colon in it."""
    method = PasswordMethod(path)
    assert method.prove(b"me:secret") == ("me", "basic", None)
    assert method.prove(b"you:other:one").role == "you"


def test_a_refusal_does_not_tell_whether_there_is_such_a_user(path: Path) -> None:
    """Nor does the time it takes: an unknown user's password is hashed, too."""
    method = PasswordMethod(path)
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
