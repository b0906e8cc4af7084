"""`duelog drain` from one store into another that `duelog serve` serves, by the real client."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("crc32c", reason="needs duelog[broker]")
pytest.importorskip("pulsar")

from duelog import DelayedStore, Message, StoreConfig
from duelog.broker.operate.client_message import client_messages
from duelog.tools.values import open_to_read
from tests.broker.clients.conftest import ServedStore
from tests.tools.command_line import DAY_MS, DUELOG, FUTURE_MS, refused, run


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ServedStore]:
    """The other broker, which deduplicates."""
    served = ServedStore(tmp_path / "other", brokerDeduplicationEnabled=True)
    served.start()
    yield served
    served.kill()


def drain(*arguments: object) -> tuple[int, dict[str, object], str]:
    """Exit status, figures, standard error of a drain."""
    done = run("drain", *arguments, "--json")
    return done.exit_code, json.loads(done.stdout or "null"), done.stderr


def test_pending_messages_arrive_at_another_broker_with_all_that_a_client_can_set(
    broker: ServedStore, tmp_path: Path
) -> None:
    """Due time, key, properties, payload; copied twice and then drained they are there once."""
    source = tmp_path / "source"
    with DelayedStore.open(source, StoreConfig(background=False)) as store:
        topic = store.topic("reminders")
        topic.subscribe("mailer").close()
        for number in range(40):
            topic.send(b"%d" % number, deliver_at=FUTURE_MS + number, key=f"k{number}", properties={"n": str(number)})
    for keep in (["--keep"], ["--keep"], []):
        status, figures, said = drain(source, "--to", broker.url, *keep)
        assert (status, figures and figures["entries"], said.count("\n") <= 1) == (0, 40, True), said
    status, figures, _ = drain(source, "--to", broker.url)
    assert (status, figures["entries"]) == (0, 0)
    assert broker.stop() == 0
    with DelayedStore.open(broker.folder / "store") as store:
        topic = store.topic("reminders")
        assert topic.subscriptions() == ["mailer"]
        found = list(topic.scheduled())
    assert [(each.due_ms, each.key) for each in found] == [(FUTURE_MS + at, f"k{at}") for at in range(40)]
    assert all(each.payload.endswith(str(at).encode()) for at, each in enumerate(found))
    status, figures, _ = drain(broker.folder / "store", "--to", broker.url, "--dry-run")
    assert (status, figures["messages"]) == (0, 40)


BATCHES = """
import sys, pulsar
client = pulsar.Client(sys.argv[1], logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
for name, kind in pulsar.CompressionType.__members__.items():
    producer = client.create_producer("batches", compression_type=kind, batching_enabled=True,
                                      batching_max_publish_delay_ms=200)
    for number in range(10):
        producer.send_async(b"x" * 500 + f"{name}-{number}".encode(), None, partition_key=f"k{number}",
                            properties={"n": str(number)}, event_timestamp=1_000 + number)
    producer.flush()
    producer.send(None, partition_key=name)
client.close()
"""


def test_batches_of_a_real_client_arrive_message_by_message_whatever_their_compression(
    broker: ServedStore, tmp_path: Path
) -> None:
    """A fixed delay holds batches, too; each message keeps its key, properties and event time, null values are null."""
    source = ServedStore(tmp_path / "source")
    with DelayedStore.open(source.folder / "store", StoreConfig(background=False)) as store:
        store.update_policies(namespace="public/default", fixed_delivery_delay_ms=DAY_MS)
    source.start()
    try:
        subprocess.run([sys.executable, "-c", BATCHES, source.url], check=True, timeout=180)
    finally:
        assert source.stop() == 0
    with DelayedStore.open(source.folder / "store", read_only=True) as store:
        waiting = list(store.topic("batches").scheduled())
        expected = [each for found in waiting for each in client_messages(found.payload, None, {})]
    assert len(expected) == 55
    assert len(waiting) < 55
    status, figures, said = drain(source.folder / "store", "--to", broker.url)
    assert (status, figures["messages"]) == (0, 55), said
    assert broker.stop() == 0
    with DelayedStore.open(broker.folder / "store") as store:
        there = list(store.topic("batches").scheduled())
    found = [each for stored in there for each in client_messages(stored.payload, None, {})]
    assert len(there) == len(found) == 55
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert {each.due_ms for each in there} == {each.due_ms for each in waiting}
    assert sum(each.content is None for each in found) == 5


def test_a_drain_that_is_killed_and_run_again_has_each_message_there_once(broker: ServedStore, tmp_path: Path) -> None:
    """SIGKILL while it sends; the other broker deduplicates."""
    source = tmp_path / "source"
    with DelayedStore.open(source, StoreConfig(background=False)) as store:
        messages = [Message(b"%d" % at, deliver_at=FUTURE_MS + at) for at in range(1_500)]
        store.topic("reminders").send_batch(messages)
    process = subprocess.Popen([*DUELOG, "drain", str(source), "--to", broker.url])
    deadline = time.monotonic() + 60
    there = 0
    while there < 100 and process.poll() is None and time.monotonic() < deadline:
        with open_to_read(broker.folder / "store") as store:
            there = store.stats().pending
    process.kill()
    process.wait()
    assert 0 < there <= 1_500
    status, _, said = drain(source, "--to", broker.url)
    assert status == 0, said
    assert broker.stop() == 0
    with DelayedStore.open(broker.folder / "store") as store:
        assert [each.due_ms - FUTURE_MS for each in store.topic("reminders").scheduled()] == list(range(1_500))


def test_a_delay_over_the_maximum_of_the_other_broker_is_told_as_such(tmp_path: Path) -> None:
    """Its answer to a client of this kind is a wrong checksum."""
    (path,) = _store(tmp_path)
    with DelayedStore.open(path, StoreConfig(background=False)) as store:
        store.topic("reminders").send(b"m", deliver_at=FUTURE_MS)
    served = ServedStore(tmp_path / "strict", delayedDeliveryMaxDelayInMillis=1_000)
    with served.running():
        said = refused("drain", path, "--to", served.url)
    assert "due later than the broker allows" in said


def test_what_keeps_a_drain_from_beginning_is_one_line(tmp_path: Path) -> None:
    """An address of another kind or of none, a store that is not there, one that nobody serves, this one itself."""
    (path,) = _store(tmp_path)
    for place in ("localhost:6650", ""):
        assert f"--to={place!r}: expected pulsar://" in refused("drain", path, "--to", place)
    trust = refused("drain", path, "--to", "pulsar+ssl://localhost:1", "--tls-trust", tmp_path / "none.pem")
    assert "--tls-trust=" in trust
    assert "none.pem': cannot be read: No such file" in trust
    assert "--to='http://x:1': expected pulsar://" in refused("drain", path, "--to", "http://x:1")
    assert "no process serves this store" in refused("drain", path, "--to", str(tmp_path / "other"))
    assert "expected another store" in refused("drain", path, "--to", str(path))
    assert "there is no such directory" in refused("drain", tmp_path / "none", "--to", "pulsar://x:1")


def _store(tmp_path: Path) -> list[Path]:
    DelayedStore.open(tmp_path / "store").close()
    return [tmp_path / "store"]
