"""Plain rules over the records of clients of a broker that was killed again and again.

Every receipt is stored and delivered until it is acknowledged, nothing comes early, each message is stored once, one
that comes twice has a redelivery count or a reason (the broker was killed, the consumer went back), one whose
acknowledgement is old enough does not come again, and keys come in order.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FLUSH_S = 1.0
"""How long an acknowledgement may be on its way to the disk: what clients and broker group, and a busy machine."""

RECONNECT_S = 1.0
"""How long a client may hand out what it was sent over a connection that is gone, once it can connect again."""


class Outage(NamedTuple):
    """When the broker was killed, and when it listened again."""

    killed: float
    listening: float


class Got(NamedTuple):
    """One delivery."""

    at: float
    text: str
    redelivered: int
    place: str


class Record:
    """The events of one topic."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        self.receipts: set[str] = set()
        self.failed: list[str] = []
        self.got: list[Got] = []
        self.audited: list[Got] = []
        self.acked: dict[str, float] = {}
        """The first acknowledgement of each."""
        self.sought: list[tuple[float, float]] = []

    def unfinished(self) -> set[str]:
        """Messages that have a receipt and are not acknowledged."""
        return self.receipts - self.acked.keys()


def number_of(text: str) -> int:
    """A message's number among those of its producer."""
    return int(text.split(":")[1])


def read_records(files: Iterable[Path], audit: Path) -> dict[str, Record]:
    """Records by topic."""
    found: dict[str, Record] = defaultdict(Record)
    for file in (*files, audit):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        for kind, topic, text, at, *more in (json.loads(line) for line in lines if line.endswith("\n")):
            _add(found[topic], kind, text, at, more, audit=file == audit)
    for record in found.values():
        record.got.sort()
    return found


def _add(record: Record, kind: str, text: str, at: float, more: list[Any], *, audit: bool) -> None:
    if kind == "sent":
        record.sent[text] = at
    elif kind == "receipt":
        record.receipts.add(text)
    elif kind == "failed":
        record.failed.append(f"{text} {more[0]}")
    elif kind == "got":
        (record.audited if audit else record.got).append(Got(at, text, *more))
    elif kind == "acked":
        record.acked[text] = min(at, record.acked.get(text, at))
    elif kind == "through":  # of one producer, in order
        for number in range(number_of(text), -1, -1):
            each = f"0-{number % 7}:{number}:0"
            if each in record.acked:
                break
            record.acked[each] = at
    elif kind == "sought":
        record.sought.append((more[0], at))


def judge(records: dict[str, Record], outages: list[Outage]) -> list[str]:
    """Every rule that was broken, in a sentence each."""
    return [f"{topic}: {each}" for topic, record in records.items() for each in _judge(topic, record, outages)]


def _judge(topic: str, record: Record, outages: list[Outage]) -> Iterator[str]:
    yield from (f"send failed: {each}" for each in record.failed)
    yield from (f"{text} has a receipt and was never acknowledged" for text in record.unfinished())
    audited = {each.text for each in record.audited}
    yield from (f"{text} has a receipt and is not stored" for text in record.receipts - audited)
    places: dict[str, set[str]] = defaultdict(set)
    for got in (*record.got, *record.audited):
        places[got.text].add(got.place)
        if got.text not in record.sent:
            yield f"{got.text} was never sent"
        due_ms = int(got.text.rsplit(":", 1)[1])
        if got.at * 1_000 < due_ms:
            yield f"{got.text} came {due_ms - got.at * 1_000:.0f} ms early"
    yield from (f"{text} is stored twice: {sorted(found)}" for text, found in places.items() if len(found) > 1)
    yield from _order(record.audited, "the audit")
    if topic == "keys":
        yield from _order(record.got, "the consumers")
    if topic == "back":
        yield from _gaps(record)
    yield from _repeated(record, outages)


def _order(all_got: list[Got], who: str) -> Iterator[str]:
    """A key's messages come first in the order in which they were sent, but for delayed ones."""
    highest: dict[str, int] = {}
    seen: set[str] = set()
    for got in all_got:
        key, number, due = got.text.split(":")
        if due != "0" or got.text in seen:
            continue
        seen.add(got.text)
        if int(number) < highest.get(key, -1):
            yield f"{got.text} came to {who} after number {highest[key]} of its key"
        highest[key] = max(int(number), highest.get(key, -1))


def _gaps(record: Record) -> Iterator[str]:
    """An Exclusive subscription leaves none out, unless its consumer sought, which may be forward after going back."""
    before: Got | None = None
    for got in record.got:
        last = -1 if before is None else number_of(before.text)
        since = 0.0 if before is None else before.at
        if number_of(got.text) > last + 1 and not any(start < got.at and since < end for start, end in record.sought):
            yield f"number {number_of(got.text)} came after number {last}"
        before = got


def _repeated(record: Record, outages: list[Outage]) -> Iterator[str]:
    before: dict[str, Got] = {}
    for got in record.got:
        text = got.text
        sought = any(start < got.at and text in before and before[text].at < end for start, end in record.sought)
        if text in before and not got.redelivered and not sought:
            at = before[text].at
            if not any(at < each.listening + RECONNECT_S and got.at > each.killed for each in outages):
                yield f"{text} came again after {got.at - at:.3f} s, without a count or a reason"
        acked = record.acked.get(text)
        if acked is not None and acked < got.at and not record.sought:
            excuses = (each.killed - FLUSH_S < acked < each.listening + RECONNECT_S for each in outages)
            if not any(excuses) and got.at - acked > FLUSH_S:
                yield f"{text} came again {got.at - acked:.3f} s after it was acknowledged"
        before[text] = got
