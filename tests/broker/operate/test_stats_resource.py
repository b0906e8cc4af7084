"""Statistics over REST: Pulsar's names, and figures that agree with what was done."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from duelog import ManualClock
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import HashRange, KeySharedMeta, KeySharedMode, KeyValue
from tests.broker.admin.rest import Rest, administered
from tests.broker.server.raw_client import RawClient, blob_of
from tests.conftest import START_MS

TOPICS = "/admin/v2/persistent/public/default"


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
        assert (publisher["producerName"], publisher["producerId"], publisher["metadata"]) == (
            "me",
            4,
            {"app": "x"},
        )
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
) -> None:
    """Times are epoch ms by the store's clock, 0 where nothing was published; the age is -1 without a backlog."""
    clock = ManualClock(START_MS)

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
        async with asyncio.timeout(20):
            while not (subscriptions := (await stats())["subscriptions"])["s/1"]["msgInReplay"]:
                pass  # REDELIVER has no answer
        assert subscriptions["s/1"]["msgInReplay"] == 1
        modes_shown = [subscriptions[name]["keySharedMode"] for name in ("s/1", "auto", "sticky")]
        assert modes_shown == [None, "AUTO_SPLIT", "STICKY"]
        whole = await stats("p/partitioned-stats")
        assert (whole["topicCreationTimeStamp"], whole["oldestBacklogMessageAgeSeconds"]) == (START_MS, 90)
        assert whole["lastPublishTimeStamp"] >= START_MS
