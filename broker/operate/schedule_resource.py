"""Delayed messages: those that are to come by due time, what became of one, cancelling and rescheduling.

Pulsar has none of these. An id is that of the receipt, `ledger:entry`.
"""

import asyncio
import base64
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...markers.pending_entries import Outcome
from ...operations.json_form import camel, to_json
from ...operations.operations import scheduled_page
from ...store.message import MAX_DUE_MS, ScheduledMessage
from ...store.position import MAX_ID, MessageId
from ...topic import Topic
from ..admin.http_request import HttpError, Request, texts_of
from ..admin.routing import Route, need_of
from .client_message import opened
from .topic_resource import TopicFinder

TOPIC = "/duelog/v1/persistent/{tenant}/{namespace}/{topic}"
MESSAGE = TOPIC + "/messages/{ledger}/{entry}"

MOST_LISTED = 1_000
MOST_PAYLOAD_BYTES = 4_096
MOST_TOGETHER = 1_000
"""Messages that one request cancels or reschedules."""


@dataclass(eq=False)
class ScheduleResource:
    """For the event loop's thread alone."""

    _finder: TopicFinder

    def routes(self) -> list[Route]:
        page = ("start", "end", "limit", "after", "payloadBytes")
        return [
            Route("GET", f"{TOPIC}/scheduled", self.scheduled, "Messages to come, by due time",
                  need_of("scheduled"), page),
            Route("GET", MESSAGE, self.message, "What has become of a message", need_of("scheduled"),
                  ("payloadBytes",)),
            Route("DELETE", MESSAGE, self.cancel, "Cancel a message", need_of("cancel")),
            Route("POST", f"{MESSAGE}/reschedule", self.reschedule, "Give a message another due time",
                  need_of("reschedule"), body="object"),
            Route("POST", f"{TOPIC}/cancel", self.cancel_together, "Cancel messages in one transaction",
                  need_of("cancel"), body="object"),
            Route("POST", f"{TOPIC}/reschedule", self.reschedule_together, "Give messages another due time, in one",
                  need_of("reschedule"), body="object"),
        ]  # fmt: skip

    # -- looking ---------------------------------------------------------------------------------------

    async def scheduled(self, request: Request) -> Any:
        """Due in [start, end), `limit` at a time; `next` is the `after` of the following page, null: that was all."""
        topic = await self._finder.one(request)
        start_ms, end_ms = _instant(request, "start") or 0, _instant(request, "end")
        limit = request.number("limit", 100, lowest=1, highest=MOST_LISTED)
        after, shown = request.query.get("after") or None, _payload_bytes(request)
        messages, following = await asyncio.to_thread(scheduled_page, topic, start_ms, end_ms, limit, after)
        return {"messages": [_shown(each, shown) for each in messages], "next": following}

    async def message(self, request: Request) -> Any:
        """Its state: scheduled, cancelled, fired (delivered to whom it is for, or to be), or 404: unknown."""
        topic, message_id = await self._finder.one(request), _id_of(request)
        shown = _payload_bytes(request)

        def work() -> dict[str, Any] | None:
            state, found = topic.state(message_id), topic.get(message_id)
            if found is None and state == "unknown":
                return None
            position = topic.position_of(message_id)
            stored = {"messageId": str(message_id)} if found is None else _shown(found, shown)
            return {**stored, "state": state, "position": None if position is None else str(position)}

        found = await asyncio.to_thread(work)
        if found is None:
            raise _unknown(message_id)
        return found

    # -- changing --------------------------------------------------------------------------------------

    async def cancel(self, request: Request) -> None:
        """204: it never comes. 409: it has fired. 404: unknown."""
        topic, message_id = await self._finder.one(request), _id_of(request)
        (outcome,) = await asyncio.to_thread(lambda: topic.cancel_batch([message_id]))
        if outcome is Outcome.FIRED:
            raise HttpError(409, f"message {message_id} has fired: it is too late to cancel it")
        if outcome is Outcome.UNKNOWN:
            raise _unknown(message_id)

    async def cancel_together(self, request: Request) -> Any:
        """`messageIds` of the body, and by id what became of it: cancelled, already cancelled, fired, unknown."""
        topic, ids = await self._finder.one(request), _ids_of(request)
        outcomes = await asyncio.to_thread(lambda: topic.cancel_batch(ids))
        return {"messages": [{"messageId": str(each), "outcome": outcome.value}
                             for each, outcome in zip(ids, outcomes, strict=True)]}  # fmt: skip

    async def reschedule(self, request: Request) -> Any:
        """`deliverAt` (ms or ISO 8601) or `deliverAfter` (seconds); neither: now. Its new id; 409: it is too late."""
        topic, message_id = await self._finder.one(request), _id_of(request)
        (new_id,) = await self._reschedule(topic, [message_id], request)
        if new_id is None:
            state = await asyncio.to_thread(lambda: topic.state(message_id))
            if state == "unknown":
                raise _unknown(message_id)
            raise HttpError(409, f"message {message_id} is {state}: it has no due time any more")
        return {"messageId": str(new_id)}

    async def reschedule_together(self, request: Request) -> Any:
        """`messageIds` of the body; by id the new one, null: too late, cancelled or unknown."""
        topic, ids = await self._finder.one(request), _ids_of(request)
        new_ids = await self._reschedule(topic, ids, request)
        return {"messages": [{"messageId": str(each), "newMessageId": None if new is None else str(new)}
                             for each, new in zip(ids, new_ids, strict=True)]}  # fmt: skip

    async def _reschedule(self, topic: Topic, ids: Sequence[MessageId], request: Request) -> Sequence[MessageId | None]:
        body = request.object(optional=True)
        unknown = body.keys() - {"deliverAt", "deliverAfter", "messageIds"}
        if unknown:
            raise HttpError(412, f"{sorted(unknown)!r:.200}: expected deliverAt or deliverAfter")
        at, after = body.get("deliverAt"), body.get("deliverAfter")
        if isinstance(at, str):
            at = _time("deliverAt", at)
        return await asyncio.to_thread(lambda: topic.reschedule_batch(ids, deliver_at=at, deliver_after=after))


