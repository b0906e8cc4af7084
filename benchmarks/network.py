"""network: messages per second through `duelog serve`, by Pulsar clients in four processes of their own.

Of 1 KiB, due at once, durable: produced by all of them, consumed and acknowledged by all of them, then both at once,
half of them producing and half consuming. `pulsar-client` sends one message an entry, or joins them to batches. Redis
(a sorted set) and beanstalkd get as many processes, each with pipelines of 1,000. Beside the rates stands the processor
time that the server takes for a message, which other work on the machine changes less. `pulsar-client` takes some 30 us
of processor time to send a message, several times what the broker takes: so one producer's batches of 120 are sent as
frames that were made before, too, eight unanswered.
"""

import argparse
import struct
import time
from contextlib import closing
from pathlib import Path
from socket import create_connection
from typing import Any

import crc32c

from duelog.broker.protocol import commands
from duelog.broker.protocol.entry import MessageMetadata
from duelog.broker.protocol.fields import ENCODERS, Command
from duelog.broker.protocol.frames import MAGIC, FrameCutter, head

from .harness import load
from .harness.compare import Subject, compare
from .harness.machine import cpu_seconds
from .harness.options import parse
from .harness.plots import bars, short
from .harness.results import Measure, Results
from .peers import KINDS, at_most, make
from .peers.client_process import ClientProcess, run_clients

PHASES = {"produce": 40_000.0, "consume and acknowledge": 80_000.0, "both": 25_000.0}
"""Targets in messages a second."""

RATES = {phase: Measure(phase, "messages/s", show=short) for phase in PHASES}
PROCESSOR = {
    phase: Measure(f"{phase}, the server's processor", "us a message", "less", lambda value: f"{value:,.1f}")
    for phase in PHASES
}
FRAMES = Measure("produce, one producer's frames", "messages/s", show=short)
FRAMES_PROCESSOR = Measure(
    f"{FRAMES.name}, the server's processor", "us a message", "less", lambda value: f"{value:,.1f}"
)
SUBJECTS = {"duelog": "duelog:serve", "duelog:batched": "duelog:serve-batched"}
"""Keys of peers by subject, where they differ."""


