"""A store that has body files and gets a copy: its manifest has them, and its log has all that is sent from then on."""

from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import ReplicaRefused
from duelog.replica import manifest
from duelog.store.wal import write_batch
from tests.conftest import OpenStore, applied
from tests.duelog.replica.faulty import URL, FaultyBucket, restored, ship

CONFIG = StoreConfig(partition_ms=3_600_000, run_entries=8)
LARGE = [b"%04d" % number * 100 for number in range(20)]


@pytest.fixture(autouse=True)
def _little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_batch, "LARGE_BYTES", 2_000)


def send(store: DelayedStore) -> None:
    """Send a large run to the main log and one to a partition."""
    store.topic("t").send_batch([Message(body, deliver_after=hour * 3_600) for hour in (0, 2) for body in LARGE])


def test_a_restore_has_the_bodies_of_files_and_of_the_log(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that knows no body files refuses the manifest, which says that it has some."""
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    send(store)  # the partition is vacant, and has no body file yet
    send(applied(store))
    store.close()
    store = open_store(config=replace(CONFIG, replica=URL))
    files = set(store.path.rglob("*.bodies"))
    assert len(files) == 2
    send(store)
    assert set(store.path.rglob("*.bodies")) == files
    ship(store)
    restored(bucket, tmp_path / "restored")
    copy = open_store(tmp_path / "restored", CONFIG)
    assert len(list(copy.path.rglob("*.bodies"))) == 2
    assert list(copy.check(deep=True)) == []
    clock.advance(3 * 3_600_000)
    copy.tick()
    with copy.topic("t").subscribe("s") as reader:
        assert sorted(message.payload for message in reader.receive(1_000)) == sorted(LARGE * 6)
    monkeypatch.setattr(manifest, "FORMATS", (1,))
    with pytest.raises(ReplicaRefused, match="format 2"):
        restored(bucket, tmp_path / "by the version before")
