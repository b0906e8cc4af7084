"""A request as the handlers see it: names, queries and bodies checked; and what a handler may answer.

A handler returns a JSON value (200), None (204), a `Reply` or a `Stream`; it raises `HttpError`, `Refused` or the
store's errors.
"""

import json
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...store.errors import InvalidArgument
from ...store.names import validate_namespace_name
from ..lookup.resources import Resources
from ..lookup.topic_address import TopicAddress, stored_subscription

T = TypeVar("T")


class HttpError(Exception):
    """A request that is answered with an error: its status, and a reason for people."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is no JSON, or has another status than 200."""

    body: bytes = b""
    content_type: str = "application/octet-stream"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    until_left: AsyncExitStack | None = None
    """Closed once the body has left the process, or the connection is gone."""
    within_s: float | None = None
    """With `until_left`: what the client has to take all of the body in; None: each piece of it in two minutes."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer of server-sent events that ends when its pieces do, or the client leaves."""

    pieces: AsyncGenerator[bytes, None]
    until_ms: int | None = None
    """When the credentials of who asked expire, in ms since 1970: no piece is sent after it. None: never."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Each property and method that reads a value raises HttpError 412 naming it if it is none."""

    path: Mapping[str, str]
    """By name of the route's parameter, decoded."""
    query: Mapping[str, str]
    """The first value of each."""
    body: bytes = b""
    role: str | None = None
    """None: the broker asks for no credentials."""
    authorization: str = ""
    """The header, for questions that are passed on to another broker."""

    @property
    def namespace(self) -> str:
        """`tenant/namespace` of the path."""
        try:
            return validate_namespace_name(f"{self.path['tenant']}/{self.path['namespace']}")
        except InvalidArgument as error:
            raise HttpError(412, str(error)) from error

    @property
    def topic(self) -> TopicAddress:
        """The topic of the path. Raises Refused for a name that is none."""
        return TopicAddress.parse(f"persistent://{self.namespace}/{self.path['topic']}")

    @property
    def subscription(self) -> str:
        """The subscription of the path, by its name in the store. Raises Refused."""
        return stored_subscription(self.path["subscription"])

    def flag(self, name: str, default: bool = False) -> bool:
        text = self.query.get(name, "")
        if not text:
            return default
        if text.lower() not in ("true", "false"):
            raise HttpError(412, f"{name}={text!r}: expected true or false")
        return text.lower() == "true"

    def number(self, name: str, default: int, *, lowest: int = 0, highest: int = 2**63 - 1) -> int:
        """A query or a part of the path that is an integer."""
        text = self.path.get(name) or self.query.get(name) or ""
        return integer(name, text, lowest, highest) if text else default

    def json(self) -> Any:
        """The body; None: it has none. HttpError 400 if it is not JSON."""
        if not self.body.strip():
            return None
        try:
            return json.loads(self.body, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from error

    def object(self, *, optional: bool = False) -> dict[str, Any]:
        """The body as a JSON object; optional: none is an empty one."""
        found = self.json()
        if found is None and optional:
            return {}
        if not isinstance(found, dict):
            raise HttpError(412, "the body: expected a JSON object")
        return found


def existing_namespace(resources: Resources, request: Request) -> str:
    """The namespace of a path. HttpError 404 if there is none."""
    namespace = request.namespace
    if resources.namespaces.get(namespace) is None:
        cure = f"PUT /admin/v2/namespaces/{namespace} makes it, with the topics that the store has of it"
        raise HttpError(404, f"namespace {namespace} does not exist; {cure}")
    return namespace


def value_of(found: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field of a JSON object; absent or null: the default. Raises HttpError 412."""
    value = found.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        shown = {bool: "true or false", str: "a text", int: "an integer", list: "a list", dict: "an object"}
        raise HttpError(412, f"{name}={json.dumps(value)[:200]}: expected {shown.get(kind, kind.__name__)}")
    return value


def texts_of(found: Mapping[str, Any], name: str) -> list[str]:
    """A field that is a list of texts; absent or null: an empty one. Raises HttpError 412."""
    values = value_of(found, name, list, [])
    if not all(isinstance(each, str) for each in values):
        raise HttpError(412, f"{name}={json.dumps(values)[:200]}: expected a list of texts")
    return values


def one_of(name: str, value: object, allowed: Collection[str]) -> str:
    """A text that is one of those allowed. Raises HttpError 412."""
    if not isinstance(value, str) or value not in allowed:
        raise HttpError(412, f"{name}={value!r}: expected one of {', '.join(allowed)}")
    return value


def checked_integer(name: str, value: object, lowest: int, highest: int) -> int:
    """A JSON value that is an integer within bounds. Raises HttpError 412."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise HttpError(412, f"{name}={value!r:.200}: expected an integer")
    if not lowest <= value <= highest:
        raise HttpError(412, f"{name}={value}: expected {lowest} to {highest}")
    return value


def integer(name: str, text: str, lowest: int, highest: int) -> int:
    """A text that is an integer within bounds. Raises HttpError 412."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise HttpError(412, f"{name}={text!r:.200}: expected an integer")
    return checked_integer(name, int(text), lowest, highest)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")
