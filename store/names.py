"""Names: topics in Pulsar's form, their namespaces, subscriptions.

Owns what a name may be and its one full form; the store keeps and compares full forms, code point by code point
(no Unicode normalization). It does not know which names exist.

Source of the rules: Apache Pulsar's topic names, ``persistent://tenant/namespace/topic``, with the short forms
``topic`` and ``tenant/namespace/topic``. Pulsar's older form with a cluster in it and topics that are not persistent
have no place here.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from .errors import InvalidArgument

SCHEME = "persistent://"
DEFAULT_TENANT = "public"
DEFAULT_NAMESPACE = "default"

MAX_TOPIC_BYTES = 400
"""Longest full topic name in UTF-8: it is part of LMDB keys, which end at 511 bytes."""

MAX_SUBSCRIPTION_BYTES = 200
"""Longest subscription name in UTF-8."""

_KNOWN = 4_096
"""Names that are kept once they were read."""

_ENTITY = re.compile(r"[-=:.\w]+", re.ASCII)
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # control characters, lone surrogates


class TopicName(NamedTuple):
    """A topic's name in its three parts.

    >>> str(TopicName.parse("reminders"))
    'persistent://public/default/reminders'
    >>> TopicName.parse("shop/mail/reminders").namespace_name
    'shop/mail'
    """

    tenant: str
    namespace: str
    local_name: str

    @staticmethod
    def parse(text: str) -> "TopicName":
        """Read a full or short topic name; raises InvalidArgument with field ``topic``.

        ``parse(str(name)) == name`` for every name that this returns.
        """
        if not isinstance(text, str):
            raise InvalidArgument("topic", text, "expected a str")
        return _parsed(text)

    @property
    def namespace_name(self) -> str:
        """``tenant/namespace``."""
        return f"{self.tenant}/{self.namespace}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.tenant}/{self.namespace}/{self.local_name}"


@lru_cache(_KNOWN)
def _parsed(text: str) -> TopicName:
    scheme, mark, rest = text.partition("://")
    if mark and scheme != "persistent":
        raise InvalidArgument("topic", text, f"only {SCHEME} topics exist here")
    parts = rest.split("/") if mark else text.split("/")
    if len(parts) == 1 and not mark:
        parts = [DEFAULT_TENANT, DEFAULT_NAMESPACE, *parts]
    if len(parts) != 3:
        raise InvalidArgument("topic", text, f"expected {SCHEME}tenant/namespace/name, tenant/namespace/name or name")
    name = TopicName(*parts)
    _check_entity("topic", text, "tenant", name.tenant)
    _check_entity("topic", text, "namespace", name.namespace)
    if not name.local_name:
        raise InvalidArgument("topic", text, "the topic's own name is empty")
    _check_characters("topic", text)
    size = len(str(name).encode())
    if size > MAX_TOPIC_BYTES:
        raise InvalidArgument("topic", text, f"{size} bytes in full form, over {MAX_TOPIC_BYTES}")
    return name


def validate_namespace_name(text: str) -> str:
    """Return ``text`` if it is ``tenant/namespace``; raises InvalidArgument with field ``namespace``."""
    if not isinstance(text, str):
        raise InvalidArgument("namespace", text, "expected a str")
    parts = text.split("/")
    if len(parts) != 2:
        raise InvalidArgument("namespace", text, "expected tenant/namespace")
    _check_entity("namespace", text, "tenant", parts[0])
    _check_entity("namespace", text, "namespace", parts[1])
    size = len(text)
    if size > MAX_TOPIC_BYTES - len(SCHEME) - 2:
        raise InvalidArgument("namespace", text, f"{size} bytes leave no space for a topic's name of {MAX_TOPIC_BYTES}")
    return text


def validate_subscription_name(text: str, field: str = "subscription") -> str:
    """Return ``text`` if it may name a subscription: 1 to 200 bytes of UTF-8, no control character, no ``/``.

    Raises InvalidArgument with `field` for its field.
    """
    if not isinstance(text, str):
        raise InvalidArgument(field, text, "expected a str")
    if not text:
        raise InvalidArgument(field, text, "the name is empty")
    if "/" in text:
        raise InvalidArgument(field, text, "'/' is not allowed")
    _check_characters(field, text)
    size = len(text.encode())
    if size > MAX_SUBSCRIPTION_BYTES:
        raise InvalidArgument(field, text, f"{size} bytes, over {MAX_SUBSCRIPTION_BYTES}")
    return text


def _check_entity(field: str, text: str, what: str, part: str) -> None:
    if not part:
        raise InvalidArgument(field, text, f"the {what} is empty")
    if _ENTITY.fullmatch(part) is None:
        raise InvalidArgument(field, text, f"the {what} may hold ASCII letters, digits and - = : . _ only")


def _check_characters(field: str, text: str) -> None:
    match = _FORBIDDEN.search(text)
    if match is not None:
        raise InvalidArgument(field, text, f"character U+{ord(match[0]):04X} at {match.start()} is not allowed")
