"""Figures of topics in Pulsar's names, with every field that a reader of its statistics needs.

What this broker has not (offloading, replication, transactions ...) is 0, false, empty, as it is in a Pulsar that uses
none of it. Rates are those of `broker/metrics/rates.py`, over the last full period. Sizes of backlogs are estimated by
the mean size of the main log's entries. A message that is not due counts in `msgBacklog` and in `msgDelayed`, and not
in `msgBacklogNoDelayed`, as in Pulsar.

Pulsar has no figures of a store and its time partitions. Only superusers see them, as they concern all tenants.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from ...delayed_store import DelayedStore
from ...operations.json_form import camel
from ...partitions.timespan import directory_name, parse_directory_name
from ...stats import PartitionStats, SubscriptionStats, TopicStats
from ...store.errors import InvalidArgument
from ...store.log.managed_ledger import LedgerInfo
from ...store.position import MessageId
from ...topic import Topic
from ..admin.brokers import Addresses
from ..admin.http_request import HttpError, Request
from ..admin.routing import TOPIC, Need, Route
from ..consume import feed
from ..consume.consumers import Consumers
from ..consume.pump import INDIVIDUAL, Consumer, Dispatched
from ..lookup.topic_address import shown_subscription
from ..metrics.rates import OutRate, Rates
from ..produce.producers import Producers
from ..produce.sends import Figures, OpenProducer
from ..protocol.commands import KeyValue, SubscriptionType
from .client_message import iso
from .topic_resource import TopicFinder

_EXTREMES: Mapping[str, Callable[[int, int], int]] = {
    "topicCreationTimeStamp": min,
    "lastPublishTimeStamp": max,
    "oldestBacklogMessageAgeSeconds": max,
}
"""Figures that are not summed over partitions."""


def _zeros(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), 0)


_NO_COMPACTION = _zeros(
    """lastCompactionRemovedEventCount lastCompactionSucceedTimestamp lastCompactionFailedTimestamp
    lastCompactionDurationTimeInMills"""
)
_NONE_OF_TOPIC = _zeros(
    """publishRateLimitedTimes earliestMsgPublishTimeInBacklogs offloadedStorageSize lastOffloadLedgerId
    lastOffloadSuccessTimeStamp lastOffloadFailureTimeStamp ongoingTxnCount abortedTxnCount committedTxnCount
    waitingPublishers nonContiguousDeletedMessagesRanges nonContiguousDeletedMessagesRangesSerializedSize"""
)
_NONE_OF_READER: Mapping[str, Any] = {
    **_zeros(
        """chunkedMessageRate msgBacklog backlogSize earliestMsgPublishTimeInBacklog msgBacklogNoDelayed msgDelayed
        msgInReplay msgRateExpired totalMsgExpired lastExpireTimestamp lastConsumedFlowTimestamp
        lastConsumedTimestamp lastAckedTimestamp lastMarkDeleteAdvancedTimestamp nonContiguousDeletedMessagesRanges
        nonContiguousDeletedMessagesRangesSerializedSize delayedMessageIndexSizeInBytes filterProcessedMsgCount
        filterAcceptedMsgCount filterRejectedMsgCount filterRescheduledMsgCount"""
    ),
    **dict.fromkeys(("isDurable", "isReplicated", "durable", "replicated"), False),
    **{name: {} for name in ("consumersAfterMarkDeletePosition", "bucketDelayedIndexStats", "subscriptionProperties")},
}
_NONE_OF_CONSUMER = _zeros(
    "chunkedMessageRate avgMessagesPerEntry lastAckedTimestamp lastConsumedTimestamp lastConsumedFlowTimestamp"
)
"""Fields that this broker has nothing for."""


@dataclass(eq=False)
class TopicFigures:
    """Puts them together. Of the event loop's thread.

    clock: the store's, in ms. addresses: of this broker, filled once it listens.
    """

    _producers: Producers
    _consumers: Consumers
    _rates: Rates
    _clock: Callable[[], int]
    _deduplicates: Callable[[str], bool]
    _addresses: Addresses

    def of_topic(self, stats: TopicStats, *, publishers: bool = True, consumers: bool = True) -> dict[str, Any]:
        """TopicStats; publishers, consumers: whether each is listed."""
        rates, name = self._rates, stats.name
        came, sent, rate_in = rates.received(name), rates.sent(name), rates.published(name)
        out = Dispatched()
        for dispatched in sent.values():
            out.add(dispatched)
        attached = self._consumers.of_topic(name)
        entry_bytes = stats.stored_bytes / stats.entries if stats.entries else 0.0
        shown: dict[str, Any] = {}
        for each in stats.subscriptions:
            figures = sent.get(each.name, Dispatched())
            shown[shown_subscription(each.name)] = self._of_subscription(
                stats, each, attached.pop(each.name, []), figures, entry_bytes, consumers
            )
        for reader, members in attached.items():
            shown[shown_subscription(reader)] = self._of_reader(name, reader, members, consumers)
        return {
            "msgRateIn": rate_in.messages,
            "msgThroughputIn": rate_in.bytes,
            **_out(rates.dispatched(name), out),
            "bytesInCounter": came.bytes,
            "msgInCounter": came.messages,
            "averageMsgSize": rate_in.bytes / rate_in.messages if rate_in.messages else 0.0,
            "msgChunkPublished": False,
            "storageSize": stats.stored_bytes,
            "backlogSize": max((each["backlogSize"] for each in shown.values()), default=0),
            **_NONE_OF_TOPIC,
            "publishers": [self._of_producer(each) for each in self._producers.of_topic(name)] if publishers else [],
            "subscriptions": shown,
            "replication": {},
            "deduplicationStatus": "Enabled" if self._deduplicates(name) else "Disabled",
            "delayedMessageIndexSizeInBytes": stats.index_bytes,
            "compaction": _NO_COMPACTION,
            "ownerBroker": self._addresses.broker_id,
            "topicCreationTimeStamp": stats.created_ms,
            "lastPublishTimeStamp": self._ms_of(came.last_s) if came.last_s else 0,
            **_oldest_of(stats),
        }

    def _of_producer(self, producer: OpenProducer) -> dict[str, Any]:
        rate = self._rates.of_producer(producer)
        return {
            "accessMode": producer.command.access_mode.name.title().replace("_", ""),
            "msgRateIn": rate.messages,
            "msgThroughputIn": rate.bytes,
            "averageMsgSize": rate.bytes / rate.messages if rate.messages else 0.0,
            "chunkedMessageRate": 0.0,
            "producerId": producer.producer_id,
            "supportsPartialProducer": False,
            "producerName": producer.name,
            "address": producer.connection.peer.address,
            "connectedSince": self._since(producer.opened_at),
            "clientVersion": producer.connection.peer.client_version,
            "metadata": _metadata(producer.command.metadata),
        }

    def _of_subscription(
        self,
        topic: TopicStats,
        stats: SubscriptionStats,
        members: Sequence[Consumer],
        sent: Dispatched,
        entry_bytes: float,
        consumers: bool,
    ) -> dict[str, Any]:
        delayed = topic.pending - topic.inline + stats.inline
        rate = self._rates.of_subscription(topic.name, stats.name)
        shown = self._subscription(members, rate, sent, consumers)
        individual = bool(members) and members[0].type in INDIVIDUAL
        return {
            **shown,
            "msgBacklog": stats.backlog + delayed,
            "backlogSize": round(entry_bytes * stats.backlog),
            "msgBacklogNoDelayed": stats.backlog,
            "msgDelayed": delayed,
            "unackedMessages": shown["unackedMessages"] if individual else stats.unacknowledged,
            "msgInReplay": stats.redelivering,
            "isDurable": True,
            "durable": True,
        }

    def _of_reader(self, topic: str, name: str, members: Sequence[Consumer], consumers: bool) -> dict[str, Any]:
        sent = Dispatched()
        for each in members:
            sent.add(each.figures)
        return self._subscription(members, self._rates.of_subscription(topic, name), sent, consumers)

    def _subscription(
        self, members: Sequence[Consumer], rate: OutRate, sent: Dispatched, consumers: bool
    ) -> dict[str, Any]:
        """Figures of a reader; a subscription has more."""
        active = next((each.name for each in members if each.active), None)
        return {
            **_NONE_OF_READER,
            **_out(rate, sent),
            "msgRateRedeliver": rate.redelivered,
            "messageAckRate": rate.acked,
            "blockedSubscriptionOnUnackedMsgs": any(each.blocked for each in members),
            "unackedMessages": sum(each.unacked for each in members),
            "type": members[0].type.name.title() if members else None,
            "activeConsumerName": active,
            "consumers": [self._of_consumer(each) for each in members] if consumers else [],
            "allowOutOfOrderDelivery": bool(members) and members[0].sharing.out_of_order,
            "keySharedMode": _key_shared_mode(members),
        }

    def _of_consumer(self, consumer: Consumer) -> dict[str, Any]:
        rate = self._rates.of_consumer(consumer)
        return {
            **_NONE_OF_CONSUMER,
            **_out(rate, consumer.figures),
            "msgRateRedeliver": rate.redelivered,
            "messageAckRate": rate.acked,
            "consumerName": consumer.name,
            "availablePermits": consumer.permits,
            "unackedMessages": consumer.unacked,
            "blockedConsumerOnUnackedMsgs": consumer.blocked,
            "keyHashRanges": [f"[{first}, {last}]" for first, last in consumer.sharing.ranges or ()],
            "address": consumer.peer.address,
            "connectedSince": self._since(consumer.opened_at),
            "clientVersion": consumer.peer.client_version,
            "metadata": _metadata(consumer.command.metadata),
        }

    def _since(self, opened_at: float) -> str:
        return iso(self._ms_of(opened_at))

    def _ms_of(self, at: float) -> int:
        return self._clock() - round((monotonic() - at) * 1_000)


def _oldest_of(stats: TopicStats) -> dict[str, Any]:
    """Figures of the message that has been due, and not acknowledged, for longest; -1: there is none."""
    backlogs = [each for each in stats.subscriptions if each.backlog]
    if not backlogs:
        return {"oldestBacklogMessageAgeSeconds": -1, "oldestBacklogMessageSubscriptionName": None}
    oldest = max(backlogs, key=lambda each: each.oldest_unacknowledged_ms)
    return {
        "oldestBacklogMessageAgeSeconds": oldest.oldest_unacknowledged_ms // 1_000,
        "oldestBacklogMessageSubscriptionName": shown_subscription(oldest.name),
    }


def _key_shared_mode(members: Sequence[Consumer]) -> str | None:
    if not members or members[0].type != SubscriptionType.KEY_SHARED:
        return None
    return "AUTO_SPLIT" if members[0].sharing.ranges is None else "STICKY"


def together(found: Mapping[str, Mapping[str, Any]], *, each: bool) -> dict[str, Any]:
    """PartitionedTopicStats: of the partitions' figures, by name, the sums; each: and themselves."""
    total: dict[str, Any] = {}
    for stats in found.values():
        _add(total, stats)
    oldest = max(found.values(), key=lambda stats: stats["oldestBacklogMessageAgeSeconds"], default={})
    total["oldestBacklogMessageSubscriptionName"] = oldest.get("oldestBacklogMessageSubscriptionName")
    total["metadata"] = {"partitions": len(found), "deleted": False}
    total["partitions"] = dict(found) if each else {}
    return total


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Sum numbers but for times, join lists, of subscriptions of one name too; the first of the rest."""
    for name, value in more.items():
        known = total.get(name)
        if isinstance(value, Mapping) and name != "compaction":
            mine = total.setdefault(name, {})
            if name == "subscriptions":
                for subscription, stats in value.items():
                    _add(mine.setdefault(subscription, {}), stats)
        elif isinstance(value, list):
            total[name] = [*(known or ()), *value]
        elif isinstance(value, bool):
            total[name] = bool(known) or value
        elif name in _EXTREMES and known is not None:
            total[name] = _EXTREMES[name](known, value)
        elif isinstance(value, int | float) and name != "averageMsgSize":
            total[name] = (known or 0) + value
        elif known is None:
            total[name] = value


def of_log(stats: TopicStats, ledgers: Sequence[LedgerInfo], last: MessageId) -> dict[str, Any]:
    """PersistentTopicInternalStats; last: the last entry that may be read."""
    newest = ledgers[-1]
    return {
        "entriesAddedCounter": stats.entries,
        "numberOfEntries": stats.entries,
        "totalSize": stats.stored_bytes,
        "currentLedgerEntries": newest.entries,
        "currentLedgerSize": newest.stored_bytes,
        "lastLedgerCreatedTimestamp": iso(newest.created_ms),
        "lastLedgerCreationFailureTimestamp": None,
        "waitingCursorsCount": 0,
        "pendingAddEntriesCount": 0,
        "lastConfirmedEntry": str(last),
        "state": "LedgerOpened",
        "ledgers": [_ledger(each.ledger_id, each.entries, each.stored_bytes) for each in ledgers],
        "cursors": {
            shown_subscription(each.name): {
                "markDeletePosition": str(each.mark_delete),
                "readPosition": str(each.mark_delete._replace(entry_id=each.mark_delete.entry_id + 1)),
                "waitingReadOp": False,
                "pendingReadOps": 0,
                "messagesConsumedCounter": 0,
                "cursorLedger": -1,
                "cursorLedgerLastEntry": -1,
                "individuallyDeletedMessages": "[]",
                "lastLedgerSwitchTimestamp": iso(newest.created_ms),
                "state": "Open",
                "active": bool(each.consumers),
                "numberOfEntriesSinceFirstNotAckedMessage": each.backlog,
                "totalNonContiguousDeletedMessagesRange": 0,
                "subscriptionHavePendingRead": False,
                "subscriptionHavePendingReplayRead": False,
                "properties": {},
            }
            for each in stats.subscriptions
        },
        "schemaLedgers": [],
        "compactedLedger": _ledger(-1, -1, -1),
    }


def info_of(stats: TopicStats, ledgers: Sequence[LedgerInfo]) -> dict[str, Any]:
    """ManagedLedgerInfo."""
    created, changed = iso(ledgers[0].created_ms), iso(ledgers[-1].created_ms)
    return {
        "version": 0,
        "creationDate": created,
        "modificationDate": changed,
        "ledgers": [
            {"ledgerId": each.ledger_id, "entries": each.entries, "size": each.stored_bytes, "isOffloaded": False}
            for each in ledgers
        ],
        "terminatedPosition": None,
        "cursors": {
            shown_subscription(each.name): {
                "version": 0,
                "creationDate": created,
                "modificationDate": changed,
                "cursorsLedgerId": -1,
                "markDelete": {"ledgerId": each.mark_delete.ledger_id, "entryId": each.mark_delete.entry_id},
                "individualDeletedMessages": [],
            }
            for each in stats.subscriptions
        },
    }


def _ledger(ledger_id: int, entries: int, size: int) -> dict[str, Any]:
    return {"ledgerId": ledger_id, "entries": entries, "size": size, "offloaded": False, "underReplicated": False}


def _out(rate: OutRate, sent: Dispatched) -> dict[str, Any]:
    return {
        "msgRateOut": rate.messages,
        "msgThroughputOut": rate.bytes,
        "bytesOutCounter": sent.bytes,
        "msgOutCounter": sent.messages,
    }


def _metadata(pairs: Iterable[KeyValue]) -> dict[str, str]:
    return {each.key: each.value for each in pairs}


@dataclass(eq=False)
class StatsResource:
    """For the event loop's thread alone."""

    _finder: TopicFinder
    _figures: TopicFigures

    def routes(self) -> list[Route]:
        asked = ("excludePublishers", "excludeConsumers")
        inside = f"{TOPIC}/partitioned-internalStats"
        return [
            Route("GET", f"{TOPIC}/stats", self.stats, "Figures of a topic", Need.EITHER, asked),
            Route("GET", f"{TOPIC}/partitioned-stats", self.partitioned, "Figures of all partitions together",
                  Need.EITHER, ("perPartition", *asked)),
            Route("GET", f"{TOPIC}/internalStats", self.internal, "Figures of a topic's main log", Need.EITHER),
            Route("GET", f"{TOPIC}/internal-info", self.info, "Ledgers and cursors of a main log", Need.EITHER),
            Route("GET", inside, self.partitioned_internal, "Those of each partition", Need.EITHER),
        ]  # fmt: skip

    async def stats(self, request: Request) -> Any:
        """TopicStats. Of a partitioned topic: 405, its partitions have some."""
        return await self._of(await self._finder.one(request), request)

    async def partitioned(self, request: Request) -> Any:
        """PartitionedTopicStats; of a plain topic: of one partition."""
        topics = await self._finder.every(request)
        found = {topic.name: await self._of(topic, request) for topic in topics}
        return together(found, each=request.flag("perPartition", True))

    async def internal(self, request: Request) -> Any:
        return await self._log_of(await self._finder.one(request))

    async def info(self, request: Request) -> Any:
        """ManagedLedgerInfo; of a partitioned topic PartitionedManagedLedgerInfo."""
        topics = await self._finder.every(request)
        found = await asyncio.to_thread(lambda: [info_of(topic.stats(), topic.ledgers()) for topic in topics])
        if topics[0].name == str(request.topic.name):
            return found[0]
        return {"version": 0, "partitions": {topic.name: each for topic, each in zip(topics, found, strict=True)}}

    async def partitioned_internal(self, request: Request) -> Any:
        """PartitionedTopicInternalStats."""
        topics = await self._finder.every(request)
        return {
            "metadata": {"partitions": len(topics), "deleted": False},
            "partitions": {topic.name: await self._log_of(topic) for topic in topics},
        }

    async def _of(self, topic: Topic, request: Request) -> dict[str, Any]:
        stats = await asyncio.to_thread(topic.stats)
        publishers, consumers = not request.flag("excludePublishers"), not request.flag("excludeConsumers")
        return self._figures.of_topic(stats, publishers=publishers, consumers=consumers)

    async def _log_of(self, topic: Topic) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            ledgers = topic.ledgers()
            last = feed.last_entry(topic, None).position
            return of_log(topic.stats(), ledgers, last if last.entry_id >= 0 else MessageId(ledgers[-1].ledger_id, -1))

        return await asyncio.to_thread(work)


