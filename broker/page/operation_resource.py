"""Every operation of the table over HTTP, by its name, with arguments and result in JSON; and which a role may ask.

    POST /duelog/v1/operations/{operation}    {"topic": "reminders", ...}

A result that is a sequence comes as {"items": [...], "more": true}: at most 1,000 of them, and 4 MiB. Operations that
belong to an attached consumer are left out: nothing is open between two requests.

Answers to questions that are asked again and again are server-sent events when they change. All pages together take a
hundredth of a core: after a look that took `t` seconds of a processor the next one waits 100 t for each page that is
open, at least a second and at most ten; ten times as long as the look lasted, too. While nothing changes a comment is
sent now and then, so that a connection that has gone is noticed.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from ...delayed_store import DelayedStore
from ...operations.operation import Ask, Operation
from ...operations.operations import OPERATIONS, Operations
from ...store.errors import ClosedError, DuelogError, InvalidArgument
from ...store.names import TopicName, validate_namespace_name
from ..admin.application import OwnerOf
from ..admin.http_request import HttpError, Reply, Request, Stream
from ..admin.routing import Need, Route, need_of
from ..operate.client_message import shown_entry
from ..security.permissions import Action, Permissions

MOST_PAGES = 64
Look: TypeAlias = Callable[[], Awaitable[tuple[bytes, float]]]
"""Gives an answer as JSON, and the seconds of a processor that it took."""

_LEAST_S, _MOST_S = 1.0, 10.0
_SHARE = 0.01
_SILENCE_S = 15.0


class Watching:
    """The pages that are open. For the event loop's thread alone."""

    def __init__(self) -> None:
        self.pages = 0
        self._ended = asyncio.Event()

    def close(self) -> None:
        """End all of them: their clients ask again."""
        self._ended.set()

    async def events(self, looks: Sequence[Look]) -> AsyncGenerator[bytes, None]:
        """Yield an event for each answer, then for each that has changed, until `close`. Raises HttpError 429."""
        if self.pages >= MOST_PAGES:
            raise HttpError(429, f"{self.pages} pages are open: close one")
        self.pages += 1
        told = [b""] * len(looks)
        spoke_s = time.monotonic()
        try:
            yield b"retry: 2000\n\n"
            while not self._ended.is_set():
                began_s, spent_s = time.monotonic(), 0.0
                for at, look in enumerate(looks):
                    try:
                        result, took_s = await look()
                        answer, spent_s = b'"result": ' + result, spent_s + took_s
                    except (ClosedError, RuntimeError):
                        return
                    except (DuelogError, HttpError) as error:
                        answer = b'"reason": ' + json.dumps(str(error)).encode()
                    if answer != told[at]:
                        told[at], spoke_s = answer, time.monotonic()
                        yield b'data: {"at": %d, %b}\n\n' % (at, answer)
                now_s = time.monotonic()
                if now_s - spoke_s > _SILENCE_S:
                    spoke_s = now_s
                    yield b":\n\n"
                pause_s = max(spent_s * self.pages / _SHARE, 10 * (now_s - began_s))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), min(max(pause_s, _LEAST_S), _MOST_S))
        finally:
            self.pages -= 1


PATH = "/duelog/v1/operations"

_MOST_ITEMS = 1_000
_MOST_BYTES = 4 << 20
_MOST_ASKS = 16


def asking(store: DelayedStore) -> Ask:
    """Make the way to ask a store that this process has open, which shows messages as clients sent them then.

    Of any thread.
    """
    store.entry_reader = shown_entry
    return Operations(store).ask


