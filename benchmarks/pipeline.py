"""pipeline: entries a second of scan, audit, compaction and export: on one core without Spark, with Spark on 1 and 2.

A store of four closed days in 8 topics, payloads of 100 bytes, sent in batches of 1,000; one subscription has
acknowledged half. Compaction is what `compact_store` does beside a process that has the store open: planned, copied,
verified and handed over, and not adopted, so that it is there to be done again. Against it a scan of the same files
with py-lmdb alone: `headers` reads how many entries each run has, `whole` a checksum of every value. A figure is the
median of three after one to warm up, Spark's in one session; what its start costs stands beside them, and from how many
entries on two cores repay that. `copy` is the same of the store's copy, in a directory (`file://`), of which each task
fetches its partition; what it compacts it puts there.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import lmdb

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.opening import StoreLock
from duelog.tools.arrow import open_tables
from duelog.tools.audit import audit_store
from duelog.tools.columns.scan_arrow import MESSAGES, scan_messages
from duelog.tools.columns.scan_rows import plan_scan
from duelog.tools.columns.sealed import copy_url, sealed_generations, store_name
from duelog.tools.compact_store import Runner, compact_store
from duelog.tools.transfer.parquet_export import export_store

from .harness import load
from .harness.compare import Subject, compare
from .harness.options import parse
from .harness.plots import short
from .harness.results import Measure, Results

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEADERS = Measure("headers", "entries/s", show=short)
WHOLE = Measure("whole", "entries/s", show=short)
AUDIT = Measure("audit", "entries/s", show=short)
COMPACTION = Measure("compaction", "entries/s", show=short)
EXPORT = Measure("export", "entries/s", show=short)
START = Measure("start", "s", "less")
MEASURES = (HEADERS, WHOLE, AUDIT, COMPACTION, EXPORT, START)

SUBJECTS = (
    Subject("duelog", "duelog, one core"),
    Subject("lmdb", "py-lmdb alone, one core"),
    Subject("local1", "Spark local[1]"),
    Subject("local2", "Spark local[2]"),
    Subject("copy", "of a copy, one core"),
    Subject("copy2", "of a copy, Spark local[2]"),
)
_DAYS = 4
_TOPICS = 8
_PAYLOAD_BYTES = 100
_REPEATS = 3
_COUNT = struct.Struct("<8xI")
_RUN = 0xF0
_NARROW = ["topic", "due_ms"]

Jobs = dict[str, Callable[[], object]]


def measure(subject: str, n: int, jobs: list[str], directory: Path) -> dict[str, float]:
    """Entries a second of each of the `jobs`, all of them where none is named."""

    def rates(found: Jobs) -> dict[str, float]:
        return {name: n / statistics.median(_times(job)) for name, job in found.items() if not jobs or name in jobs}

    store, cores = directory / "store", subject[-1]
    url = (directory / "bucket").as_uri() if subject.startswith("copy") else None
    _build(store, n, url)
    entries = sum(part.entries for part in plan_scan(store))
    if entries != n:
        raise RuntimeError(f"{entries} of {n} entries are sealed")
    if subject == "lmdb":
        return rates({HEADERS.name: lambda: _raw(store, False), WHOLE.name: lambda: _raw(store, True)})
    read = store if url is None else Path(url)
    if cores not in "12":
        return rates(_plain(read, directory))
    started = time.perf_counter()
    with _session(cores) as spark:
        spark.range(1).count()
        start = time.perf_counter() - started
        return rates(_on_spark(read, directory, spark)) | {START.name: start}


def _times(job: Callable[[], object]) -> list[float]:
    """Seconds of a job, several times, after once to warm up: the page cache for all, the JVM and its workers too."""
    job()
    took = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        job()
        took.append(time.perf_counter() - started)
    return took


def _build(path: Path, n: int, url: str | None) -> None:
    clock = ManualClock(load.NOW_MS)
    payload = load.payloads(1, _PAYLOAD_BYTES)[0]
    dues = load.dues(n, load.START_MS, load.START_MS + _DAYS * load.DAY_MS).tolist()
    with DelayedStore.open(path, StoreConfig(durability="none", max_clock_jump_ms=None), clock=clock) as store:
        topics = [store.topic(f"topic-{number}") for number in range(_TOPICS)]
        readers = [topic.subscribe("reader") for topic in topics]
        for number, at in enumerate(range(0, n, load.BATCH)):
            topics[number % _TOPICS].send_batch(
                [Message(payload, deliver_at=due) for due in dues[at : at + load.BATCH]]
            )
        clock.set(load.START_MS + _DAYS * load.DAY_MS + 1_000)
        while store.tick().fired:
            pass
        for reader in readers:
            while batch := reader.receive(10_000):
                reader.ack(batch[::2])
            reader.close(failed=False)
        clock.advance(1_000)
        store.tick()
    if url is not None:
        with DelayedStore.open(path, StoreConfig(replica=url, max_clock_jump_ms=None), clock=clock) as store:
            store.save_manifest()


# -- py-lmdb alone ---------------------------------------------------------------------------------


def _raw(store: Path, whole: bool) -> int:
    count = 0
    for sealed in sealed_generations(store):
        with (
            lmdb.open(str(sealed.path), readonly=True, lock=False, map_size=sealed.file_bytes * 2) as environment,
            environment.begin(buffers=True) as raw,
        ):
            for key, value in raw.cursor():
                if key[0] == _RUN:
                    count += _COUNT.unpack_from(value)[0]
                    if whole:
                        crc32(value)
    return count


# -- duelog without and with Spark -----------------------------------------------------------------


def _plain(store: Path, directory: Path) -> Jobs:
    def scan(columns: list[str]) -> int:
        if copy_url(store) is not None:
            with open_tables(store, pending=False) as tables:
                return sum(batch.num_rows for batch in tables.batches("messages", columns))
        return sum(batch.num_rows for part in plan_scan(store) for batch in scan_messages(part, columns))

    return {
        HEADERS.name: lambda: scan(_NARROW),
        WHOLE.name: lambda: scan(_all_columns()),
        AUDIT.name: lambda: audit_store(store, patience_s=0),
        COMPACTION.name: lambda: _compact(store),
        EXPORT.name: lambda: _exported(directory, lambda dest: export_store(store, dest)),
    }


def _on_spark(store: Path, directory: Path, spark: SparkSession) -> Jobs:
    from duelog.tools.spark.source import spark_schema  # noqa: PLC0415
    from duelog.tools.spark.spark_jobs import (  # noqa: PLC0415 - only where Spark is measured
        audit_with_spark,
        compact_with_spark,
        export_with_spark,
    )

    def scan(columns: list[str]) -> None:
        schema = spark_schema(MESSAGES)
        frame = (
            spark.read.format("duelog").schema(type(schema)([schema[name] for name in columns])).load(store_name(store))
        )
        frame.write.format("noop").mode("overwrite").save()

    return {
        HEADERS.name: lambda: scan(_NARROW),
        WHOLE.name: lambda: scan(_all_columns()),
        AUDIT.name: lambda: audit_with_spark(store, spark=spark, patience_s=0),
        COMPACTION.name: lambda: _compact(store, lambda tasks, progress: compact_with_spark(tasks, spark=spark)),
        EXPORT.name: lambda: _exported(directory, lambda dest: export_with_spark(store, dest, spark=spark)),
    }


def _all_columns() -> list[str]:
    return [name for name in MESSAGES.names if name != "withdrawn"]  # it is the main environment's


def _compact(store: Path, run: Runner | None = None) -> None:
    """Compact everything up to adoption, and have it to do again."""
    if (url := copy_url(store)) is not None:
        compact_store(store, run=run)
        made = Path(url.removeprefix("file://")) / "compacted"
        if len(list(made.iterdir())) != _DAYS:
            raise RuntimeError(f"{len(list(made.iterdir()))} partitions of {_DAYS} were compacted")
        shutil.rmtree(made)
        return
    lock = StoreLock(store)  # adoption is for who has it
    lock.take()
    try:
        report = compact_store(store, run=run)
    finally:
        lock.release()
    if len(report.waiting) != _DAYS:
        raise RuntimeError(f"{len(report.waiting)} partitions of {_DAYS} were compacted")
    for left in (store / "staging").iterdir():
        shutil.rmtree(left)


def _exported(directory: Path, export: Callable[[Path], object]) -> None:
    export(directory / "archive")
    shutil.rmtree(directory / "archive")


@contextmanager
def _session(cores: str) -> Iterator[SparkSession]:
    from duelog.tools.spark.session import make_session  # noqa: PLC0415 - as above

    session = make_session(f"local[{cores}]")
    try:
        yield session
    finally:
        session.stop()


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "pipeline", __doc__, n=(2_000_000,), quick_n=(100_000,), more=_add_jobs)
    results = Results("pipeline", options)
    for n in options.n:
        case = f"{n:,}"
        compare(results, case, "benchmarks.pipeline:measure", {"n": n, "jobs": options.extra.jobs}, MEASURES, SUBJECTS)
        headers = results.median(case, "local2", HEADERS.name)
        results.target(f"{case}: headers on 2 cores", headers, 1_000_000, "more", "entries/s")
        for one, both in (("duelog", "local2"), ("copy", "copy2")):
            for job in (COMPACTION,) if one == "duelog" else (AUDIT, COMPACTION):
                plain, two = (results.median(case, subject, job.name) for subject in (one, both))
                if plain and two:
                    text = f"{case}: {job.name}{' of a copy' * (one == 'copy')} on 2 cores, to one core without Spark"
                    results.target(text, two / plain, 1.6, "more", "x")
            for job in (HEADERS, WHOLE, AUDIT, COMPACTION, EXPORT):
                _note_what_pays(results, case, job.name, one, both)
    results.show()
    return 0


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=[], metavar="JOB,...", help="these alone")


def _note_what_pays(results: Results, case: str, job: str, one: str, both: str) -> None:
    plain, two = (results.median(case, subject, job) for subject in (one, both))
    start = results.median(case, both, START.name)
    if not plain or not two or not start:
        return
    if two <= plain:
        results.notes.append(f"{case}, {job}, {both}: two cores with Spark are no faster than one without")
    else:
        results.notes.append(
            f"{case}, {job}, {both}: Spark on two cores pays from {start / (1 / plain - 1 / two):,.0f} entries"
        )
