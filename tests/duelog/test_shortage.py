"""A shortage of descriptors or memory is not damage: a call raises, nothing is quarantined, and the next one works."""

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lmdb
import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import DamagedStore, ResourceShortage, StoreFull
from duelog.markers import reader
from duelog.markers.reader import MessageMaker
from duelog.metrics import instruments
from duelog.store.codec.run import Run
from duelog.store.env.environment import Environment
from duelog.store.files import pages, system_errors
from duelog.store.log.scan import RunFinder
from tests.conftest import START_MS, OpenStore, raising

SPAN_MS = 20_000
CONFIG = StoreConfig(partition_ms=SPAN_MS, preload_ms=0, max_open_partitions=1)


@pytest.fixture
def fired(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """A store whose five messages have fired, each from a closed partition of its own, one of which is open."""
    store = open_store(config=CONFIG)
    topic = store.topic("t")
    topic.subscribe("s").close()
    for number in range(5):
        topic.send(b"%d" % number, deliver_at=START_MS + SPAN_MS * number + 1_000)
    clock.advance(200_000)
    assert store.tick().closed == 5
    for partition in store._engine.storage.partitions:
        partition.walked = None  # as after a restart
    return store


def refuse(patch: pytest.MonkeyPatch, owner: object, name: str, path: Path, error: BaseException) -> None:
    """Have a function raise `error` for an environment at `path`; one that is called with no path raises always."""
    original = getattr(owner, name)

    def refusing(what: Any, *arguments: Any, **options: Any) -> Any:
        about = getattr(what, "path", what)
        if not isinstance(about, str | Path) or Path(about) in (path, path / "data.mdb"):
            raise error
        return original(what, *arguments, **options)

    patch.setattr(owner, name, refusing)


NO_DESCRIPTOR = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "data.mdb")
NO_READER_SLOT = system_errors.explain(Path("data.mdb"), lmdb.ReadersFullError("mdb_txn_begin: MDB_READERS_FULL"))


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (pages, "refuse_broken", NO_DESCRIPTOR),
        (os, "open", NO_DESCRIPTOR),  # the look at a file's pages before it is opened for the first time
        (lmdb, "open", lmdb.Error(f"/store: {os.strerror(errno.EMFILE)}")),
        (lmdb, "open", lmdb.MemoryError(f"/store: {os.strerror(errno.ENOMEM)}")),
        (Environment, "_begin_read", NO_READER_SLOT),
        (MessageMaker, "make", MemoryError()),
    ],
)
def test_a_shortage_while_messages_are_read_quarantines_none_of_them(
    fired: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception
) -> None:
    """The receiver is told, hands out nothing, and the next call gives all five; no record holds their partitions."""
    third = list(fired._engine.storage.partitions)[2]
    with fired.topic("t").subscribe("s") as consumer:
        with monkeypatch.context() as patch:
            refuse(patch, owner, name, third.path, error)
            with pytest.raises((ResourceShortage, MemoryError)):
                consumer.receive(10)
        assert fired.stats().set_aside == 0
        messages = consumer.receive(10)
        assert [message.payload for message in messages] == [b"0", b"1", b"2", b"3", b"4"]
        consumer.ack(messages, durable=True)
    clock.advance(5 * 3_600_000)
    fired.tick()
    assert (fired.stats().set_aside, fired.partitions()) == (0, [])


def test_a_damaged_page_quarantines_what_lies_on_it_and_nothing_else(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB refuses one of ten runs of a partition: nine messages come, and one is quarantined with its reason."""
    store = open_store(config=StoreConfig(partition_ms=3_600_000, run_entries=1))
    topic = store.topic("t")
    with topic.subscribe("s") as consumer:
        ids = [topic.send(b"%d" % number, deliver_after=1) for number in range(10)]
        clock.advance(1_000)

        class Refusing(RunFinder):
            def find(self, ledger_id: int, entry_id: int) -> Run | None:
                if (ledger_id, entry_id) == ids[4]:
                    raise lmdb.CorruptedError("mdb_get: MDB_CORRUPTED: Located page was wrong type")
                return super().find(ledger_id, entry_id)

        monkeypatch.setattr(reader, "RunFinder", Refusing)
        assert [message.payload for message in consumer.receive(10)] == [b"%d" % at for at in range(10) if at != 4]
        assert store.stats().set_aside == 1
    store._engine.delivery.quarantine._known.clear()
    store._engine.delivery.quarantine._unwritten.clear()


@pytest.mark.parametrize(("number", "expected"), [(errno.EMFILE, ResourceShortage), (errno.EIO, DamagedStore)])
def test_pages_that_cannot_be_read_for_now_are_no_damage(
    fired: DelayedStore, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    """A sector that cannot be read is."""

    def refusing(directory: Path) -> object:
        raise OSError(number, os.strerror(number), str(directory))

    monkeypatch.setattr(pages, "open_file", refusing)
    with pytest.raises(expected):
        pages.find_problems(fired.path / "main")


def test_a_store_whose_thread_cannot_be_started_is_not_opened_and_holds_nothing(tmp_path: Path) -> None:
    """Raises ResourceShortage; no descriptor, lock or gauge is left, and the store is opened once there are threads."""
    config = StoreConfig(background=True)
    DelayedStore.open(tmp_path / "store", config).close()
    descriptors, reporting = len(os.listdir("/proc/self/fd")), set(instruments().stores)
    refused = pytest.raises(ResourceShortage, match="thread cannot be started")
    with patch.object(threading.Thread, "start", raising(RuntimeError("can't start new thread"))), refused as raised:
        DelayedStore.open(tmp_path / "store", config)
    assert raised.value.errno == errno.EAGAIN
    assert (len(os.listdir("/proc/self/fd")), set(instruments().stores)) == (descriptors, reporting)
    DelayedStore.open(tmp_path / "store", config).close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_a_backup_says_what_it_is_short_of(open_store: OpenStore, tmp_path: Path, number: int) -> None:
    """A shortage of descriptors is not a full disk; either way nothing is left, and the next backup is made."""
    store, open_ = open_store(), Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "data.mdb" and path.is_relative_to(tmp_path / "copy"):
            raise OSError(number, os.strerror(number), str(path))
        return open_(path, *arguments, **options)

    with patch.object(Path, "open", refuse), pytest.raises(ResourceShortage if number == errno.EMFILE else StoreFull):
        store.backup(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    store.backup(tmp_path / "copy")