@dataclass(eq=False)
class OperationResource:
    """For the event loop's thread alone.

    owner_of: a namespace's broker, None: this one. namespaces: all of them, in which roles may have rights.
    """

    _ask: Ask
    _permissions: Permissions
    _owner_of: OwnerOf = lambda namespace: None
    _namespaces: Callable[[], Iterable[str]] = tuple
    watching: Watching = field(default_factory=Watching, init=False)

    def routes(self) -> list[Route]:
        login, here = Need.LOGIN, True
        return [
            Route("GET", PATH, self.known, "Operations, and which of them the role may ask", login, ("namespace",),
                  here=here),
            Route("POST", f"{PATH}/{{operation}}", self.do, "Do an operation", login, body="object", here=here),
            Route("POST", "/duelog/v1/watch", self.watch, "Answers of operations that look, as they change", login,
                  body="array", here=here),
        ]  # fmt: skip

    async def known(self, request: Request) -> Any:
        """By name whether the role may ask it: of topics in `namespace`, or without one of the whole store.

        namespaces: those in which it has rights, at most 1,000; null: it may look at the whole store.
        """
        namespace, role, permissions = request.query.get("namespace"), request.role, self._permissions
        given = {} if namespace is None else {"namespace": namespace}
        granted = (each for each in self._namespaces() if permissions.allows(role, each, *Action))
        return {
            "role": role,
            "namespaces": None if permissions.may_look(role) else list(islice(granted, _MOST_ITEMS)),
            "operations": {
                name: {"looks": each.looks, "allowed": self._refusal(request.role, each, given) is None}
                for name, each in OPERATIONS.items()
            },
        }

    async def do(self, request: Request) -> Reply:
        """The result as JSON. 307: another broker has the namespace."""
        operation = self._operation(request.path["operation"])
        arguments = request.object(optional=True)
        self._require(request.role, operation, arguments)
        owner = next(filter(None, map(self._owner_of, _namespaces(arguments))), None)
        if owner is not None:
            raise HttpError(307, f"another broker has this namespace: {owner}",
                            {"Location": f"{owner}{PATH}/{operation.name}"})  # fmt: skip
        result, _ = await self._answer(operation, arguments)
        return Reply(result, "application/json")

    async def watch(self, request: Request) -> Stream:
        """A body [[operation, arguments], ...]; events {"at": which, "result": ...}, or "reason" in its place."""
        return Stream(self.watched(request.json(), request.role))

    def watched(self, asks: Any, role: str | None = None) -> AsyncGenerator[bytes, None]:
        """The events of such questions of a role. Raises HttpError."""
        if not isinstance(asks, list) or not 1 <= len(asks) <= _MOST_ASKS:
            raise HttpError(412, f"the body: expected 1 to {_MOST_ASKS} of [operation, arguments]")
        looks = []
        for each in asks:
            if not (isinstance(each, list) and len(each) == 2 and isinstance(each[1], dict)):
                raise HttpError(412, f"{json.dumps(each)[:200]}: expected [operation, arguments]")
            operation = self._operation(each[0])
            if not operation.looks:
                raise HttpError(412, f"{operation.name} changes something: it is not asked again and again")
            self._require(role, operation, each[1])
            looks.append(partial(self._look, role, operation, each[1]))
        return self.watching.events(looks)

    async def _look(self, role: str | None, operation: Operation, arguments: Mapping[str, Any]) -> tuple[bytes, float]:
        """An answer to a role, whose rights may have been taken since. Raises HttpError 403."""
        self._require(role, operation, arguments)
        return await self._answer(operation, arguments)

    async def _answer(self, operation: Operation, arguments: Mapping[str, Any]) -> tuple[bytes, float]:
        """The result as JSON, and the seconds of a processor that it took here."""

        def work() -> tuple[bytes, float]:
            began_s = time.thread_time()
            result = self._ask(operation.name, arguments)
            body = json.dumps(_cut(result) if operation.streamed else result).encode()
            return body, time.thread_time() - began_s

        return await asyncio.to_thread(work)

    # -- who may ------------------------------------------------------------------------------------

    @staticmethod
    def _operation(name: object) -> Operation:
        found = OPERATIONS.get(name) if isinstance(name, str) else None
        if found is None:
            raise HttpError(404, f"{name!r:.200} is no operation; GET {PATH} lists them")
        return found

    def _require(self, role: str | None, operation: Operation, arguments: Mapping[str, Any]) -> None:
        refusal = self._refusal(role, operation, arguments)
        if refusal is not None:
            raise HttpError(403, refusal)

    def _refusal(self, role: str | None, operation: Operation, arguments: Mapping[str, Any]) -> str | None:
        """Why a role may not ask; None: it may.

        It is asked of the namespaces that arguments name, and of the whole store where they name none. What only
        superusers may ask of that, the administrators of a tenant may of its namespaces.
        """
        if self._permissions.is_superuser(role) or (operation.looks and self._permissions.may_look(role)):
            return None
        within = operation.signature.parameters.keys() & {"topic", "namespace"}
        namespaces = _namespaces(arguments) if within else []
        actions = need_of(operation.name).actions
        if namespaces and all(self._permissions.allows(role, each, *actions) for each in namespaces):
            return None
        return f"role {role!r} may not ask for {operation.name} of {' and '.join(namespaces) or 'the whole store'}"


def _namespaces(arguments: Mapping[str, Any]) -> list[str]:
    """The namespaces of `topic` and `namespace`. Raises HttpError 412."""
    topic, namespace = arguments.get("topic"), arguments.get("namespace")
    try:
        of_topic = [] if topic is None else [TopicName.parse(topic).namespace_name]
        return of_topic if namespace is None else [*of_topic, validate_namespace_name(namespace)]
    except InvalidArgument as error:
        raise HttpError(412, str(error)) from error


def _cut(items: Iterator[Any]) -> dict[str, Any]:
    found: list[Any] = []
    size = 0
    for each in items:
        if len(found) == _MOST_ITEMS or size > _MOST_BYTES:
            return {"items": found, "more": True}
        found.append(each)
        size += len(each.get("payload") or "") if isinstance(each, dict) else 0
    return {"items": found, "more": False}
