"""Over REST: delayed messages listed by due time, looked at, cancelled, rescheduled; the figures of the store."""

import asyncio
import base64
import json
import subprocess
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest

from duelog.partitions.timespan import directory_name
from duelog.store.position import MessageId
from tests.broker.admin.rest import Rest, Rows, administered
from tests.conftest import present

TOPIC = "/duelog/v1/persistent/public/default/t"
DUE_MS = 4_000_000_000_000
PROGRAM = Path(__file__).with_name("scheduling_client.py")


def message(message_id: MessageId, rest: str = "") -> str:
    """The address of a message."""
    return f"{TOPIC}/messages/{message_id.ledger_id}/{message_id.entry_id}{rest}"


async def listed(rest: Rest, query: str) -> tuple[list[Any], str | None]:
    """A page: the messages' ids, and where the next begins."""
    found = (await rest.ask("GET", f"{TOPIC}/scheduled?{query}")).value
    return [each["messageId"] for each in found["messages"]], found["next"]


async def test_pages_have_every_message_once(tmp_path: Path) -> None:
    """In order of due time, also where many are due at one instant, wait inline, and go while pages are read."""
    settings: dict[str, Any] = {"store": {"inline_delay_ms": 10**9}}
    async with administered(tmp_path / "store", **settings) as (_, rest, store):
        topic, now_ms = store.topic("t"), store.clock.now_ms()
        soon = topic.send_payloads([b"x"] * 5, deliver_at=now_ms + 9 * 10**8)
        late = topic.send_payloads([b"x"] * 30, deliver_at=[DUE_MS + number // 10 for number in range(30)])
        expected = list(map(str, [*soon, *late]))
        for limit in (1, 7, 35, 1_000):
            found: list[str] = []
            after: str | None = ""
            while after is not None:
                ids, after = await listed(rest, f"limit={limit}&after={after}")
                found += ids
            assert found == expected
        assert (await listed(rest, f"start={DUE_MS + 1}&end={DUE_MS + 2}"))[0] == expected[15:25]
        assert (await listed(rest, "end=2001-09-09T01:46:40Z"))[0] == []
        ids, after = await listed(rest, "limit=8")
        assert after is not None
        for each in ids[5:]:
            assert topic.cancel(MessageId.parse(each))
        assert (await listed(rest, f"after={after}"))[0] == expected[8:]


async def test_a_message_is_shown_with_what_is_known_of_it(rest: Rest) -> None:
    """Its state, its key and properties, as much of its payload as is asked for."""
    topic = rest.store.topic("t")
    sent = topic.send(b"pay the bill", deliver_at=DUE_MS, key="k", properties={"a": "b"})
    found = (await rest.ask("GET", message(sent, "?payloadBytes=3"))).value
    assert found.pop("publishMs") <= rest.store.clock.now_ms()
    assert found == {
        "messageId": str(sent), "dueMs": DUE_MS, "key": "k", "properties": {"a": "b"}, "producer": "duelog",
        "messages": 1, "bytes": 12, "payload": base64.b64encode(b"pay").decode(), "state": "scheduled",
        "position": None,
    }  # fmt: skip
    at_once = topic.send(b"now")
    assert (await rest.ask("GET", message(at_once))).value["state"] == "fired"
    unknown = await rest.ask("GET", message(MessageId(99_999, 0)))
    assert (unknown.status, unknown.reason) == (404, "the topic has no message 99999:0")


async def test_cancelling_says_what_became_of_it(rest: Rest) -> None:
    """204 also the second time, 409 once it has fired, 404 for an unknown one; many in one transaction."""
    topic = rest.store.topic("t")
    ids = topic.send_payloads([b"x"] * 4, deliver_at=DUE_MS)
    at_once = topic.send(b"now")
    assert [(await rest.ask("DELETE", message(ids[0]))).status for _ in range(2)] == [204, 204]
    assert (await rest.ask("GET", message(ids[0]))).value["state"] == "cancelled"
    late = await rest.ask("DELETE", message(at_once))
    assert (late.status, "has fired" in late.reason) == (409, True)
    assert (await rest.ask("DELETE", message(MessageId(99_999, 0)))).status == 404
    asked = [*map(str, ids[:2]), str(at_once), "99999:0"]
    found = (await rest.ask("POST", f"{TOPIC}/cancel", {"messageIds": asked})).value["messages"]
    assert [each["messageId"] for each in found] == asked
    assert [each["outcome"] for each in found] == ["already cancelled", "cancelled", "fired", "unknown"]
    assert [each.message_id for each in topic.scheduled()] == list(ids[2:])


async def test_rescheduling_gives_a_new_id(rest: Rest) -> None:
    """At a time in either form, or after seconds; a cancelled one is 409."""
    topic = rest.store.topic("t")
    topic.subscribe("s").close()
    first = topic.send(b"x", deliver_at=DUE_MS)
    found = (await rest.ask("POST", message(first, "/reschedule"), {"deliverAt": DUE_MS + 5})).value
    second = MessageId.parse(found["messageId"])
    assert [(each.message_id, each.due_ms) for each in topic.scheduled()] == [(second, DUE_MS + 5)]
    gone = await rest.ask("POST", message(first, "/reschedule"), {"deliverAt": DUE_MS})
    assert (gone.status, "is cancelled" in gone.reason) == (409, True)
    body = {"messageIds": [str(second), str(first)], "deliverAt": "2099-01-01T00:00:00+01:00"}
    pairs = (await rest.ask("POST", f"{TOPIC}/reschedule", body)).value["messages"]
    assert pairs[1] == {"messageId": str(first), "newMessageId": None}
    third = MessageId.parse(pairs[0]["newMessageId"])
    assert [each.due_ms for each in topic.scheduled()] == [4_070_905_200_000]
    assert (await rest.ask("POST", message(third, "/reschedule"), {"deliverAfter": 0})).status == 200
    with topic.subscribe("s") as subscription:
        assert [each.payload for each in subscription.receive(1, timeout=60)] == [b"x"]
    unknown = await rest.ask("POST", message(MessageId(99_999, 0), "/reschedule"), {})
    assert unknown.status == 404


WRONG: Rows = (
    ("GET", "scheduled?limit=0", ..., 412, "limit=0"),
    ("GET", "scheduled?limit=1001", ..., 412, "limit=1001"),
    ("GET", "scheduled?payloadBytes=5000", ..., 412, "payloadBytes=5000"),
    ("GET", "scheduled?start=tomorrow", ..., 412, "start='tomorrow'"),
    ("GET", "scheduled?start=2026-11-21T09:00:00", ..., 412, "with a zone"),
    ("GET", "scheduled?end=99999999999999999", ..., 412, "end=99999999999999999"),
    ("GET", "scheduled?after=x", ..., 412, "after='x'"),
    ("GET", "scheduled?after=5:x", ..., 412, "message_id='x'"),
    ("GET", "messages/x/0", ..., 412, "ledger='x'"),
    ("POST", "cancel", {"messageIds": []}, 412, "0 of them"),
    ("POST", "cancel", {"messageIds": ["1:1"] * 1_001}, 412, "1001 of them"),
    ("POST", "cancel", {"messageIds": "1:1"}, 412, "messageIds"),
    ("POST", "cancel", {"messageIds": ["1"]}, 412, "message_id='1'"),
    ("POST", "messages/0/0/reschedule", {"deliverAt": "soon"}, 412, "deliverAt='soon'"),
    ("POST", "messages/0/0/reschedule", {"deliverAt": 5}, 412, "deliver_at=5"),
    ("POST", "messages/0/0/reschedule", {"deliverAt": [1]}, 412, "deliver_at=[1]"),
    ("POST", "messages/0/0/reschedule", {"deliverAfter": "x"}, 412, "deliver_after='x'"),
    ("POST", "messages/0/0/reschedule", {"deliverAfter": -1}, 412, "deliver_after=-1"),
    ("POST", "messages/0/0/reschedule", {"deliverAt": 1, "deliverAfter": 1}, 412, "deliver_after=1"),
    ("POST", "messages/0/0/reschedule", {"at": 1}, 412, "'at'"),
    ("POST", "messages/0/0/reschedule", {"deliverAfter": 10**9}, 412, "max_delivery_delay_ms"),
)


async def test_a_wrong_value_is_named(rest: Rest) -> None:
    """412 with the field and the value, and the message stays as it was."""
    topic = rest.store.topic("t")
    sent = topic.send(b"x", deliver_at=DUE_MS)
    limits = {"active": True, "tickTime": 1, "maxDeliveryDelayInMillis": 10**11}
    address = "/admin/v2/namespaces/public/default/delayedDelivery"
    assert (await rest.ask("POST", address, limits)).status == 204
    there = f"messages/{sent.ledger_id}/{sent.entry_id}/"
    rows = [(method, path.replace("messages/0/0/", there), *row) for method, path, *row in WRONG]
    await rest.refuses(rows, f"{TOPIC}/")
    assert [each.message_id for each in topic.scheduled()] == [sent]


async def further(process: Process) -> list[str]:
    """Have the program go on; what it receives."""
    present(process.stdin).write(b"go\n")
    return [each["payload"] for each in json.loads(await asyncio.wait_for(present(process.stdout).readline(), 300))]


async def test_a_client_gets_what_was_left_and_at_its_new_time(rest: Rest) -> None:
    """pulsar-client sends delayed messages and learns their ids; REST lists them, cancels one and moves two.

    Then the topic is unloaded and the subscription moved: the client goes on with both, as with Pulsar.
    """
    pytest.importorskip("pulsar")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), rest.broker.urls.plain, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        ids = json.loads(await asyncio.wait_for(process.stdout.readline(), 300))
        shown = (await rest.ask("GET", f"{TOPIC}/scheduled?payloadBytes=100")).value["messages"]
        assert [each["messageId"] for each in shown] == [ids[name] for name in ("a", "b", "c", "d")]
        assert [base64.b64decode(each["payload"]).decode() for each in shown] == ["a", "b", "c", "d"]
        assert [each["properties"] for each in shown] == [{"n": name} for name in "abcd"]
        parsed = {name: MessageId.parse(text) for name, text in ids.items()}
        assert (await rest.ask("DELETE", message(parsed["a"]))).status == 204
        due_ms = rest.store.clock.now_ms() + 2_500
        moved = {"deliverAt": due_ms}
        assert (await rest.ask("POST", message(parsed["d"], "/reschedule"), moved)).status == 200
        assert (await rest.ask("POST", message(parsed["b"], "/reschedule"), {})).status == 200
        present(process.stdin).write(b"go\n")
        received = json.loads(await asyncio.wait_for(process.stdout.readline(), 300))
        assert [each["payload"] for each in received] == ["b", "d"]
        assert due_ms <= received[1]["atMs"] < due_ms + 30_000
        assert [each.payload[-1:] for each in rest.store.topic("t").scheduled()] == [b"c"]
        admin = "/admin/v2/persistent/public/default/t"
        assert (await rest.ask("PUT", f"{admin}/unload")).status == 204
        assert await further(process) == ["e"]
        assert (await rest.ask("POST", f"{admin}/subscription/s/resetcursor/0")).status == 204
        assert sorted(await further(process)) == ["b", "d", "e"]
        assert await asyncio.wait_for(process.wait(), 120) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


WHEN_MS = 4_000_000_000_000 // 86_400_000 * 86_400_000


async def test_a_partition_says_why_it_is_still_there(rest: Rest) -> None:
    """By the name that `duelog partitions` gives; 404 for one that is not there, 412 for no name of one."""
    rest.store.topic("t").send_payloads([b"x"] * 3, deliver_at=WHEN_MS)
    (listed,) = (await rest.ask("GET", "/duelog/v1/partitions")).value
    name = directory_name(WHEN_MS)
    assert (listed["name"], listed["state"], listed["messages"], listed["pending"]) == (name, "future", 3, 3)
    found = (await rest.ask("GET", f"/duelog/v1/partitions/{name}")).value
    kept = [(each["reason"], each["topic"], each["behind"]) for each in found.pop("keptBy")]
    assert kept == [("not over", "", 0), ("pending", "persistent://public/default/t", 3)]
    assert found == listed
    assert (await rest.ask("GET", "/duelog/v1/partitions/20010101T000000Z")).status == 404
    assert (await rest.ask("GET", "/duelog/v1/partitions/tomorrow")).status == 412
