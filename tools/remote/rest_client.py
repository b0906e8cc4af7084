"""Requests to a server's administration over HTTP: JSON in and out, errors as one line."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from ...store.errors import InvalidArgument
from .operations import ServerRefused

_TIMEOUT_S = 60
_MOST_REDIRECTS = 5


class _NoRedirects(HTTPRedirectHandler):
    """They are followed here: the library follows none that changes something."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RestClient:
    """One server, and the others that it sends requests on to."""

    def __init__(self, url: str, token: str | None = None, trust: Path | None = None) -> None:
        """trust: certificates in PEM; None: those of this machine. Raises InvalidArgument."""
        self.url = url.rstrip("/")
        self._headers = {"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        if any(not value.isprintable() for value in self._headers.values()):
            raise InvalidArgument("--token", None, "has characters that no token has")
        try:
            context = ssl.create_default_context(cafile=trust)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument("--tls-trust", str(trust), f"cannot be read: {error.strerror or error}") from error
        self._opener = build_opener(_NoRedirects, HTTPSHandler(context=context))

    def get(self, path: str, **query: object) -> Any:
        """None: 204."""
        return self.ask("GET", path, **query)

    def ask(self, method: str, path: str, body: object = ..., **query: object) -> Any:
        """The JSON of the answer; None: it has none. A query that is None is left out. Raises ServerRefused."""
        given = {name: value for name, value in query.items() if value is not None}
        url = f"{self.url}{path}{'?' if given else ''}{urlencode(given)}"
        data = None if body is ... else json.dumps(body).encode()
        headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
        for _ in range(_MOST_REDIRECTS):
            found = self._once(Request(url, data, headers, method=method))
            if isinstance(found, bytes):
                return json.loads(found) if found else None
            onward = urljoin(url, found["Location"])
            if urlsplit(onward).scheme not in ("https", urlsplit(url).scheme):
                raise ServerRefused(self.url, 307, f"sends on to {onward}, which is not encrypted")
            url = onward
        raise ServerRefused(self.url, 307, "is sent on from server to server")

    def _once(self, request: Request) -> bytes | Mapping[str, str]:
        """The body of an answer, or the headers of one that sends on."""
        server = f"{request.type}://{request.host}"
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            with error:
                if error.code == 307 and error.headers.get("Location"):
                    return dict(error.headers.items())
                raise ServerRefused(server, error.code, _reason(error)) from error
        except URLError as error:
            reason = error.reason
            text = getattr(reason, "strerror", None) or reason
            raise ServerRefused(server, 0, str(getattr(reason, "verify_message", "") or text)) from error
        except (OSError, HTTPException, ValueError) as error:
            raise ServerRefused(server, 0, str(error) or type(error).__name__) from error


def segment(text: str) -> str:
    """A part of a path."""
    return quote(text, safe="")


def _reason(error: HTTPError) -> str:
    try:
        return " ".join(str(json.loads(error.read())["reason"]).split())
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
