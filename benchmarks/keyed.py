"""keyed: sends under deduplication keys against plain ones, and finding, replacing and cancelling by key.

Durable, 100 bytes, due in three days, one by one from one thread and from eight. A plain send of a message that is
found and cancelled by its id stands beside what is done by key. `n` messages with keys are pending then. A million keys
of messages due within one day, and over 365 days: found, replaced in batches of 1,000, and cancelled, at random.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from duelog import DelayedStore, Message, StoreConfig, Topic

from .harness.compare import Subject, compare
from .harness.machine import disk_bytes
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

RATE = Measure("rate", "calls/s", show=short)
PER_CALL = Measure("a call", "ms", "less")
DISK = Measure("disk", "bytes a message", "less", lambda value: f"{value:,.0f}")
"""Once the write-ahead log is applied, less those of the store before it. Nothing is stored for a known key or number,
whose bytes are those of one message, or of `n`, over `n`."""
SENDS = (
    Subject("plain", "send"),
    Subject("key", "send, with a key"),
    Subject("known", "send, with a key that holds"),
    Subject("number", "numbered producer"),
    Subject("known_number", "numbered producer, a known number"),
)
LOOKS = (
    Subject("cancel", "cancel, by id"),
    Subject("cancel_key", "cancel_key"),
    Subject("find", "find"),
    Subject("replace", "send, replace=True"),
)
DAYS = (Subject("1", "over one day"), Subject("365", "over 365 days"))
FIND = Measure("find", "ms a call", "less")
UPSERT = Measure("upsert", "messages/s", show=short)
CANCEL = Measure("cancel_key", "ms a call", "less")
_KEYS = 1_000_000
_UPSERTS = 20
"""Batches that replace."""
_DELAY_S = 3 * 86_400
_PAYLOAD = b"x" * 100
_CALLS = 1_000
_BATCH = 1_000


def send(subject: str, n: int, threads: int, directory: Path) -> dict[str, float]:
    """Send `n` messages, from so many threads."""
    with DelayedStore.open(directory / "store") as store:
        topic = store.topic("t")
        topic.send(_PAYLOAD, deliver_after=_DELAY_S)
        producer = topic.producer("p")
        if subject == "known":
            topic.send(_PAYLOAD, deliver_after=_DELAY_S, dedup_key="k")
        if subject == "known_number":
            producer.send_batch([Message(_PAYLOAD, deliver_after=_DELAY_S)] * n)
        each: dict[str, Callable[[int], object]] = {
            "plain": lambda _: topic.send(_PAYLOAD, deliver_after=_DELAY_S),
            "key": lambda at: topic.send(_PAYLOAD, deliver_after=_DELAY_S, dedup_key=f"order-{at}"),
            "known": lambda _: topic.send(_PAYLOAD, deliver_after=_DELAY_S, dedup_key="k"),
            "number": lambda at: producer.send(Message(_PAYLOAD, deliver_after=_DELAY_S), sequence_id=at),
            "known_number": lambda at: producer.send(Message(_PAYLOAD, deliver_after=_DELAY_S), sequence_id=at),
        }
        call = each[subject]

        def work(first: int) -> None:
            for at in range(first, n, threads):
                call(at)

        before = disk_bytes(directory, logs=False)
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rate = n / (time.perf_counter() - started)
    return {RATE.name: rate, DISK.name: (disk_bytes(directory, logs=False) - before) / n}


def look(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Do something by key, or by id, where `n` messages with keys are pending, sent in batches."""
    with DelayedStore.open(directory / "store", StoreConfig(durability="none")) as store:
        topic = store.topic("t")
        for first in range(0, n, _BATCH):
            numbers = range(first, min(first + _BATCH, n))
            topic.send_batch([Message(_PAYLOAD, deliver_after=_DELAY_S, dedup_key=f"order-{at}") for at in numbers])
    with DelayedStore.open(directory / "store") as store:
        return {PER_CALL.name: timed(subject, store.topic("t"), n)}


