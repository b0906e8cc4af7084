"""Statistics of topics: of one, of its main log, of all partitions of a partitioned one.

Source of paths: Apache Pulsar's admin REST, persistent topics.
"""

from __future__ import annotations

from typing import Any

from ...store.position import MessageId
from ...topic import Topic
from ..admin.http_request import Request
from ..admin.routing import Need, Route
from ..consume import feed
from ..protocol.loop_calls import Workers
from .topic_finder import TOPIC, TopicFinder
from .topic_stats import TopicFigures, info_of, of_log, together


class StatsResource:
    """Of the event loop's thread."""

    def __init__(self, finder: TopicFinder, figures: TopicFigures, workers: Workers) -> None:
        self._finder = finder
        self._figures = figures
        self._workers = workers

    def routes(self) -> list[Route]:
        """What is offered."""
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
        """PersistentTopicInternalStats."""
        return await self._log_of(await self._finder.one(request))

    async def info(self, request: Request) -> Any:
        """ManagedLedgerInfo; of a partitioned topic PartitionedManagedLedgerInfo."""
        topics = await self._finder.every(request)
        found = await self._workers(lambda: [info_of(topic.stats(), topic.ledgers()) for topic in topics])
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
        stats = await self._workers(topic.stats)
        publishers, consumers = not request.flag("excludePublishers"), not request.flag("excludeConsumers")
        return self._figures.of_topic(stats, publishers=publishers, consumers=consumers)

    async def _log_of(self, topic: Topic) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            ledgers = topic.ledgers()
            last = feed.last_entry(topic, None).position
            return of_log(topic.stats(), ledgers, last if last.entry_id >= 0 else MessageId(ledgers[-1].ledger_id, -1))

        return await self._workers(work)
