"""lateness: from the due time to the hands of a waiting consumer; 2,000 messages at random instants of 10 seconds.

duelog's consumer waits and is woken; peers that cannot wait are polled every 10 ms, beanstalkd and huey wait in their
own way. Nothing may come early. A message is seen when the call that fetched and acknowledged it returns. They are
scheduled in one batch before; or, with duelog, singly by another thread, each a second before it is due.
"""

import statistics
import threading
import time
from pathlib import Path

import numpy as np

from .harness.compare import compare
from .harness.load import SEED
from .harness.options import parse
from .harness.plots import bars
from .harness.results import Measure, Results
from .peers import DURABLE_PEERS, make, subjects
from .peers.duelog_peer import DuelogPeer
from .peers.peer import Peer

MEDIAN = Measure("median", "ms late", "less", lambda value: f"{value:,.2f}")
P99 = Measure("99th percentile", "ms late", "less", lambda value: f"{value:,.2f}")
MOST = Measure("longest", "ms late", "less", lambda value: f"{value:,.1f}")
EARLIEST = Measure("earliest", "ms late")

_LEAD_MS = 1_500
"""Time to get all messages scheduled before the first is due."""

_SINGLY_MS = 1_000
"""So long before it is due a message is sent that is sent singly."""


def measure(subject: str, n: int, seconds: int, directory: Path, singly: bool = False) -> dict[str, float]:
    """Schedule `n` messages over the next seconds and wait for them."""
    peer: Peer = DuelogPeer(real_time=True, durable_acks=False) if subject == "duelog" else make(subject)
    now_ms = time.time_ns() // 1_000_000
    peer.open(directory, now_ms)
    try:
        now_ms = time.time_ns() // 1_000_000
        source = np.random.default_rng(SEED)
        dues = (now_ms + _LEAD_MS + source.integers(0, seconds * 1_000, n)).tolist()
        payloads = [due_ms.to_bytes(8, "big") + bytes(1_016) for due_ms in dues]
        sender = threading.Thread(target=_send_singly, args=(peer, sorted(zip(dues, payloads, strict=True))))
        if singly:
            sender.start()
        else:
            peer.schedule_batch(payloads, dues)
        late: list[float] = []
        limit = time.monotonic() + seconds + 60
        while len(late) < n:
            found = peer.fetch_and_ack(0, 100, wait_seconds=1.0)
            now = time.time() * 1_000
            late += [now - int.from_bytes(payload[:8], "big") for payload in found]
            if time.monotonic() > limit:
                raise RuntimeError(f"{n - len(late)} of {n} messages have not come")
        if singly:
            sender.join()
    finally:
        peer.close()
    return {
        MEDIAN.name: statistics.median(late),
        P99.name: float(np.percentile(late, 99)),
        MOST.name: max(late),
        EARLIEST.name: min(late),
    }


def _send_singly(peer: Peer, messages: list[tuple[int, bytes]]) -> None:
    for due_ms, payload in messages:
        time.sleep(max(0.0, (due_ms - _SINGLY_MS) / 1_000 - time.time()))
        peer.schedule_one(payload, due_ms)


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "lateness", __doc__, n=(2_000,), quick_n=(200,))
    results = Results("lateness", options)
    for n in options.n:
        seconds = 2 if options.quick else 10
        case = f"{n:,} messages in {seconds} s"
        chosen = subjects("duelog", *DURABLE_PEERS)
        arguments = {"n": n, "seconds": seconds}
        compare(results, case, "benchmarks.lateness:measure", arguments, [MEDIAN, P99, MOST, EARLIEST], chosen)
        single = f"{case}, sent singly a second before"
        arguments["singly"] = True
        compare(results, single, "benchmarks.lateness:measure", arguments, [MEDIAN, P99, MOST, EARLIEST])
        for each in (case, single):
            results.target(f"{each}: median", results.median(each, "duelog", MEDIAN.name), 1.0, "less", "ms")
            results.target(f"{each}: 99th percentile", results.median(each, "duelog", P99.name), 5.0, "less", "ms")
            series = results.find(each, "duelog", EARLIEST.name)
            if series is not None:
                results.target(f"{each}: never early", min(series.values), 0.0, "more", "ms")
    results.show()
    bars(results, MEDIAN.name, "Lateness, median", name="lateness", log=True)
    bars(results, P99.name, "Lateness, 99th percentile", name="lateness-p99", log=True)
    return 0