def measure(subject: str, n: int, processes: int, directory: Path) -> dict[str, float]:
    """All three phases on one server."""
    key = SUBJECTS.get(subject, subject)
    n = at_most(key, n) // processes * processes
    peer = make(key)
    peer.open(directory, 0)
    half = max(processes // 2, 1)
    plans = {"produce": (processes, 0), "consume and acknowledge": (0, processes), "both": (half, half)}
    answer: dict[str, float] = {}
    try:
        for phase, (producers, consumers) in plans.items():
            clients = [ClientProcess(key, peer.port, 100 + number, "consume") for number in range(consumers)]
            clients += [
                ClientProcess(key, peer.port, number, "produce", n=n // producers) for number in range(producers)
            ]
            servers = peer.processes()
            used_s = _used(servers)
            done = run_clients(clients)
            used_s = _used(servers) - used_s
            seconds = max(each["ended"] for each in done) - min(each["began"] for each in done)
            received = sum(each["n"] for each in done[:consumers])
            sent = sum(each["n"] for each in done[consumers:])
            if consumers and received != (sent or n):
                raise RuntimeError(f"{received} of {sent or n} messages were received")
            answer[RATES[phase].name] = (received or sent) / seconds
            answer[PROCESSOR[phase].name] = 1e6 * used_s / (received or sent)
    finally:
        peer.close()
    return answer


_BATCH = 120
"""Messages: as many of 1 KiB as a batch of a client has."""
_UNANSWERED = 8


def measure_frames(subject: str, n: int, directory: Path) -> dict[str, float]:
    """Send batches that were made before, over one connection, and wait for their answers."""
    peer = make("duelog:serve-batched")
    peer.open(directory, 0)
    frames = [_frame(number) for number in range(n // _BATCH)]
    try:
        with closing(create_connection(("127.0.0.1", peer.port))) as connection:
            cutter = FrameCutter(1 << 20)

            def hear() -> Command:
                while (frame := cutter.cut()) is None:
                    cutter.feed(connection.recv(1 << 16))
                return commands.decode(frame.command)

            for said in (commands.Connect("bench", protocol_version=21), commands.Producer("frames", 1, 1)):
                connection.sendall(head(said))
                hear()
            used_s, started = _used(peer.processes()), time.perf_counter()
            answers = 0
            for number, frame in enumerate(frames):
                connection.sendall(frame)
                if number >= _UNANSWERED:
                    answers += isinstance(hear(), commands.SendReceipt)
            answers += sum(isinstance(hear(), commands.SendReceipt) for _ in frames[:_UNANSWERED])
            took_s, used_s = time.perf_counter() - started, _used(peer.processes()) - used_s
            if answers != len(frames):
                raise RuntimeError(f"{answers} of {len(frames)} batches were stored")
    finally:
        peer.close()
    return {FRAMES.name: len(frames) * _BATCH / took_s, FRAMES_PROCESSOR.name: 1e6 * used_s / (len(frames) * _BATCH)}


def _frame(number: int) -> bytes:
    """A SEND of one batch."""
    single = b"\x18" + bytes([load.PAYLOAD_BYTES & 0x7F | 0x80, load.PAYLOAD_BYTES >> 7])  # its size, a varint
    message = struct.pack(">I", len(single)) + single + load.payloads(1)[0]
    metadata = ENCODERS[MessageMetadata](MessageMetadata("p", number * _BATCH, 1_000, num_messages_in_batch=_BATCH))
    covered = struct.pack(">I", len(metadata)) + metadata + message * _BATCH
    blob = MAGIC + struct.pack(">I", crc32c.crc32c(covered)) + covered
    return head(commands.Send(1, number * _BATCH, num_messages=_BATCH), len(blob)) + blob


def _used(processes: list[int]) -> float:
    """Processor time of these processes and not of this one."""
    return cpu_seconds(processes) - cpu_seconds()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=4, metavar="P", help="client processes, two or more (4)")


def subjects() -> list[Subject]:
    """Who is measured: the broker by both ways of its client, and servers that survive a power cut."""
    served = KINDS["duelog:serve"].missing()
    own = [
        Subject("duelog", "duelog serve, single messages", served),
        Subject("duelog:batched", "duelog serve, the client's batches", served),
    ]
    keys = ("redis-always", "beanstalkd-fsync")
    return own + [Subject(key, KINDS[key].label, KINDS[key].missing()) for key in keys]


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "network", __doc__, n=(200_000,), quick_n=(2_000,), more=_options)
    results = Results("network", options)
    processes: int = options.extra.processes
    measures = [*RATES.values(), *PROCESSOR.values()]
    for n in options.n:
        case = f"{n:,} messages, {processes} processes"
        arguments: dict[str, Any] = {"n": n, "processes": processes}
        compare(results, case, "benchmarks.network:measure", arguments, measures, subjects())
        for subject, way in (("duelog", "single messages"), ("duelog:batched", "batches")):
            for phase, limit in PHASES.items():
                results.target(f"{phase}, {way}", results.median(case, subject, phase), limit, "more", "messages/s")
        case = f"{n:,} messages, frames of one producer"
        measures, served = [FRAMES, FRAMES_PROCESSOR], subjects()[1:2]
        compare(results, case, "benchmarks.network:measure_frames", {"n": n}, measures, served)
        rate = results.median(case, "duelog:batched", FRAMES.name)
        results.target(FRAMES.name, rate, PHASES["produce"], "more", "messages/s")
    results.show()
    for phase in PHASES:
        bars(results, phase, f"Through a network: {phase}", name=f"network-{phase.split()[0]}")
    return 0
