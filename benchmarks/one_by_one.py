"""one_by_one: each durable call of one thread beside a send: a document, an acknowledgement, a transaction of four ...

A transaction has four operations: it acknowledges a message, cancels another, sends one, and stores a document.

Durable, 100 bytes, due in three days; what is received is due at once. A call waits for the one before.
"""

import time
from collections.abc import Callable
from pathlib import Path

from duelog import DelayedStore

from .harness.compare import Subject, compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

RATE = Measure("rate", "calls/s", show=short)
CALLS = (
    Subject("send", "send"),
    Subject("document", "documents.put"),
    Subject("ack", "ack, durable"),
    Subject("cancel", "cancel"),
    Subject("reschedule", "reschedule"),
    Subject("transaction", "transaction of four"),
)
_DELAY_S = 3 * 86_400
_PAYLOAD = b"x" * 100
_SHARES = {"document": 80, "ack": 80, "cancel": 80, "reschedule": 80, "transaction": 77}
"""Per cent of the rate of sends that each call is to reach."""


def call(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Make `n` calls, one by one."""
    with DelayedStore.open(directory / "store") as store:
        topic = store.topic("t")
        ids = list(topic.send_payloads([_PAYLOAD] * n, deliver_after=_DELAY_S))
        store.documents.put("warm", _PAYLOAD)
        with topic.subscribe("s") as consumer:
            topic.send_payloads([_PAYLOAD] * n, deliver_after=0)
            messages = consumer.receive(n) if subject in ("ack", "transaction") else []

            def transact(at: int) -> None:
                with store.transaction() as transaction:
                    transaction.ack(messages[at])
                    transaction.cancel("t", ids[at])
                    transaction.send("t", _PAYLOAD, deliver_after=_DELAY_S)
                    transaction.put_document("key", _PAYLOAD)

            calls: dict[str, Callable[[int], object]] = {
                "send": lambda _: topic.send(_PAYLOAD, deliver_after=_DELAY_S),
                "document": lambda at: store.documents.put(f"key-{at % 100}", _PAYLOAD),
                "ack": lambda at: consumer.ack(messages[at], durable=True),
                "cancel": lambda at: topic.cancel(ids[at]),
                "transaction": transact,
                "reschedule": lambda at: topic.reschedule(ids[at], deliver_after=2 * _DELAY_S),
            }
            work = calls[subject]
            started = time.perf_counter()
            for at in range(len(messages) or n):
                work(at)
            return {RATE.name: n / (time.perf_counter() - started)}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "one_by_one", __doc__, n=(2_000,), quick_n=(200,))
    results = Results("one_by_one", options)
    for n in options.n:
        case = f"{n:,} calls"
        compare(results, case, "benchmarks.one_by_one:call", {"n": n}, [RATE], CALLS)
        send = results.median(case, "send", RATE.name)
        for subject in CALLS[1:]:
            rate = results.median(case, subject.key, RATE.name)
            share = None if send is None or rate is None else 100 * rate / send
            results.target(f"{case}, {subject.label}", share, _SHARES[subject.key], "more", "% of the rate of sends")
    results.show()
    return 0