def timed(subject: str, topic: Topic, n: int) -> float:
    """Milliseconds a call of `_CALLS`, on keys that lie apart."""
    keys = [f"order-{at}" for at in range(0, n, max(n // _CALLS, 1))][:_CALLS]
    ids: list[Any] = [found.message_id for key in keys if (found := topic.find(key)) is not None]
    each: dict[str, Callable[[int], object]] = {
        "cancel": lambda at: topic.cancel(ids[at]),
        "cancel_key": lambda at: topic.cancel_key(keys[at]),
        "find": lambda at: topic.find(keys[at]),
        "replace": lambda at: topic.send(_PAYLOAD, deliver_after=_DELAY_S, dedup_key=keys[at], replace=True),
    }
    call = each[subject]
    started = time.perf_counter()
    for at in range(len(keys)):
        call(at)
    return 1_000 * (time.perf_counter() - started) / len(keys)


def over_days(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Find, replace and cancel where `n` messages with keys are pending, due over as many days as the subject says."""
    chance, days = random.Random(n), int(subject)

    def messages(numbers: Iterable[int]) -> list[Message]:
        within_s = days * 86_400
        return [
            Message(
                _PAYLOAD, deliver_after=_DELAY_S + chance.randrange(within_s), dedup_key=f"order-{at}", replace=True
            )
            for at in numbers
        ]

    with DelayedStore.open(directory / "store", StoreConfig(durability="none")) as store:
        for first in range(0, n, _BATCH):
            store.topic("t").send_batch(messages(range(first, min(first + _BATCH, n))))
    with DelayedStore.open(directory / "store") as store:
        topic, took = store.topic("t"), dict[str, float]()
        keys = [f"order-{at}" for at in chance.sample(range(n), 2 * _CALLS)]
        started = time.perf_counter()
        for key in keys[:_CALLS]:
            topic.find(key)
        took[FIND.name] = 1_000 * (time.perf_counter() - started) / _CALLS
        batches = [messages(chance.sample(range(n), min(_BATCH, n))) for _ in range(_UPSERTS)]
        started = time.perf_counter()
        for batch in batches:
            topic.send_batch(batch)
        took[UPSERT.name] = _UPSERTS * len(batches[0]) / (time.perf_counter() - started)
        started = time.perf_counter()
        for key in keys[_CALLS:]:
            topic.cancel_key(key)
        took[CANCEL.name] = 1_000 * (time.perf_counter() - started) / _CALLS
        return took


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "keyed", __doc__, n=(20_000,), quick_n=(1_000,))
    results = Results("keyed", options)
    for n in options.n:
        for threads in (1, 8):
            case = f"{n:,} sends, {threads} threads"
            compare(results, case, "benchmarks.keyed:send", {"n": n, "threads": threads}, [RATE, DISK], SENDS)
            plain, key = (results.median(case, each, RATE.name) for each in ("plain", "key"))
            share = None if plain is None or key is None else 100 * key / plain
            results.target(f"{case}, with keys", share, 50, "more", "% of the rate without")
        case = f"{n:,} pending"
        compare(results, case, "benchmarks.keyed:look", {"n": n}, [PER_CALL], LOOKS)
        results.target(f"{case}, cancel_key", results.median(case, "cancel_key", PER_CALL.name), 1, "less", "ms")
    n = _KEYS // 100 if options.quick else _KEYS
    case = f"{n:,} keys, by how many days their messages are due over"
    compare(results, case, "benchmarks.keyed:over_days", {"n": n}, [FIND, UPSERT, CANCEL], DAYS)
    for measure in (FIND, UPSERT, CANCEL):
        one, many = (results.find(case, subject.key, measure.name) for subject in DAYS)
        if one is not None and many is not None:
            share = results.ratio(one, many) if measure is UPSERT else results.ratio(many, one)
            results.target(f"{case}, {measure.name}", share, 2, "less", "x of one day")
    results.show()
    return 0
