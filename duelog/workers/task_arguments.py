"""Tasks with arguments: a function called later, with arguments that are checked when they are sent.

The arguments are a JSON object in the message's payload. msgspec writes and reads it by the function's annotations: it
checks what it reads, knows dataclasses, enumerations, dates and unions, and needs no other package.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, get_type_hints

from duelog.store.errors import InvalidArgument
from duelog.store.message import Message, ReceivedMessage
from duelog.store.position import MessageId

from ..delayed_store import DelayedStore
from ..topic import Topic
from ..upkeep.schedule import Schedule
from .task_message import FollowUp, TaskMessage

if TYPE_CHECKING:
    import msgspec

P = ParamSpec("P")
R = TypeVar("R")

_OPTIONS = inspect.signature(Topic.send).parameters.keys() - {"self", "payload"}
_OF_SCHEDULE = inspect.signature(Topic.every).parameters.keys() - {"self", "name", "payload"}


def takes_a_message(function: Callable[..., object]) -> bool:
    """Return True if a function is to get the message itself: its one parameter is annotated so, or not at all."""
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 1:
        return False
    (only,) = parameters
    if only.annotation is inspect.Parameter.empty:
        return True
    return _hints(function).get(only.name) in (ReceivedMessage, TaskMessage, Any)


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    return get_type_hints(inspect.unwrap(function))


class Codec(Protocol):
    """Writes and reads arguments: a module of msgspec (`msgspec.msgpack`), or anything with its two functions.

    `decode` raises msgspec.ValidationError or msgspec.DecodeError for what is not of the type.
    """

    def encode(self, obj: Any, /) -> bytes: ...
    def decode(self, buf: bytes, /, *, type: Any) -> Any: ...


class TaskFunction(Generic[P, R]):
    """A function that a worker runs for messages that have its arguments. Made by `Worker.task`.

    Called, it runs here and now. `send` has a worker run it.
    """

    def __init__(
        self, function: Callable[P, R], topic: str, store: Callable[[], DelayedStore], codec: Codec | None = None
    ) -> None:
        """topic: of the messages, in a store that can be sent to. Raises InvalidArgument for a parameter `send` has.

        codec: None: JSON.
        """
        self.function = function
        self.topic = topic
        self._store = store
        self._given_codec = codec
        self._signature = inspect.signature(function)
        taken = self._signature.parameters.keys() & (_OPTIONS | _OF_SCHEDULE | {"name"})
        if taken:
            raise InvalidArgument("function", function, f"send() or every() has arguments {', '.join(sorted(taken))}")
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @functools.cached_property
    def _arguments(self) -> type[msgspec.Struct]:
        import msgspec  # noqa: PLC0415 - tasks of messages do without

        hints = _hints(self.function)
        return msgspec.defstruct(
            self.function.__name__,
            [
                (each.name, hints.get(each.name, Any))
                if each.default is inspect.Parameter.empty
                else (each.name, hints.get(each.name, Any), each.default)
                for each in self._signature.parameters.values()
            ],
            kw_only=True,
            forbid_unknown_fields=True,
        )

    @functools.cached_property
    def _texts(self) -> frozenset[str]:
        return frozenset(name for name, hint in _hints(self.function).items() if hint in (str, str | None))

    @functools.cached_property
    def _codec(self) -> Codec:
        import msgspec  # noqa: PLC0415 - as above

        return self._given_codec or msgspec.json

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        """Write arguments. Raises TypeError as a call does, InvalidArgument for one that does not fit."""
        import msgspec  # noqa: PLC0415 - as above

        given = self._signature.bind(*args, **kwargs).arguments
        for name in self._texts & given.keys():
            value = given[name]
            if isinstance(value, (bytes, bytearray, memoryview)):  # JSON has them in base64, which is text
                raise InvalidArgument(name, value, f"Expected `str`, got `{type(value).__name__}`")
        try:
            payload = self._codec.encode(given)
            self._codec.decode(payload, type=self._arguments)
        except (msgspec.ValidationError, TypeError, UnicodeEncodeError) as error:
            text, _, place = str(error).partition(" - at `$.")
            name = place.rstrip("`").partition(".")[0].partition("[")[0]
            raise InvalidArgument(name or "arguments", given.get(name, given), text) from None
        return payload

    def decode(self, payload: bytes) -> dict[str, Any]:
        """Read arguments. Raises InvalidArgument for a payload that has others."""
        import msgspec  # noqa: PLC0415 - as above

        try:
            found = self._codec.decode(payload, type=self._arguments)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise InvalidArgument("payload", payload, f"arguments of {self.function.__qualname__}: {error}") from None
        return {name: getattr(found, name) for name in self._signature.parameters}

    def send(self, *args: Any, **kwargs: Any) -> MessageId:
        """Have a worker call the function with these arguments; the message's id.

        What `Topic.send` takes by name (`deliver_after`, `dedup_key` and so on) goes with them. Raises as that,
        TypeError for arguments that the function does not take, InvalidArgument for one that does not fit its
        annotation, ClosedError where the worker neither runs nor connects.
        """
        options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
        return self._store().topic(self.topic).send(self.encode(*args, **kwargs), **options)

    def cancel_key(self, key: str) -> bool:
        """Cancel the pending call that was sent with a `dedup_key`; False: none is pending. Raises as `send`."""
        return self._store().topic(self.topic).cancel_key(key)

    def message(self, *args: Any, **kwargs: Any) -> FollowUp:
        """The message that `send` would send, for another task to return: it is sent when that is acknowledged."""
        options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
        return FollowUp(self.topic, Message(self.encode(*args, **kwargs), **options))

    def every(self, name: str | None = None, **kwargs: Any) -> Schedule:
        """Have it called again and again: `Topic.every` by `cron` or `interval`, with arguments as of `send`.

        name: of the schedule; None: that of the function.
        """
        options = {option: kwargs.pop(option) for option in _OF_SCHEDULE & kwargs.keys()}
        schedule = self.function.__qualname__ if name is None else name
        return self._store().topic(self.topic).every(schedule, payload=self.encode(**kwargs), **options)

    def handler(self) -> Callable[[TaskMessage], Any]:
        """Return what the worker runs for a message."""
        if inspect.iscoroutinefunction(self.function):

            async def begin(message: TaskMessage) -> Any:
                return await self.function(**self.decode(message.payload))  # type: ignore[call-arg,misc]  # checked

            return functools.update_wrapper(begin, self.function)

        def run(message: TaskMessage) -> Any:
            return self.function(**self.decode(message.payload))  # type: ignore[call-arg]  # checked when it is read

        return functools.update_wrapper(run, self.function)
