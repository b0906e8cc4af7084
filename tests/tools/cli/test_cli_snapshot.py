"""`duelog snapshot list`, `verify` and `rebuild`."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.partitions.timespan import directory_name
from duelog.store.codec.format import snapshot_meta_key
from duelog.store.env.environment import Environment
from tests.tools.command_line import DAY_MS, FUTURE_MS, json_lines_of, ok, refused, run

START_MS = FUTURE_MS - FUTURE_MS % DAY_MS
PARTITION = directory_name(START_MS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store whose one day has begun, with a snapshot of 500 messages."""
    path = tmp_path / "store"
    config = StoreConfig(snapshot_every_entries=1_000)
    with DelayedStore.open(path, config, clock=ManualClock(START_MS)) as opened:
        opened.topic("t").send_batch([Message(b"m", deliver_at=START_MS + 1_000 * at) for at in range(1, 501)])
        opened.tick()
        assert list(opened.check()) == []
    return path


def test_list_shows_what_there_is(store: Path) -> None:
    """One line for each snapshot, with what it covers; JSON has every field."""
    text = ok("snapshot", "list", store)
    assert "snapshots: 1" in text
    assert PARTITION in text
    (found,) = json_lines_of("snapshot", "list", store)
    assert (found["state"], found["usable"], found["entries"], found["tail"]) == ("complete", True, 500, 500)
    assert ok("snapshot", "list", store, "--topic", "t", "--partition", PARTITION).count("complete") == 1


def test_list_works_beside_a_writing_process_and_the_others_refuse(store: Path) -> None:
    """Listing takes no lock; verifying and rebuilding say that the store is in use."""
    with DelayedStore.open(store, clock=ManualClock(START_MS)):
        message = refused("snapshot", "rebuild", store)
        assert "open already" in message
        assert "open already" in refused("snapshot", "verify", store)


def test_rebuild_makes_a_damaged_snapshot_whole(store: Path) -> None:
    """Verify finds it with status 1, rebuild replaces it, verify finds nothing."""
    assert ok("snapshot", "verify", store)
    (found,) = json_lines_of("snapshot", "list", store)
    environment = Environment(store / "partitions" / PARTITION / "g000001", name="partition")
    key = snapshot_meta_key(found["ledger_id"], found["snapshot_id"])
    environment.commit(lambda transaction: transaction.raw.put(key, b"nonsense"))
    environment.close()
    result = run("snapshot", "verify", store)
    assert result.exit_code == 1
    assert "damaged" in result.stdout
    assert "rebuilt: 1" in ok("snapshot", "rebuild", store)
    (rebuilt,) = json_lines_of("snapshot", "rebuild", store)
    assert (rebuilt["entries"], rebuilt["pending"], rebuilt["written"]["parts"]) == (500, 500, 1)
    assert ok("snapshot", "verify", store)


def test_a_damaged_entry_is_named_with_status_1(store: Path) -> None:
    """The address and the reason, as a line and as JSON."""
    environment = Environment(store / "partitions" / PARTITION / "g000001", name="partition")
    with environment.read() as raw:
        cursor = raw.cursor()
        assert cursor.last()
        key, value = bytes(cursor.key()), bytearray(cursor.value())
    value[-1] ^= 1
    environment.commit(lambda transaction: transaction.raw.put(key, bytes(value)))
    environment.close()
    result = run("snapshot", "rebuild", store)
    assert result.exit_code == 1
    assert "entry 499" in result.stdout
    assert '"entry_id": 499' in run("snapshot", "rebuild", store, "--json").stdout


def test_unknown_names_are_refused(store: Path) -> None:
    """A partition or topic that is not there, and a directory that is no store."""
    assert "there is none" in refused("snapshot", "rebuild", store, "--partition", "20300101T000000Z")
    assert "nobody" in refused("snapshot", "list", store, "--topic", "nobody")
    assert "no store" in refused("snapshot", "list", store.parent)
