"""Topics and their statistics over REST: requests as pulsar-admin sends them, each refusal, figures that agree."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from duelog import ManualClock
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import HashRange, KeySharedMeta, KeySharedMode, KeyValue
from duelog.store.message import Message
from tests.broker.admin.rest import Rest, Rows, administered
from tests.broker.server.raw_client import RawClient, blob_of
from tests.conftest import START_MS

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


def names(text: str) -> set[str]:
    """Those in a text."""
    return set(text.split())


TOPIC_FIELDS = names("""
    msgRateIn msgThroughputIn msgRateOut msgThroughputOut bytesInCounter msgInCounter bytesOutCounter
    msgOutCounter averageMsgSize msgChunkPublished storageSize backlogSize publishRateLimitedTimes
    earliestMsgPublishTimeInBacklogs offloadedStorageSize lastOffloadLedgerId lastOffloadSuccessTimeStamp
    lastOffloadFailureTimeStamp ongoingTxnCount abortedTxnCount committedTxnCount publishers waitingPublishers
    subscriptions replication deduplicationStatus nonContiguousDeletedMessagesRanges
    nonContiguousDeletedMessagesRangesSerializedSize delayedMessageIndexSizeInBytes compaction ownerBroker
    topicCreationTimeStamp lastPublishTimeStamp oldestBacklogMessageAgeSeconds
    oldestBacklogMessageSubscriptionName""")
SUBSCRIPTION_FIELDS = names("""msgRateOut msgThroughputOut bytesOutCounter msgOutCounter msgRateRedeliver messageAckRate
    chunkedMessageRate msgBacklog backlogSize earliestMsgPublishTimeInBacklog msgBacklogNoDelayed
    blockedSubscriptionOnUnackedMsgs msgDelayed unackedMessages type msgRateExpired totalMsgExpired lastExpireTimestamp
    lastConsumedFlowTimestamp lastConsumedTimestamp lastAckedTimestamp lastMarkDeleteAdvancedTimestamp consumers
    isDurable isReplicated allowOutOfOrderDelivery consumersAfterMarkDeletePosition nonContiguousDeletedMessagesRanges
    nonContiguousDeletedMessagesRangesSerializedSize delayedMessageIndexSizeInBytes subscriptionProperties
    filterProcessedMsgCount filterAcceptedMsgCount filterRejectedMsgCount filterRescheduledMsgCount durable
    replicated msgInReplay keySharedMode""")
CONSUMER_FIELDS = names("""msgRateOut msgThroughputOut bytesOutCounter msgOutCounter msgRateRedeliver messageAckRate
    chunkedMessageRate consumerName availablePermits unackedMessages avgMessagesPerEntry blockedConsumerOnUnackedMsgs
    lastAckedTimestamp lastConsumedTimestamp address connectedSince clientVersion metadata""")
PUBLISHER_FIELDS = names("""accessMode msgRateIn msgThroughputIn averageMsgSize chunkedMessageRate producerId
    supportsPartialProducer producerName address connectedSince clientVersion metadata""")


async def test_figures_agree_with_what_was_sent_and_acknowledged(tmp_path: Path) -> None:
    """A topic, its producer, its subscription and consumer; delayed messages apart from the backlog that is due."""
    async with administered(tmp_path / "store", stats_update_frequency_in_secs=0.05) as (broker, rest, store):
        store.topic("t").send(b"late", deliver_after=3_600)
        client = await RawClient.connected(int(broker.urls.plain.rpartition(":")[2]))
        kind, said = commands.SubscriptionType.SHARED, [KeyValue("app", "x")]
        subscribe = commands.Subscribe("t", "s/1", kind, 1, 1, consumer_name="c", metadata=said)
        assert await client.ask(subscribe) == commands.Success(1)
        await client.ask(commands.Producer("t", 4, 2, producer_name="me", metadata=said))
        for number in range(5):
            client.say(commands.Send(4, number), blob=blob_of(b"12345678", number))
        assert all([isinstance(await client.hear(), commands.SendReceipt) for _ in range(5)])
        client.say(commands.Flow(1, 3))
        ids = []
        for _ in range(3):
            message = await client.hear_a(commands.Message)
            ids.append(message.message_id)
        client.say(commands.Ack(1, commands.AckType.INDIVIDUAL, ids[:1], request_id=9))
        assert isinstance(await client.hear(), commands.AckResponse)

        async def stats(query: str = "") -> dict[str, Any]:
            return dict((await rest.ask("GET", f"{TOPICS}/t/stats{query}")).value)

        found = await stats("?getPreciseBacklog=false&subscriptionBacklogSize=true&getEarliestTimeInBacklog=false")
        assert found.keys() >= TOPIC_FIELDS
        assert (found["msgInCounter"], found["msgOutCounter"]) == (5, 3)
        assert found["storageSize"] >= 5 * 8
        (publisher,) = found["publishers"]
        assert publisher.keys() >= PUBLISHER_FIELDS
        assert (publisher["producerName"], publisher["producerId"], publisher["metadata"]) == ("me", 4, {"app": "x"})
        assert publisher["accessMode"] == "Shared"
        ((name, subscription),) = found["subscriptions"].items()
        assert subscription.keys() >= SUBSCRIPTION_FIELDS
        assert (name, subscription["type"], subscription["isDurable"]) == ("s/1", "Shared", True)
        shown = [subscription[each] for each in ("msgBacklog", "msgDelayed", "msgBacklogNoDelayed")]
        assert shown == [5, 1, 4]
        assert (subscription["unackedMessages"], subscription["msgOutCounter"]) == (2, 3)
        (consumer,) = subscription["consumers"]
        assert consumer.keys() >= CONSUMER_FIELDS
        assert (consumer["consumerName"], consumer["availablePermits"], consumer["unackedMessages"]) == ("c", 0, 2)
        assert consumer["clientVersion"] == "test"
        assert consumer["connectedSince"].startswith("20")
        bare = await stats("?excludePublishers=true&excludeConsumers=true")
        assert (bare["publishers"], bare["subscriptions"]["s/1"]["consumers"]) == ([], [])
        for number in range(5, 10_000):  # until a period with some has passed
            client.say(commands.Send(4, number), blob=blob_of(b"12345678", number))
            assert isinstance(await client.hear(), commands.SendReceipt)
            if (await stats())["msgRateIn"] > 0:
                break
        else:
            raise AssertionError("no rate is told")


async def test_readers_have_figures_too(rest: Rest) -> None:
    """Each is a subscription that is not durable, while it is there."""
    rest.store.topic("t").create()
    client = await rest.client()
    kind = commands.SubscriptionType.EXCLUSIVE
    await client.ask(commands.Subscribe("t", "reader-1", kind, 1, 1, durable=False))
    shown = (await rest.ask("GET", f"{TOPICS}/t/stats")).value["subscriptions"]["reader-1"]
    assert (shown["isDurable"], shown["type"], len(shown["consumers"])) == (False, "Exclusive", 1)
    assert shown.keys() >= SUBSCRIPTION_FIELDS


async def test_partitions_are_summed(rest: Rest) -> None:
    """Counters and backlogs of all; each by itself as well, unless that is not asked for; 405 for the whole alone."""
    await rest.ask("PUT", f"{TOPICS}/p/partitions", 2)
    await rest.ask("PUT", f"{TOPICS}/p/subscription/s")
    for number in range(2):
        rest.store.topic(f"p-partition-{number}").send_payloads([b"a"] * (number + 1))
    found = (await rest.ask("GET", f"{TOPICS}/p/partitioned-stats?perPartition=true")).value
    assert found.keys() >= TOPIC_FIELDS
    assert found["metadata"] == {"partitions": 2, "deleted": False}
    assert found["subscriptions"]["s"]["msgBacklog"] == 3
    partitions = [f"persistent://public/default/p-partition-{number}" for number in range(2)]
    assert list(found["partitions"]) == partitions
    assert [found["partitions"][name]["subscriptions"]["s"]["msgBacklog"] for name in partitions] == [1, 2]
    assert (await rest.ask("GET", f"{TOPICS}/p/partitioned-stats?perPartition=false")).value["partitions"] == {}
    assert (await rest.ask("GET", f"{TOPICS}/p/stats")).status == 405
    inside = (await rest.ask("GET", f"{TOPICS}/p/partitioned-internalStats")).value
    assert list(inside["partitions"]) == partitions


async def test_figures_of_the_main_log(rest: Rest) -> None:
    """Its ledgers, its last entry, where each subscription stands."""
    topic = rest.store.topic("t")
    topic.subscribe("s").close()
    empty = (await rest.ask("GET", f"{TOPICS}/t/internalStats")).value
    assert empty["lastConfirmedEntry"].endswith(":-1")
    ids = topic.send_payloads([b"a", b"b", b"c"])
    topic.subscription("s").skip(2)
    found = (await rest.ask("GET", f"{TOPICS}/t/internalStats?metadata=false")).value
    assert (found["numberOfEntries"], found["lastConfirmedEntry"]) == (3, str(ids[2]))
    assert [each["entries"] for each in found["ledgers"]] == [3]
    cursor = found["cursors"]["s"]
    assert (cursor["markDeletePosition"], cursor["readPosition"]) == (str(ids[1]), str(ids[2]))
    assert cursor["numberOfEntriesSinceFirstNotAckedMessage"] == 1


async def test_topics_info_internal_has_ledgers_and_cursors(rest: Rest) -> None:
    """It is Pulsar's ManagedLedgerInfo; of a partitioned topic by partition."""
    topic = rest.store.topic("t")
    topic.subscribe("s", type="shared").close()
    ids = topic.send_payloads([b"a", b"b"])
    topic.subscription("s").skip(1)
    info = (await rest.ask("GET", f"{TOPICS}/t/internal-info")).value
    (ledger,) = info["ledgers"]
    assert (ledger["ledgerId"], ledger["entries"], ledger["isOffloaded"]) == (ids[0].ledger_id, 2, False)
    assert info["creationDate"].endswith("Z")
    assert info["cursors"]["s"]["markDelete"] == {"ledgerId": ids[0].ledger_id, "entryId": ids[0].entry_id}
    assert (await rest.ask("PUT", f"{TOPICS}/p/partitions", 2)).status == 204
    found = (await rest.ask("GET", f"{TOPICS}/p/internal-info")).value["partitions"]
    assert sorted(found) == [f"persistent://public/default/p-partition-{number}" for number in (0, 1)]
    assert (await rest.ask("GET", f"{TOPICS}/no/internal-info")).status == 404


