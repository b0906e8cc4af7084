"""A store in a directory, asked by the names and payloads that clients of its broker know."""

from collections.abc import Mapping
from typing import Any

from ...operations.operation import Right
from ...operations.operations import OPERATIONS, Asked
from ...store.errors import InvalidArgument, UnknownSubscription
from ...store.names import TopicName

_OF_BROKER = b"\xd1"
"""First byte of an entry of the broker, which is imported for these alone: it takes longer than all the rest."""


class Directory(Asked):
    """A store in a directory, which knows subscriptions by other names than clients do where those have `/` or `%`."""

    def ask(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if OPERATIONS[name].right is Right.CONSUME and "subscription" in arguments:
            arguments = {**arguments, "subscription": self._stored(name, **arguments)}
        answer = super().ask(name, arguments)
        if name == "scheduled":
            return map(_as_sent, answer)
        if name == "subscriptions":
            return sorted(map(_shown, answer))
        if name == "topic_figures":
            subscriptions = [{**each, "name": _shown(each["name"])} for each in answer["subscriptions"]]
            return {**answer, "subscriptions": subscriptions}
        return answer

    def _stored(self, name: str, *, topic: str, subscription: str, **_: object) -> str:
        """Find a subscription's name. Raises UnknownSubscription with the name as it was given."""
        from ...broker.lookup.topic_address import stored_subscription

        try:
            stored = stored_subscription(subscription)
        except Exception as error:
            raise InvalidArgument("SUBSCRIPTION", subscription, str(error)) from error
        if name != "create_subscription" and stored not in super().ask("subscriptions", {"topic": topic}):
            raise UnknownSubscription(str(TopicName.parse(topic)), subscription)
        return stored


def _shown(subscription: str) -> str:
    from ...broker.lookup.topic_address import shown_subscription

    return shown_subscription(subscription)


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as its client sent it, of an entry of the broker; a batch, and what cannot be read, as it is stored."""
    from ...operations.json_form import from_json, to_json

    payload = from_json(bytes, message["payload"], "payload")
    if payload[:1] != _OF_BROKER:
        return message
    try:
        from ...broker.operate.client_message import CodecMissing, NotCarried, client_messages
    except ModuleNotFoundError:  # duelog[broker] is not installed
        return message
    try:
        found = client_messages(payload, message["key"], message["properties"])
    except (NotCarried, CodecMissing):
        return message
    if len(found) != 1:
        return message
    (only,) = found
    return {**message, "payload": to_json(only.content or b""), "key": only.key, "properties": only.properties}
