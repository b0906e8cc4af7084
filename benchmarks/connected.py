"""connected: what one process does, by duelog.connect over the socket and over TCP, and what several do together.

The store is durable, and open in a process of its own. Payloads have 100 bytes, in batches 1 KiB. In the same run Redis
(fsync with every command) and PostgreSQL do the same, and huey, RQ and Dramatiq with that Redis run tasks.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duelog
from duelog import DelayedStore, Message, ReceivedMessage, Worker
from duelog.operations.wire import address_in

from .harness.compare import Subject, compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results
from .peers import make, subjects, task_queues

RATE = Measure("rate", "messages/s", show=short)
MEDIAN = Measure("median", "ms late", "less", lambda value: f"{value:,.2f}")
P99 = Measure("99th percentile", "ms late", "less", lambda value: f"{value:,.2f}")
KIB = Measure("memory", "KiB each", "less", lambda value: f"{value:,.1f}")
FACES = (Subject("inside", "in one process"), Subject("socket", "connected"), Subject("tcp", "over TCP"))
SOCKET = (FACES[1],)
PEERS = tuple(subjects("redis-always", "postgres"))

_BATCH = 1_000
_BODY = b"x" * 1_024
_PAYLOAD = b"x" * 100
_SPAWN = multiprocessing.get_context("spawn")


def serve(directory: str, port: Any, stop: Any) -> None:
    """Have the store open until told to stop; tell the port."""
    with DelayedStore.open(directory) as store:
        port.put(store.listen("localhost", 0, admit=lambda *_: lambda *_: None))
        stop.wait()


class Serving:
    """A process that has a store open."""

    def __init__(self, directory: Path) -> None:
        self.place = str(directory / "store")
        port, self._stop = _SPAWN.Queue(), _SPAWN.Event()
        self.process = _SPAWN.Process(target=serve, args=(self.place, port, self._stop))
        self.process.start()
        self.address = f"duelog://localhost:{port.get()}"

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.process.join()


def opened(subject: str, directory: Path, stack: ExitStack) -> DelayedStore:
    """The store by one of the faces."""
    if subject == "inside":
        return stack.enter_context(DelayedStore.open(directory / "store"))
    serving = stack.enter_context(Serving(directory))
    return stack.enter_context(duelog.connect(serving.place if subject == "socket" else serving.address))


def face(subject: str, work: str, n: int, directory: Path) -> dict[str, float]:
    """Do one kind of work by one of the faces, in one thread."""
    if subject in (peer.key for peer in PEERS):
        return beside(subject, work, n, directory)
    batch = [Message(_BODY) for _ in range(_BATCH)]
    week = [Message(_BODY, deliver_after=3_600 * (at % 168)) for at in range(_BATCH)]
    with ExitStack() as stack:
        store = opened(subject, directory, stack)
        topic = store.topic("t")
        consumer = stack.enter_context(topic.subscribe("s"))
        if work.startswith("receive"):
            for _ in range(0, n, _BATCH):
                topic.send_payloads([_PAYLOAD] * _BATCH)

        def receive(most: int) -> Callable[[], object]:
            return lambda: consumer.ack(consumer.receive(most))

        works: dict[str, tuple[int, Callable[[], object]]] = {
            "batches": (_BATCH, lambda: topic.send_batch(batch)),
            "batches over a week": (_BATCH, lambda: topic.send_batch(week)),
            "payloads": (_BATCH, lambda: topic.send_payloads([_BODY] * _BATCH)),
            "singles": (1, lambda: topic.send(_PAYLOAD)),
            "receive batches": (_BATCH, receive(_BATCH)),
            "receive singles": (1, receive(1)),
        }
        return rate(*works[work], n)


def rate(step: int, do: Callable[[], object], n: int) -> dict[str, float]:
    """Do something for `n` messages, `step` at a time."""
    do()
    started = time.perf_counter()
    for _ in range(step, n, step):
        do()
    return {RATE.name: (n - step) / (time.perf_counter() - started)}


def beside(subject: str, work: str, n: int, directory: Path) -> dict[str, float]:
    """Have a peer's server do the same."""
    now_ms = time.time_ns() // 1_000_000
    peer = make(subject)
    peer.open(directory, now_ms)
    try:
        at_once, week = [now_ms] * _BATCH, [now_ms + 3_600_000 * (at % 168) for at in range(_BATCH)]
        if work.startswith("receive"):
            for _ in range(0, n, _BATCH):
                peer.schedule_batch([_PAYLOAD] * _BATCH, at_once)
        works: dict[str, tuple[int, Callable[[], object]]] = {
            "batches": (_BATCH, lambda: peer.schedule_batch([_BODY] * _BATCH, at_once)),
            "batches over a week": (_BATCH, lambda: peer.schedule_batch([_BODY] * _BATCH, week)),
            "singles": (1, lambda: peer.schedule_one(_PAYLOAD, now_ms)),
            "receive batches": (_BATCH, lambda: peer.fetch_and_ack(now_ms, _BATCH)),
            "receive singles": (1, lambda: peer.fetch_and_ack(now_ms, 1)),
        }
        return rate(*works[work], n)
    finally:
        peer.close()


