"""Operations of a transaction in JSON lines, as people write them, read for the operation `transaction`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument
from ..values import time_ms
from .import_lines import payload_of, time_of

_DURATIONS = ("deliver_after", "dedup_for", "ttl")


def operations_in(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Read the operation of each line that is not empty. Raises InvalidArgument, with the line's number."""
    found = []
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            found.append(_operation(line))
        except InvalidArgument as error:
            raise InvalidArgument(f"line {number}: {error.field}", error.value, error.reason) from None
    return found


def _operation(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("line", line.strip(), f"no JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("operation"), str):
        raise InvalidArgument("line", fields, 'expected a JSON object with "operation"')
    content = {"send": "payload", "put_document": "value"}.get(fields["operation"])
    operation = {name: value for name, value in fields.items() if name not in (content, f"{content}_base64")}
    if content is not None:
        operation[content] = base64.b64encode(payload_of(fields, content)).decode()
    if "deliver_at" in fields:
        operation["deliver_at"] = time_of(fields, "deliver_at", time_ms)
    for name in _DURATIONS:
        if name in fields:
            operation[name] = time_of(fields, name, duration_seconds)
    return operation
