"""Failed deliveries are counted over restarts and crashes: what survives, and what clears it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from pyroaring import BitMap

from duelog import DelayedStore, ManualClock, StoreConfig, Topic
from duelog.delivery import delivery_log
from duelog.delivery.delivery_log import DeliveryLog, log_files, read_log
from duelog.delivery.dispatcher import SubscriptionType
from duelog.store.codec import format as fmt
from duelog.store.log import catalog
from tests.conftest import OpenStore, raising
from tests.duelog.store_state import main_of

pytestmark = pytest.mark.usefixtures("clock")
CONFIG = StoreConfig(max_clock_jump_ms=None)
ROOT = Path(__file__).parents[3]

CRASHING = """
import json, os, signal, sys
sys.path.append(sys.argv[1])
from duelog import DelayedStore, StoreConfig
store = DelayedStore.open(sys.argv[2], StoreConfig(max_redeliveries=3))
told = {}
for kind in sys.argv[3:]:
    topic = store.topic(kind)
    subscription = topic.subscribe("s", type=kind)
    if not topic.stats().entries:
        topic.send(b"poison", key="k")
    told[kind] = [message.redelivery_count for message in subscription.receive(1, timeout=0)]
print(json.dumps(told), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def crashed(store: DelayedStore, target: Path, clock: ManualClock) -> DelayedStore:
    """The store as a crash of the process would leave it now, opened."""
    shutil.copytree(store.path, target, ignore=shutil.ignore_patterns("lock.mdb"))
    return DelayedStore.open(target, CONFIG, clock=clock)


def counts(store: DelayedStore, type_: SubscriptionType = "shared", most: int = 100) -> dict[bytes, int]:
    """Redelivery counts by payload of what subscription `s` of topic `t` gets."""
    found = store.topic("t").subscribe("s", type=type_).receive(most)
    return {message.payload: message.redelivery_count for message in found}


@pytest.mark.kill
def test_a_process_that_is_killed_at_each_delivery_ends_with_a_dead_letter(tmp_path: Path) -> None:
    """`max_redeliveries=3`: delivered four times, each with its count, and then it is a dead letter."""
    path, types = tmp_path / "store", ("exclusive", "failover", "key_shared", "shared")
    told = []
    for _ in range(6):
        command = [sys.executable, "-c", CRASHING, str(ROOT), str(path), *types]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
        assert done.returncode == -signal.SIGKILL, done.stderr
        told.append(json.loads(done.stdout))
    assert told == [dict.fromkeys(types, count) for count in ([0], [1], [2], [3], [], [])]
    with DelayedStore.open(path) as store:
        letters = list(store.dead_letters())
        assert sorted(letter.topic.rpartition("/")[2] for letter in letters) == list(types)
        assert {(each.payload, each.reason, each.attempts) for each in letters} == {(b"poison", "redeliveries", 4)}
        assert list(store.check(deep=True)) == []


def test_nothing_is_left_of_what_was_acknowledged_or_unsubscribed(store: DelayedStore, topic: Topic) -> None:
    """The record goes with the last of its messages, and with its subscription."""
    for name in ("acknowledges", "goes"):
        consumer = topic.subscribe(name, type="shared")
        topic.send(b"x")
        consumer.nack(consumer.receive(10), delay=0)
        store.flush()
        if name == "acknowledges":
            consumer.ack(consumer.receive(10))
        consumer.close()
    topic.unsubscribe("goes")
    path = store.path
    store.close()
    with closing(main_of(path)) as main, main.read() as raw:
        assert list(catalog.rows(raw, fmt.prefix(fmt.Table.ATTEMPTS))) == []


def test_a_full_file_is_followed_by_one_that_has_what_is_in_flight(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files do not pile up, and a message that is held since the first of them is counted."""
    monkeypatch.setattr(delivery_log, "FILE_BYTES", 1_024)
    store = open_store(config=CONFIG)
    topic = store.topic("t")
    consumer = topic.subscribe("s", type="shared")
    topic.send(b"held")
    consumer.receive()
    for number in range(200):
        topic.send(b"%d" % number)
        consumer.ack(consumer.receive())
        store.flush()
        assert len(log_files(store.path)) <= 2
    assert log_files(store.path)[0].name > "000000000003.log"
    with crashed(store, tmp_path / "crashed", clock) as found:
        assert counts(found) == {b"held": 1}


def test_a_log_without_space_does_not_hold_up_deliveries(
    store: DelayedStore, topic: Topic, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: what is handed out is not noted, and comes with its count as it was."""
    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(28, "No space left on device")))
    consumer = topic.subscribe("s", type="shared")
    topic.send(b"x")
    assert [message.payload for message in consumer.receive()] == [b"x"]
    assert log_files(store.path) == []
    monkeypatch.undo()
    with crashed(store, tmp_path / "crashed", clock) as found:
        assert counts(found) == {b"x": 0}


def test_a_log_of_another_boot_or_store_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may leave content of any age."""
    log = DeliveryLog(tmp_path, b"s" * 16)
    log.note(1, 2, BitMap([3, 4, 9]), 1)
    log.note(1, 2, BitMap([4]), 2)
    (file,) = log_files(tmp_path)
    assert [*read_log(file, b"s" * 16)] == [(1, 2, 1, BitMap([3, 4, 9])), (1, 2, 2, BitMap([4]))]
    assert [*read_log(file, b"x" * 16)] == []
    content = bytearray(file.read_bytes())
    content[64 + 10] ^= 1
    file.write_bytes(content)
    assert [*read_log(file, b"s" * 16)] == []
    monkeypatch.setattr(delivery_log, "boot_id", lambda: b"b" * 16)
    assert [*read_log(file, b"s" * 16)] == []


def test_what_is_in_flight_counts_at_a_crash_and_not_at_a_close(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock, tmp_path: Path
) -> None:
    """In flight for the first and for the second time, waiting, acknowledged, and not handed out at all."""
    consumer = topic.subscribe("s", type="shared")
    topic.send_payloads([b"again", b"waits", b"done", b"first", b"new"])
    again, waits, done, _ = consumer.receive(4)
    consumer.nack(again, delay=0)
    consumer.nack(waits, delay=60)
    consumer.ack(done, durable=True)
    assert [message.payload for message in consumer.receive(1)] == [b"again"]
    with crashed(store, tmp_path / "crashed", clock) as found:
        assert counts(found) == {b"again": 2, b"waits": 1, b"first": 1, b"new": 0}
        assert list(found.check(deep=True)) == []
    store.close()
    assert log_files(store.path) == []
    assert counts(open_store(config=CONFIG)) == {b"again": 1, b"waits": 1, b"first": 0, b"new": 0}
