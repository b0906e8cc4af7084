"""Passwords: a file as `htpasswd -B` writes it, read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import threading
from pathlib import Path

import bcrypt

from .authentication import InvalidCredentials, Proven, UnusableSecurity

_REMEMBERED = 1_000
"""Right passwords that need no bcrypt the next time, kept as a keyed hash; a check takes some 50 ms of a processor."""

_BCRYPT = re.compile(rb"\$2[aby]\$[0-9]{2}\$[./A-Za-z0-9]{53}")

log = logging.getLogger("duelog.broker.passwords")


class PasswordMethod:
    """Checks `user:password`; the role is the user. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises UnusableSecurity."""
        self._path = path
        self._lock = threading.Lock()
        self._secret = os.urandom(32)
        self._right: dict[bytes, None] = {}
        self._stamp: tuple[int, int] | None = None
        self._logged = ""
        self._users: dict[str, bytes] = {}
        self._unknown = bcrypt.hashpw(os.urandom(16).hex().encode(), bcrypt.gensalt(10))
        self._reload()

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
            self._reload()
            stored = self._users.get(name)
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

    def _reload(self) -> None:
        """Read the file if it changed; one that cannot be used leaves what was known, but for the first time."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            users = _read_users(self._path)
        except (OSError, UnusableSecurity) as error:
            reason = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else error
            text = f"the password file cannot be used: {reason}"
            if self._stamp is None:
                raise UnusableSecurity(text) from error
            if text != self._logged:
                log.error("%s; passwords are as before", text)
                self._logged = text
            return
        self._users, self._stamp, self._logged = users, stamp, ""


def _read_users(path: Path) -> dict[str, bytes]:
    users = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        user, _, stored = line.strip().partition(b":")
        if not user or user.startswith(b"#"):
            continue
        if _BCRYPT.fullmatch(stored) is None:
            raise UnusableSecurity(f"{path}, line {number}: no bcrypt hash; write it with htpasswd -B")
        users[user.decode(errors="replace")] = stored
    return users
