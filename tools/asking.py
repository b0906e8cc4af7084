"""Asking a store in a directory: this process opens it, or asks the one that has it open; the answers are the same.

`Directory` is asked by the names and payloads that clients of its broker know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..operations.operation import Ask, Right
from ..operations.operations import OPERATIONS, Asked, Operations
from ..operations.wire import Disconnected, Refused
from ..operations.wire_client import Connection, is_closing
from ..store.errors import AlreadyOpen, InvalidArgument, StoreLocked, UnknownSubscription
from ..store.names import TopicName
from .values import alone, open_to_read, open_to_write, require_store

if TYPE_CHECKING:
    from .. import DelayedStore

T = TypeVar("T")

_PATIENCE_S = 2.0
"""How long a command tries to reach a store that is being opened or closed, or is busy with other commands."""

_PAUSE_S = 0.02


@contextmanager
def asked(path: Path, *, writes: bool, create: bool = False) -> Iterator[Asked]:
    """Ask for operations of the store in a directory while the block runs.

    They are those of the process that has it open, where there is one that listens; else of this one, which opens it.
    create: make the store where there is none. Raises StoreLocked where another process has it open and does not
    listen, and what `Connection.connect` raises, once it has tried for some time: commands that run at once wait for
    each other.
    """
    if not create:
        require_store(path)
    with ExitStack() as stack:
        yield Asked(_Asking(path, writes, create, stack).ask)


def attached(path: Path, stack: ExitStack, attach: Callable[[DelayedStore], T]) -> T:
    """Attach something to the store in a directory, which the process that has it open serves, or this one.

    What is opened for it is left with `stack`. Raises as `asked`.
    """
    require_store(path)

    def attempt() -> T:
        with ExitStack() as opened:
            client = Connection.to(path)
            if client is None:
                store = _open_here(path, writes=True, create=False)
            else:
                from ..connected.connected_store import ConnectedStore

                client.introduce("duelog")
                store = ConnectedStore(client)
            found = attach(opened.enter_context(store))
            stack.push(opened.pop_all())
            return found

    return _Patience().reach(attempt)


def _open_here(path: Path, *, writes: bool, create: bool) -> DelayedStore:
    with alone("it takes no commands (StoreConfig(control=False), or a clock of its own): end it first"):
        return open_to_write(path, create=create) if writes else open_to_read(path)


class _Patience:
    """Tries for some time to reach a store."""

    def __init__(self) -> None:
        self._deadline: float | None = None
        """Set when the store is first found taken: this process has imported the engine by then."""

    def is_over(self) -> bool:
        now = time.monotonic()
        self._deadline = self._deadline or now + _PATIENCE_S
        return now > self._deadline

    def reach(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                return attempt()
            except AlreadyOpen:
                raise
            except (StoreLocked, Refused, Disconnected):
                if self.is_over():
                    raise
            time.sleep(_PAUSE_S)


class _Asking:
    """Asks a store, and asks again where the process that has it open closes it before anything was done."""

    def __init__(self, path: Path, writes: bool, create: bool, stack: ExitStack) -> None:
        self._path = path
        self._writes = writes
        self._create = create
        self._stack = stack
        self._patience = _Patience()
        self._answered = False
        self._reached = self._patience.reach(self._ask_of_one)

    def ask(self, name: str, arguments: Mapping[str, object]) -> Any:
        while True:
            try:
                found = self._reached(name, arguments)
                self._answered = True
                return found
            except Refused as error:
                if self._answered or not is_closing(error) or self._patience.is_over():
                    raise
            self._reached = self._patience.reach(self._ask_of_one)

    def _ask_of_one(self) -> Ask:
        client = Connection.to(self._path)
        if client is not None:
            return self._stack.enter_context(client).ask
        store = _open_here(self._path, writes=self._writes, create=self._create)
        return Operations(self._stack.enter_context(store)).ask


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
        return with_shown_names(answer) if name == "topic_figures" else answer

    def _stored(self, name: str, *, topic: str, subscription: str, **_: object) -> str:
        """Find a subscription's name. Raises UnknownSubscription with the name as it was given."""
        from ..broker.lookup.topic_address import stored_subscription

        try:
            stored = stored_subscription(subscription)
        except Exception as error:
            raise InvalidArgument("SUBSCRIPTION", subscription, str(error)) from error
        if name != "create_subscription" and stored not in super().ask("subscriptions", {"topic": topic}):
            raise UnknownSubscription(str(TopicName.parse(topic)), subscription)
        return stored


def with_shown_names(topic: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a topic with the names of its subscriptions as clients know them."""
    return {**topic, "subscriptions": [{**each, "name": _shown(each["name"])} for each in topic["subscriptions"]]}


def _shown(subscription: str) -> str:
    from ..broker.lookup.topic_address import shown_subscription

    return shown_subscription(subscription)


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as its client sent it, of an entry of the broker; a batch, and what cannot be read, as it is stored."""
    from ..operations.json_form import from_json, to_json

    payload = from_json(bytes, message["payload"], "payload")
    if payload[:1] != _OF_BROKER:
        return message
    try:
        from ..broker.operate.client_message import CodecMissing, NotCarried, client_messages
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
