"""A store whose write-ahead log is soon full, and groups of sends."""

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from duelog import DelayedStore, ManualClock, MessageId, StoreConfig
from duelog.partitions.partition import Partition
from duelog.store.codec.run import HEADER
from duelog.store.files import failpoints
from duelog.store.log import catalog
from duelog.store.wal.segment import Group, RowKind
from duelog.store.wal.wal_reader import read_wal
from duelog.store.wal.write_batch import single_rows
from tests.conftest import HOUR_MS, START_MS
from tests.duelog.store_state import payloads_after
from tests.model.driver import armed
from tests.store.commits import until

CONFIG = StoreConfig(partition_ms=HOUR_MS, preload_ms=0, wal_bytes=24 << 10)
"""A write-ahead log of which a segment is soon full."""
FIRST_MS = START_MS // HOUR_MS * HOUR_MS + 2 * HOUR_MS
"""Start of a partition that has not begun, nor the two after it."""


def in_wal(store: DelayedStore) -> list[Group]:
    """The groups that the write-ahead log of an open store holds, applied or not."""
    return read_wal(
        store.path, store._engine.storage.store_id, catalog.oldest_segment(store._engine.storage.main)
    ).groups


def entries_in(group: Group) -> int:
    """Entries of a group's runs."""
    return sum(HEADER.unpack_from(row.value)[4] for row in single_rows(group.rows()) if row.kind == RowKind.RUN)


def unapplied(store: DelayedStore) -> list[Partition]:
    """The partitions with entries that are not applied."""
    return [partition for partition in store._engine.storage.partitions if partition.has_unapplied]


def crashed(store: DelayedStore, path: Path) -> Path:
    """A copy of the files as a crash of the process now would leave them."""
    shutil.copytree(store.path, path, ignore=shutil.ignore_patterns("lock.mdb"))
    return path


def held(store: DelayedStore) -> dict[MessageId, bytes]:
    """Every message that waits in the topic."""
    return {message.message_id: bytes(message.payload) for message in store.topic("a").scheduled()}


def send(store: DelayedStore, number: int, hour: int = 0) -> MessageId:
    """One message, told by its number."""
    return store.topic("a").send(b"%d" % number, deliver_at=FIRST_MS + hour * HOUR_MS + 1 + number)


def everything(store: DelayedStore, clock: ManualClock) -> list[bytes]:
    """The messages of the topic once all of it is due."""
    return sorted(payloads_after(store, clock, 1_000 * HOUR_MS, "a", "all"))


class Together:
    """Sends that are one group: threads queue up while the leader of the one before is held up at its failpoint."""

    def __init__(self, store: DelayedStore, sends: Sequence[Callable[[], MessageId]]) -> None:
        self._queue = store._engine.wal_writer._queue  # type: ignore[union-attr]
        self._sends = sends
        self._pool = ThreadPoolExecutor(len(sends) + 1)
        self.futures: list[Future[MessageId]] = []

    def run(self, first: Callable[[], MessageId], then: Callable[[], None] = lambda: None) -> list[Future[MessageId]]:
        """Send `first` in a group of its own, the others behind it in one; `then` is done when that one is led."""
        entered = threading.Event()

        def hold() -> None:
            failpoints.disarm()
            entered.set()
            until(lambda: len(self._queue) == len(self._sends))
            failpoints.arm("wal.before", then)

        with armed("wal.before", hold), self._pool as pool:
            leader = pool.submit(first)
            assert entered.wait(60)
            self.futures = [pool.submit(each) for each in self._sends]
            leader.result()
        return self.futures