_PARTITIONS = "/duelog/v1/partitions"


@dataclass(eq=False)
class StoreResource:
    """For the event loop's thread alone."""

    _store: DelayedStore
    _producers: Producers
    _consumers: Consumers
    _rates: Rates

    def routes(self) -> list[Route]:
        all_, here = Need.SUPERUSER, True
        return [
            Route("GET", "/duelog/v1/counters", self.counters, "Figures of store and broker", all_, here=here),
            Route("GET", _PARTITIONS, self.partitions, "Time partitions, by start", all_, here=here),
            Route("GET", f"{_PARTITIONS}/{{partition}}", self.partition, "One, and why it is there", all_, here=here),
        ]

    async def counters(self, request: Request) -> Any:
        found = await asyncio.to_thread(self._store.stats)
        store = {name: value for name, value in asdict(found).items() if name != "suspended"}
        received = Figures()
        for topic in self._producers.departed:
            received.add(self._rates.received(topic))
        return {
            "store": {camel(name): value for name, value in store.items()},
            "suspended": [str(each) for each in found.suspended],
            "producers": self._producers.count,
            "consumers": self._consumers.count,
            "messagesIn": received.messages,
            "bytesIn": received.bytes,
            "messagesRefused": received.refused,
            "messagesStoredBefore": received.duplicates,
        }

    async def partitions(self, request: Request) -> Any:
        """All of them, without why they are there."""
        return [_shown(each) for each in await asyncio.to_thread(self._store.partitions)]

    async def partition(self, request: Request) -> Any:
        """404: there is none, or no more."""
        try:
            start_ms = parse_directory_name(request.path["partition"])
        except InvalidArgument as error:
            raise HttpError(412, str(error)) from error

        def work() -> dict[str, Any]:
            found = next((each for each in self._store.partitions() if each.start_ms == start_ms), None)
            if found is None:
                raise HttpError(404, f"there is no time partition {request.path['partition']}")
            try:
                kept = self._store.kept_by(start_ms)
            except InvalidArgument as error:  # deleted just now
                raise HttpError(404, str(error)) from error
            return {**_shown(found), "keptBy": [each._asdict() for each in kept]}

        return await asyncio.to_thread(work)


def _shown(each: PartitionStats) -> dict[str, Any]:
    figures = {camel(name): value for name, value in asdict(each).items() if name != "holders"}
    return {"name": directory_name(each.start_ms), **figures, "references": each.holders}
