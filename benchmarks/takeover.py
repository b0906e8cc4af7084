"""takeover: how soon another machine serves once the leader's process is killed, and how far a standby is behind.

Two machines of `duelog serve --standby`, processes beside each other, with a copy on a server of SeaweedFS where that
is installed, else in a directory. "served again" is from SIGKILL, right after a replicated send was told, until the
next one is, by the other machine's address; the first one follows then, and so on, `-n` times. "lag" is of a leader
that sends 100 messages of 1 KiB a second, by itself durable: from the return of each until a standby has applied it.
"""

import threading
import time
import uuid
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import duelog
from duelog import DelayedStore, StoreConfig
from duelog.errors import DuelogError
from duelog.replica.bucket import Bucket
from duelog.replica.following import Standby

from .harness.compare import compare
from .harness.copies import copy_server
from .harness.options import parse
from .harness.results import Measure, Results

MEDIAN = Measure("median", "s", "less")
P99 = Measure("99 of 100", "s", "less")
_LEAST_S = {2_000: 4, 10_000: 15}
"""Within how long another machine is to serve, by `lease_ms`."""
_LAG_S = 2
_DAY_S = 86_400
_A_TAKEOVER = 100
"""Messages whose lag is measured, for each takeover that is."""
_SETTINGS = 'store = {{ lease_ms = {}, durability = "replicated" }}\n'


def served_again(subject: str, lease_ms: int, n: int, on_server: bool, directory: Path) -> dict[str, float]:
    """Seconds that `n` takeovers took."""
    from tests.duelog.replica.machines import Machines  # noqa: PLC0415 - where the tests' needs are installed
    from tests.ports import free_port  # noqa: PLC0415 - likewise

    url, took = _url(directory, on_server), list[float]()
    (directory / "settings.toml").write_text(_SETTINGS.format(lease_ms))
    with DelayedStore.open(directory / "one", StoreConfig(replica=url)) as store:
        store.save_manifest()
    machines, ports = Machines(directory, url), [free_port() for _ in range(4)]
    try:
        for name in ("one", "two"):
            machines.add(name, "127.0.0.1", ports.pop(), ports.pop())
            machines.wait(lambda: bool(machines.leader))
        for _ in range(n):
            machines.wait(machines.is_settled)
            leader = machines.leader
            (other,) = machines.follows
            _send(machines.addresses[leader][1])
            killed = time.monotonic()
            machines.processes[leader].kill()
            _send(machines.addresses[other][1])
            took.append(time.monotonic() - killed)
            machines.wait(lambda: not machines.follows)
            machines.end(leader)
            machines.begin(leader)
    finally:
        machines.close()
    return _figures(took)


def _send(place: str) -> None:
    """Send a message until it is told that it is stored."""
    while True:
        try:
            with duelog.connect(place, reconnect=0) as store:
                store.topic("t").send(b"x", deliver_after=_DAY_S)
            return
        except (DuelogError, TimeoutError):
            time.sleep(0.02)


def lag(subject: str, lease_ms: int, n: int, on_server: bool, directory: Path) -> dict[str, float]:
    """Seconds until a standby has applied each of `n` messages."""
    url, took = _url(directory, on_server), list[float]()
    sent = deque[tuple[int, float]]()
    with DelayedStore.open(directory / "one", StoreConfig(replica=url, lease_ms=lease_ms)) as store:
        assert store._engine.shipping is not None
        log, topic, payload = store._engine.shipping._the_source(), store.topic("t"), bytes(1_024)
        store.save_manifest()

        def send() -> None:
            for number in range(n):
                topic.send(payload, deliver_after=_DAY_S * (1 + number % 5))
                sent.append((log.next_place() - 1, time.monotonic()))
                time.sleep(0.01)

        standby = Standby(directory / "two", Bucket(url), lease_ms=lease_ms)
        standby.begin()
        standby.step()
        sender = threading.Thread(target=send)
        sender.start()
        while len(took) < n:
            time.sleep(min(max(lease_ms / 20_000, 0.05), 0.5))  # as a machine that follows does
            standby.step()
            assert standby._log is not None
            while sent and sent[0][0] <= standby._log.place:
                took.append(time.monotonic() - sent.popleft()[1])
        sender.join()
    return _figures(took)


def _url(directory: Path, on_server: bool) -> str:
    return f"s3://backups/{uuid.uuid4().hex}" if on_server else (directory / "copy").as_uri()


def _figures(took: list[float]) -> dict[str, float]:
    return {MEDIAN.name: float(np.median(took)), P99.name: float(np.percentile(took, 99, method="higher"))}


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "takeover", __doc__, n=(20,), quick_n=(2,))
    results = Results("takeover", options)
    with ExitStack() as stack:
        on_server = stack.enter_context(copy_server(Path(stack.enter_context(TemporaryDirectory()))))
        results.notes.append(f"the copy is {'on a server of SeaweedFS' if on_server else 'in a directory'}")
        for lease_ms, least_s in _LEAST_S.items():
            arguments = {"lease_ms": lease_ms, "on_server": on_server}
            for function, n, limit in ((served_again, 1, least_s), (lag, _A_TAKEOVER, _LAG_S)):
                case = f"{function.__name__.replace('_', ' ')}, lease_ms {lease_ms:,}"
                given = {**arguments, "n": n * options.n[0]}
                compare(results, case, f"benchmarks.takeover:{function.__name__}", given, (MEDIAN, P99), runs=1)
                results.target(f"{case}, 99 of 100", results.median(case, "duelog", P99.name), limit, "less", "s")
    results.show()
    return 0
