"""Topics over REST: paths and bodies as pulsar-admin sends them, and each refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog.broker.protocol import commands
from duelog.store.message import Message
from tests.broker.admin.rest import SECURED, Rest, Rows, administered

TOPICS = "/admin/v2/persistent/public/default"
FULL = "persistent://public/default/"


async def test_a_topic_is_created_listed_and_deleted(rest: Rest) -> None:
    """Twice the same is 409, an unknown one 404; a name may have a blank in it."""
    assert (await rest.ask("GET", TOPICS)).value == []
    for name in ("t", "a%20%C3%A4"):
        assert (await rest.ask("PUT", f"{TOPICS}/{name}", {})).status == 204
        again = await rest.ask("PUT", f"{TOPICS}/{name}")
        assert (again.status, "exists already" in again.reason) == (409, True)
    assert (await rest.ask("GET", f"{TOPICS}?authoritative=false")).value == [f"{FULL}a ä", f"{FULL}t"]
    assert (await rest.ask("GET", f"{TOPICS}/t/partitions")).value["partitions"] == 0
    assert (await rest.ask("DELETE", f"{TOPICS}/a%20%C3%A4?force=false&authoritative=false")).status == 204
    assert (await rest.ask("DELETE", f"{TOPICS}/a%20%C3%A4")).status == 404
    assert [topic.name for topic in rest.store.topics()] == [f"{FULL}t"]


async def test_a_partitioned_topic_and_its_partitions(rest: Rest) -> None:
    """Created with a number or an object, grown, never shrunk, deleted with all partitions."""
    path = f"{TOPICS}/p/partitions"
    assert (await rest.ask("GET", path)).status == 404
    assert (await rest.ask("PUT", path, 2)).status == 204
    assert (await rest.ask("PUT", path, 2)).status == 409
    assert (await rest.ask("PUT", f"{TOPICS}/p", {})).status == 409
    assert (await rest.ask("GET", f"{TOPICS}/partitioned")).value == [f"{FULL}p"]
    assert (await rest.ask("GET", TOPICS)).value == [f"{FULL}p-partition-0", f"{FULL}p-partition-1"]
    assert (await rest.ask("PUT", f"{TOPICS}/p/subscription/s", None)).status == 204
    await rest.ask("POST", "/admin/v2/namespaces/public/default/delayedDelivery", {"active": True})
    assert (await rest.ask("POST", path, 2)).status == 412
    assert (await rest.ask("POST", path, 3)).status == 204
    assert (await rest.ask("GET", path)).value == {"partitions": 3, "deleted": False, "properties": {}}
    assert rest.store.topic("p-partition-2").subscriptions() == ["s"]
    rest.store.delete_topic("p-partition-1")
    assert (await rest.ask("POST", f"{TOPICS}/p/createMissedPartitions")).status == 204
    assert rest.store.topic("p-partition-1").subscriptions() == ["s"]
    assert (await rest.ask("DELETE", f"{TOPICS}/p")).status == 405
    assert (await rest.ask("DELETE", path)).status == 204
    assert (await rest.ask("GET", TOPICS)).value == []
    assert (await rest.ask("PUT", path, {"partitions": 1, "properties": {}})).status == 204
    assert (await rest.ask("POST", f"{TOPICS}/none/partitions", 3)).status == 404
    await rest.ask("PUT", f"{TOPICS}/plain", {})
    assert (await rest.ask("POST", f"{TOPICS}/plain/partitions", 3)).status == 409


REFUSED: Rows = (
    ("PUT", "p/partitions", 0, 412, "partitions=0"),
    ("PUT", "p/partitions", 10_001, 412, "partitions=10001"),
    ("PUT", "p/partitions", "3", 412, "expected an integer"),
    ("PUT", "p/partitions", {"partitions": 3, "properties": {"a": "b"}}, 412, "properties="),
    ("PUT", "p-partition-1/partitions", 3, 412, "partition's"),
    ("PUT", "t", {"owner": "me"}, 412, "properties="),
    ("PUT", "t", [], 412, "object"),
    ("PUT", "x%00y", {}, 412, "x"),
    ("GET", "t/stats", ..., 404, "does not exist"),
    ("GET", "there/messageid/x", ..., 412, "timestamp='x'"),
    ("GET", "there/ledger/-1/entry/0", ..., 412, "ledger=-1"),
    ("PUT", "t/unload", ..., 404, "does not exist"),
    ("PUT", "t/compaction", ..., 405, "not offered"),
    ("POST", "t/terminate", ..., 405, "not offered"),
)


async def test_what_cannot_be_done_says_why(rest: Rest) -> None:
    """The field and the value, or what there is instead; nothing is made of it."""
    rest.store.topic("there").create()
    await rest.refuses(REFUSED, f"{TOPICS}/")
    assert (await rest.ask("GET", f"{TOPICS}/partitioned")).value == []


async def test_an_unknown_namespace_has_no_topics(rest: Rest) -> None:
    """404 names it, and nothing is made in it."""
    for method, path in (("GET", ""), ("GET", "/partitioned"), ("PUT", "/t"), ("PUT", "/t/unload")):
        answered = await rest.ask(method, f"/admin/v2/persistent/public/none{path}")
        assert (answered.status, answered.reason[:36]) == (404, "namespace public/none does not exist")
    assert list(rest.store.topics()) == []


async def test_clients_keep_a_topic_from_being_deleted(rest: Rest) -> None:
    """412 for a producer, for a consumer; `force` closes both; unloading closes them and leaves the topic."""
    client = await rest.client()
    kind = commands.SubscriptionType.SHARED
    assert isinstance(await client.ask(commands.Producer("t", 1, 1)), commands.ProducerSuccess)
    refused = await rest.ask("DELETE", f"{TOPICS}/t")
    assert (refused.status, "force" in refused.reason) == (412, True)
    assert await client.ask(commands.Subscribe("t", "s", kind, 1, 2)) == commands.Success(2)
    assert (await rest.ask("PUT", f"{TOPICS}/t/unload")).status == 204
    closed = {type(await client.hear()), type(await client.hear())}
    assert closed == {commands.CloseProducer, commands.CloseConsumer}
    assert await client.ask(commands.Subscribe("t", "s", kind, 1, 3)) == commands.Success(3)
    assert (await rest.ask("DELETE", f"{TOPICS}/t")).status == 412
    assert (await rest.ask("DELETE", f"{TOPICS}/t?force=true")).status == 204
    assert isinstance(await client.hear(), commands.CloseConsumer)
    assert list(rest.store.topics()) == []


async def test_rights_by_role(tmp_path: Path) -> None:
    """401 without credentials, 403 without the right, whether the topic exists or not."""
    async with administered(tmp_path / "store", **SECURED) as (_, rest, _store):
        grant = "/admin/v2/namespaces/public/default/permissions/reader"
        assert (await rest.ask("POST", grant, ["consume"], role="root")).status == 204
        assert (await rest.ask("GET", TOPICS)).status == 401
        assert (await rest.ask("PUT", f"{TOPICS}/t", {}, role="root")).status == 204
        for name in ("t", "none"):
            assert (await rest.ask("PUT", f"{TOPICS}/{name}", {}, role="reader")).status == 403
            assert (await rest.ask("DELETE", f"{TOPICS}/{name}", role="reader")).status == 403
            assert (await rest.ask("GET", f"{TOPICS}/{name}/stats", role="stranger")).status == 403
        assert (await rest.ask("GET", f"{TOPICS}/t/stats", role="reader")).status == 200
        assert (await rest.ask("POST", f"{TOPICS}/t/subscription/s/skip_all", role="reader")).status == 404
        assert (await rest.ask("PUT", f"{TOPICS}/t/subscription/s", role="reader")).status == 204
        scheduled = "/duelog/v1/persistent/public/default/t"
        assert (await rest.ask("GET", f"{scheduled}/scheduled", role="reader")).status == 200
        assert (await rest.ask("DELETE", f"{scheduled}/messages/1/1", role="reader")).status == 403
        for path in ("counters", "partitions", "jobs"):
            assert (await rest.ask("GET", f"/duelog/v1/{path}", role="reader")).status == 403
            assert (await rest.ask("GET", f"/duelog/v1/{path}", role="root")).status == 200


async def test_messages_by_id_and_by_time(rest: Rest) -> None:
    """The last one, the first of a time, any stored one, a delayed one by the id of its receipt before it is due."""
    topic = rest.store.topic("t")
    topic.create()
    nothing = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
    assert (await rest.ask("GET", f"{TOPICS}/t/lastMessageId")).value == nothing
    assert (await rest.ask("GET", f"{TOPICS}/t/messageid/0")).status == 404
    ids = topic.send_batch([Message(b"a", key="k", properties={"p": "ä b"}), Message(b"b")])
    late = topic.send(b"late", deliver_after=3_600)
    shown = {"ledgerId": ids[1].ledger_id, "entryId": ids[1].entry_id, "partitionIndex": -1}
    assert (await rest.ask("GET", f"{TOPICS}/t/lastMessageId")).value == shown
    first = await rest.ask("GET", f"{TOPICS}/t/messageid/1000")
    assert first.value == {**shown, "entryId": ids[0].entry_id}
    found = await rest.ask("GET", f"{TOPICS}/t/ledger/{ids[0].ledger_id}/entry/{ids[0].entry_id}")
    assert (found.status, found.value) == (200, b"a")
    assert found.headers["X-Pulsar-Message-ID"] == str(ids[0])
    assert found.headers["X-Pulsar-partition-key"] == "k"
    assert found.headers["X-Pulsar-PROPERTY-p"] == "%C3%A4 b"
    found = await rest.ask("GET", f"{TOPICS}/t/ledger/{late.ledger_id}/entry/{late.entry_id}")
    assert (found.status, found.value) == (200, b"late")
    for missing in (f"{ids[0].ledger_id}/entry/99", "999999/entry/0"):
        assert (await rest.ask("GET", f"{TOPICS}/t/ledger/{missing}")).status == 404


async def test_a_topic_of_a_namespace_that_only_the_store_has_says_what_makes_it(rest: Rest) -> None:
    """404 names the request that makes the namespace; with it the topics that a program made are there."""
    rest.store.create_topics(["public/x/t"])
    refused = await rest.ask("PUT", "/admin/v2/persistent/public/x/u")
    assert (refused.status, "PUT /admin/v2/namespaces/public/x makes it" in refused.reason) == (404, True)
    assert (await rest.ask("PUT", "/admin/v2/namespaces/public/x")).status == 204
    assert (await rest.ask("PUT", "/admin/v2/persistent/public/x/u")).status == 204
    names = [f"persistent://public/x/{name}" for name in "tu"]
    assert (await rest.ask("GET", "/admin/v2/persistent/public/x")).value == names


NAMESPACE = "/admin/v2/namespaces/public/default"


@pytest.mark.parametrize("path", [NAMESPACE, f"{NAMESPACE}/0x00000000_0xffffffff"])
async def test_namespaces_unload_closes_the_clients_of_its_topics(rest: Rest, path: str) -> None:
    """They look up and come again; those of another namespace stay."""
    assert (await rest.ask("PUT", "/admin/v2/namespaces/public/n")).status == 204
    client = await rest.client()
    kind = commands.SubscriptionType.SHARED
    assert isinstance(await client.ask(commands.Producer("public/n/t", 1, 1)), commands.ProducerSuccess)
    assert isinstance(await client.ask(commands.Producer("t", 2, 2)), commands.ProducerSuccess)
    assert await client.ask(commands.Subscribe("u", "s", kind, 3, 3)) == commands.Success(3)
    assert (await rest.ask("PUT", f"{path}/unload", "")).status == 204
    closed = {type(command): command for command in (await client.hear(), await client.hear())}
    assert closed == {
        commands.CloseProducer: commands.CloseProducer(2, 2**64 - 1),
        commands.CloseConsumer: commands.CloseConsumer(3, 2**64 - 1),
    }
    assert await client.ask(commands.Subscribe("u", "s", kind, 4, 4)) == commands.Success(4)
    assert (await rest.ask("PUT", f"{NAMESPACE}/0x00000000_0x80000000/unload")).status == 412
    assert (await rest.ask("PUT", "/admin/v2/namespaces/public/no/unload")).status == 404


async def test_topics_examine_messages_counts_from_either_end(rest: Rest) -> None:
    """Subscriptions make no difference; a number that is too large is the farthest; what is not due is in no place."""
    topic, path = rest.store.topic("t"), f"{TOPICS}/t/examinemessage"
    topic.create()
    assert (await rest.ask("GET", path)).status == 412
    topic.send(b"late", deliver_after=3600)
    for start in range(0, 300, 60):
        topic.send_payloads([b"%d" % number for number in range(start, start + 60)])
    for query, payload in (
        ("", b"299"), ("?messagePosition=0", b"299"), ("?initialPosition=latest&messagePosition=3", b"297"),
        ("?initialPosition=latest&messagePosition=300", b"0"), ("?messagePosition=5000", b"0"),
        ("?initialPosition=earliest", b"0"), ("?initialPosition=earliest&messagePosition=250", b"249"),
        ("?initialPosition=earliest&messagePosition=5000", b"299"),
    ):  # fmt: skip
        answered = await rest.ask("GET", path + query)
        assert (answered.status, answered.value) == (200, payload), query
    assert answered.headers["X-Pulsar-Message-ID"]
    refused = await rest.ask("GET", f"{path}?initialPosition=middle")
    assert (refused.status, "initialPosition='middle'" in refused.reason) == (412, True)
    assert (await rest.ask("GET", f"{TOPICS}/no/examinemessage")).status == 404