async def test_statistics_have_owner_creation_last_publish_oldest_backlog_replay_and_key_shared_mode(
    tmp_path: Path,
    clock: ManualClock,
) -> None:
    """Times are epoch ms by the store's clock, 0 where nothing was published; the age is -1 without a backlog."""

    async with administered(tmp_path / "store", clock=clock) as (broker, rest, _):
        assert (await rest.ask("PUT", f"{TOPICS}/p/partitions", 2)).status == 204

        async def stats(query: str = "p-partition-0/stats") -> dict[str, Any]:
            return dict((await rest.ask("GET", f"{TOPICS}/{query}")).value)

        found = await stats()
        assert found["ownerBroker"] == broker.web_urls.plain.removeprefix("http://")
        assert (found["topicCreationTimeStamp"], found["lastPublishTimeStamp"]) == (START_MS, 0)
        assert found["oldestBacklogMessageAgeSeconds"] == -1
        assert found["oldestBacklogMessageSubscriptionName"] is None

        client = await RawClient.connected(int(broker.urls.plain.rpartition(":")[2]))
        topic = "persistent://public/default/p-partition-0"
        sticky = KeySharedMeta(KeySharedMode.STICKY, [HashRange(0, 65_535)])
        modes = (None, KeySharedMeta(KeySharedMode.AUTO_SPLIT), sticky)
        for number, (name, meta) in enumerate(zip(("s/1", "auto", "sticky"), modes, strict=True)):
            kind = commands.SubscriptionType.SHARED if meta is None else commands.SubscriptionType.KEY_SHARED
            asked = commands.Subscribe(topic, name, kind, number, number, key_shared=meta)
            assert await client.ask(asked) == commands.Success(number)
        await client.ask(commands.Producer(topic, 4, 5, producer_name="me"))
        client.say(commands.Send(4, 0), blob=blob_of(b"12345678"))
        assert isinstance(await client.hear(), commands.SendReceipt)
        client.say(commands.Flow(0, 1))
        got = await client.hear_a(commands.Message)
        client.say(commands.Redeliver(0, [got.message_id]))
        clock.advance(90_000)
        found = await stats()
        assert START_MS <= found["lastPublishTimeStamp"] <= START_MS + 90_000
        assert found["oldestBacklogMessageAgeSeconds"] == 90
        assert found["oldestBacklogMessageSubscriptionName"] in ("s/1", "auto", "sticky")
        async with asyncio.timeout(120):
            while not (subscriptions := (await stats())["subscriptions"])["s/1"]["msgInReplay"]:
                pass  # REDELIVER has no answer
        assert subscriptions["s/1"]["msgInReplay"] == 1
        modes_shown = [subscriptions[name]["keySharedMode"] for name in ("s/1", "auto", "sticky")]
        assert modes_shown == [None, "AUTO_SPLIT", "STICKY"]
        whole = await stats("p/partitioned-stats")
        assert (whole["topicCreationTimeStamp"], whole["oldestBacklogMessageAgeSeconds"]) == (START_MS, 90)
        assert whole["lastPublishTimeStamp"] >= START_MS
