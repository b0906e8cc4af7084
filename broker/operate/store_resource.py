"""The store as a whole: figures, time partitions and why they are still there, jobs.

Pulsar has none of these. Only superusers see them, as they concern all tenants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...delayed_store import DelayedStore
from ...operations.json_form import camel
from ...partitions.timespan import directory_name, parse_directory_name
from ...stats import PartitionStats
from ...store.errors import InvalidArgument
from ..admin.http_request import HttpError, Reply, Request, one_of, value_of
from ..admin.routing import Need, Route
from ..consume.consumers import Consumers
from ..metrics.rates import Rates
from ..produce.producers import Producers
from ..produce.sends import Figures
from ..protocol.loop_calls import Workers
from .jobs import Jobs

_PARTITIONS = "/duelog/v1/partitions"
_JOBS = "/duelog/v1/jobs"


@dataclass(eq=False)
class StoreResource:
    """For the event loop's thread alone."""

    _store: DelayedStore
    _producers: Producers
    _consumers: Consumers
    _rates: Rates
    _workers: Workers
    _jobs: Jobs

    def routes(self) -> list[Route]:
        all_, job = Need.SUPERUSER, f"{_JOBS}/{{job}}"
        here = True
        return [
            Route("GET", "/duelog/v1/counters", self.counters, "Figures of store and broker", all_, here=here),
            Route("GET", _PARTITIONS, self.partitions, "Time partitions, by start", all_, here=here),
            Route("GET", f"{_PARTITIONS}/{{partition}}", self.partition, "One, and why it is there", all_, here=here),
            Route("GET", _JOBS, self.jobs, "Jobs of this process, the oldest first", all_, here=here),
            Route("POST", _JOBS, self.start, "Start a check, an audit, a compaction or a list of snapshots", all_,
                  body="object", here=here),
            Route("GET", job, self.job, "A job and its result", all_, here=here),
            Route("DELETE", job, self.cancel, "Cancel a job", all_, here=here),
        ]  # fmt: skip

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

    # -- jobs ------------------------------------------------------------------------------------------

    async def jobs(self, request: Request) -> Any:
        """Without their results."""
        return [each.as_json() for each in self._jobs.all()]

    async def start(self, request: Request) -> Reply:
        """202 and the job: `kind`, and its options."""
        body = request.object()
        kind = one_of("kind", body.get("kind"), list(_KINDS))
        options = {name: value for name, value in body.items() if name != "kind"}
        job = self._jobs.start(kind, options, *_KINDS[kind](options))
        return Reply(json.dumps(job.as_json()).encode(), "application/json", 202)

    async def job(self, request: Request) -> Reply:
        """`result` is null until it is done."""
        return Reply(self._jobs.get(request.number("job", 0)).with_result(), "application/json")

    async def cancel(self, request: Request) -> None:
        """409: it has ended."""
        await self._jobs.cancel(self._jobs.get(request.number("job", 0)))


_Command = tuple[Sequence[str], Sequence[str]]
"""Words before the store's path, and flags behind it."""


def _check(options: Mapping[str, Any]) -> _Command:
    _only(options, "deep")
    return ["check"], ["--deep"] if value_of(options, "deep", bool, False) else []


def _audit(options: Mapping[str, Any]) -> _Command:
    _only(options, "headers")
    return ["audit"], ["--headers"] if value_of(options, "headers", bool, False) else []


def _compaction(options: Mapping[str, Any]) -> _Command:
    _only(options, "minDeadRatio", "dryRun")
    ratio = options.get("minDeadRatio")
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1):
        raise HttpError(412, f"minDeadRatio={ratio!r:.200}: expected 0 to 1")
    dry = ["--dry-run"] if value_of(options, "dryRun", bool, False) else []
    return ["compact"], [*([] if ratio is None else [f"--min-dead-ratio={float(ratio)}"]), *dry]


def _snapshots(options: Mapping[str, Any]) -> _Command:
    _only(options)
    return ["snapshot", "list"], []


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], _Command]] = {
    "check": _check,
    "audit": _audit,
    "compaction": _compaction,
    "snapshots": _snapshots,
}


def _only(options: Mapping[str, Any], *known: str) -> None:
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise HttpError(412, f"{unknown!r:.200}: options of this kind are {', '.join(known) or 'none'}")


def _shown(each: PartitionStats) -> dict[str, Any]:
    figures = {camel(name): value for name, value in asdict(each).items() if name != "holders"}
    return {"name": directory_name(each.start_ms), **figures, "references": each.holders}
