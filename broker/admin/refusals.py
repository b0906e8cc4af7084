"""What is answered to a request that no route takes: that there is no such address, or what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from .http_request import HttpError

_PULSAR = ("admin", "lookup", "metrics", "status.html")

_LIST = "GET /duelog/v1/openapi.json lists what is"


def instead_of(method: str, raw_path: str, methods: Sequence[str]) -> HttpError:
    """The answer; methods: those that the path has.

    405 for another method and for what Pulsar has and this broker has not, 404 for what neither has.
    """
    if methods:
        allowed = ", ".join(methods)
        return HttpError(405, f"{method} is not offered here, but {allowed}", {"Allow": allowed})
    first = raw_path.strip("/").partition("/")[0]
    if first in _PULSAR:
        return HttpError(405, f"{method} {raw_path[:400]} is not offered; {_LIST}", {"Allow": ""})
    return HttpError(404, f"{raw_path[:400]} is no address here; {_LIST}")