def client(place: str, work: str, n: int, ready: Any, go: Any) -> None:
    """One of several processes: four threads that send, or one that receives."""
    with duelog.connect(place, prefetch=500 if work == "receive singles" else 0) as store:
        topic = store.topic("t")

        def send() -> None:
            for _ in range(n // 4):
                topic.send(_PAYLOAD)

        def receive() -> None:
            most = 1 if work == "receive singles" else _BATCH
            with topic.subscribe("s", type="shared") as consumer:
                ready.put(1)
                go.wait()
                while batch := consumer.receive(most, timeout=0.5):
                    consumer.ack(batch)

        if work == "singles":
            ready.put(1)
            go.wait()
            threads = [threading.Thread(target=send) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            ready.put(1)
        else:
            receive()


def several(subject: str, work: str, n: int, directory: Path, processes: int = 4) -> dict[str, float]:
    """Do one kind of work by several processes, `n` messages together."""
    with Serving(directory) as serving:
        with duelog.connect(serving.place) as store:
            watched = store.topic("t")
            watched.subscribe("s", type="shared").close()
            if work != "singles":
                for _ in range(0, n, _BATCH):
                    watched.send_payloads([_PAYLOAD] * _BATCH)
            ready, go = _SPAWN.Queue(), _SPAWN.Event()
            arguments = (serving.place, work, n // processes, ready, go)
            clients = [_SPAWN.Process(target=client, args=arguments) for _ in range(processes)]
            for each in clients:
                each.start()
            for _ in clients:
                ready.get()
            go.set()
            started = time.perf_counter()
            if work == "singles":
                for _ in clients:
                    ready.get()
            else:
                while watched.subscription("s").stats().acknowledged < n:
                    time.sleep(0.005)
            took = time.perf_counter() - started
            for each in clients:
                each.join()
        return {RATE.name: n / took}


def lateness(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Wait for `n` messages, 2,000 of which are due in a second."""
    with ExitStack() as stack:
        store = opened(subject, directory, stack)
        topic = store.topic("t")
        consumer = stack.enter_context(topic.subscribe("s"))
        start_ms = time.time_ns() // 1_000_000 + 1_500
        topic.send_payloads([_PAYLOAD] * n, deliver_at=[start_ms + at // 2 for at in range(n)])
        late: list[float] = []
        while len(late) < n:
            batch = consumer.receive(100)
            now = time.time() * 1_000
            late += [now - message.due_ms for message in batch]
            consumer.ack(batch)
        late.sort()
        return {MEDIAN.name: late[n // 2], P99.name: late[n * 99 // 100]}


def idle(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Connect `n` times and do nothing: memory of the process that has the store open."""
    import socket  # noqa: PLC0415 - for this alone

    def resident_kib() -> int:
        status = Path(f"/proc/{serving.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    with Serving(directory) as serving, ExitStack() as stack:
        connections = []
        before = resident_kib()
        for _ in range(n):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            with address_in(Path(serving.place)) as address:
                connection.connect(address)
            connection.recv(1 << 16)
            connections.append(connection)
        return {KIB.name: (resident_kib() - before) / n}


def tasks(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Run `n` tasks that do nothing, in one process beside that of the store."""
    if subject in task_queues.KINDS:
        return {RATE.name: task_queues.KINDS[subject].run(n, directory)}
    with ExitStack() as stack:
        store = opened(subject, directory, stack)
        worker, done = Worker(store), threading.Event()
        left = iter(range(n - 1, -1, -1))

        @worker.task("t")
        def handle(message: ReceivedMessage) -> None:
            if next(left) == 0:
                done.set()

        store.topic("t").subscribe("worker", type="shared").close()
        for _ in range(0, n, _BATCH):
            store.topic("t").send_payloads([_PAYLOAD] * _BATCH)
        started = time.perf_counter()
        with worker:
            done.wait()
            return {RATE.name: n / (time.perf_counter() - started)}


_SHARES = {"batches": 60, "batches over a week": 60, "payloads": 60, "singles": 50}
"""Per cent of the rate in one process that a connected one is to reach."""


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "connected", __doc__, n=(40_000,), quick_n=(4_000,))
    results = Results("connected", options)
    function = f"benchmarks.{Path(__file__).stem}"
    for n in options.n:
        few = max(n // 20, 100)
        for work in ("batches", "batches over a week", "payloads", "singles", "receive batches", "receive singles"):
            count = few if work.endswith("singles") else n
            peers = () if work == "payloads" else PEERS
            compare(results, work, f"{function}:face", {"work": work, "n": count}, [RATE], (*FACES, *peers))
            inside = results.median(work, "inside", RATE.name)
            for subject in FACES[1:]:
                rate = results.median(work, subject.key, RATE.name)
                if work in _SHARES and inside and rate:
                    text = f"{work}, {subject.label}"
                    results.target(text, 100 * rate / inside, _SHARES[work], "more", "% of the rate in one process")
        for work, limit in (("singles", 12_000), ("receive batches", 80_000), ("receive singles", 20_000)):
            case = f"{work}, 4 processes{', prefetch' if work == 'receive singles' else ''}"
            count = few * 4 if work == "singles" else n
            compare(results, case, f"{function}:several", {"work": work, "n": count}, [RATE], SOCKET)
            results.target(case, results.median(case, "socket", RATE.name), limit, "more", "messages/s")
        compare(results, "lateness", f"{function}:lateness", {"n": few * 4}, [MEDIAN, P99], FACES)
        results.target("lateness, connected", results.median("lateness", "socket", MEDIAN.name), 1.5, "less", "ms")
        results.target("lateness, 99 %", results.median("lateness", "socket", P99.name), 8, "less", "ms")
        compare(results, "idle", f"{function}:idle", {"n": min(few, 1_000)}, [KIB], SOCKET)
        results.target("an idle connection", results.median("idle", "socket", KIB.name), 10, "less", "KiB")
        queues = task_queues.subjects()
        compare(results, "tasks", f"{function}:tasks", {"n": few * 4}, [RATE], (*FACES[:2], *queues))
        results.target("tasks, one process", results.median("tasks", "socket", RATE.name), 8_000, "more", "tasks/s")
    results.show()
    return 0
