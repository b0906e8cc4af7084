"""The store as a whole: figures, time partitions and why they are still there.

Pulsar has none of these. Only superusers see them, as they concern all tenants.
"""

from dataclasses import asdict, dataclass
from typing import Any

from ...delayed_store import DelayedStore
from ...operations.json_form import camel
from ...partitions.timespan import directory_name, parse_directory_name
from ...stats import PartitionStats
from ...store.errors import InvalidArgument
from ..admin.http_request import HttpError, Request
from ..admin.routing import Need, Route
from ..consume.consumers import Consumers
from ..metrics.rates import Rates
from ..produce.producers import Producers
from ..produce.sends import Figures
from ..protocol.loop_calls import Workers

_PARTITIONS = "/duelog/v1/partitions"


@dataclass(eq=False)
class StoreResource:
    """For the event loop's thread alone."""

    _store: DelayedStore
    _producers: Producers
    _consumers: Consumers
    _rates: Rates
    _workers: Workers

    def routes(self) -> list[Route]:
        all_, here = Need.SUPERUSER, True
        return [
            Route("GET", "/duelog/v1/counters", self.counters, "Figures of store and broker", all_, here=here),
            Route("GET", _PARTITIONS, self.partitions, "Time partitions, by start", all_, here=here),
            Route("GET", f"{_PARTITIONS}/{{partition}}", self.partition, "One, and why it is there", all_, here=here),
        ]

    async def counters(self, request: Request) -> Any:
        found = await self._workers(self._store.stats)
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
        return [_shown(each) for each in await self._workers(self._store.partitions)]

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

        return await self._workers(work)


def _shown(each: PartitionStats) -> dict[str, Any]:
    figures = {camel(name): value for name, value in asdict(each).items() if name != "holders"}
    return {"name": directory_name(each.start_ms), **figures, "references": each.holders}