def _shown(message: ScheduledMessage, payload_bytes: int) -> dict[str, Any]:
    """A stored message; its payload as base64, the first bytes of it."""
    fields = to_json(message)
    found = {camel(name): fields[name] for name in ("message_id", "due_ms", "publish_ms", "key", "properties")}
    found |= {"producer": None, "messages": 1, "bytes": len(message.payload)}
    payload = message.payload
    with suppress(HttpError):  # metadata that cannot be read: what the store knows
        metadata, payload = opened(message)
        found["properties"] = {each.key: each.value for each in metadata.properties}
        found |= {"producer": metadata.producer_name, "messages": metadata.num_messages_in_batch or 1}
        found |= {"key": metadata.partition_key, "bytes": len(payload)}
    if payload_bytes:
        found["payload"] = base64.b64encode(payload[:payload_bytes]).decode()
    return found


def _unknown(message_id: MessageId) -> HttpError:
    return HttpError(404, f"the topic has no message {message_id}")


def _id_of(request: Request) -> MessageId:
    return MessageId(request.number("ledger", 0, highest=MAX_ID), request.number("entry", 0, highest=MAX_ID))


def _ids_of(request: Request) -> list[MessageId]:
    texts = texts_of(request.object(), "messageIds")
    if not 1 <= len(texts) <= MOST_TOGETHER:
        raise HttpError(412, f"messageIds: {len(texts)} of them; expected 1 to {MOST_TOGETHER}")
    return [MessageId.parse(text) for text in texts]


def _payload_bytes(request: Request) -> int:
    return request.number("payloadBytes", 0, highest=MOST_PAYLOAD_BYTES)


def _instant(request: Request, name: str) -> int | None:
    """A query that is a time: milliseconds, or ISO 8601 with a zone."""
    text = request.query.get(name, "")
    if not text:
        return None
    if text.isdecimal():
        return request.number(name, 0, highest=MAX_DUE_MS)
    return max(int(_time(name, text).timestamp() * 1_000), 0)


def _time(name: str, text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        reason = "expected milliseconds since 1970, or ISO 8601 with a zone (2026-11-21T09:00:00Z)"
        raise HttpError(412, f"{name}={text!r:.200}: {reason}")
    return found
