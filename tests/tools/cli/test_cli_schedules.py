"""`duelog schedules`, and a schedule that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog import DelayedStore, Schedule
from duelog.store.codec import format as fmt
from duelog.store.names import TopicName
from duelog.tools.repair.repair_store import repair_store
from tests.tools.command_line import PAST_MS, json_of, make_store, ok, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two schedules in two topics."""
    with make_store(tmp_path / "store") as store:
        made = store.topic("t").every("beat", interval=3_600, payload=b"tick")
        assert isinstance(made, Schedule)
        store.topic("other").every("daily", cron="0 9 * * *", timezone="Europe/Rome")
    return tmp_path / "store"


def test_schedules_are_listed_of_the_store_and_of_a_topic(path: Path) -> None:
    """With what recurs when, and the pending occurrence."""
    rows = json_of("schedules", "list", path)
    assert {row["name"] for row in rows} == {"beat", "daily"}
    (beat,) = json_of("schedules", "list", path, "--topic", "t")
    assert (beat["interval_ms"], beat["payload"], beat["next_due_ms"]) == (3_600_000, "tick", PAST_MS + 3_600_000)
    shown = ok("schedules", "list", path)
    assert "each 3600 s" in shown
    assert "0 9 * * * (Europe/Rome)" in shown
    assert "persistent://public/default/nothing" in refused("schedules", "list", path, "--topic", "nothing")


def test_a_schedule_is_paused_resumed_and_removed(path: Path) -> None:
    """Each is known to the next command; what is not there is refused, or said not to be there."""
    assert json_of("schedules", "pause", path, "t", "beat")["paused"]
    assert "paused" in ok("schedules", "list", path, "--topic", "t")
    assert "next at" in ok("schedules", "resume", path, "t", "beat")
    assert json_of("schedules", "remove", path, "t", "beat") == {"removed": True}
    assert "no such schedule" in ok("schedules", "remove", path, "t", "beat")
    assert "no such schedule" in refused("schedules", "pause", path, "t", "beat")
    assert json_of("schedules", "list", path, "--topic", "t") == []


@pytest.mark.parametrize("fields", [b"junk", b"\x80", b"\x83\xa6paused\xc2"])
def test_a_schedule_that_cannot_be_read_is_a_finding_and_is_discarded(path: Path, fields: bytes) -> None:
    """It recurs no more, so check says so; repair removes it, and the topic's other schedules go on."""
    with make_store(path) as store:
        store.topic("t").every("good", interval=60)
        state = store._engine.topics.get(TopicName.parse("t"))
        key = fmt.schedule_key(state.topic_id, "beat")
        store._engine.main.write(lambda transaction: transaction.put(key, fields))
    with make_store(path) as store:
        (finding,) = store.check()
        assert finding.code == "corrupt-record"
        assert "schedule" in finding.message
    report = repair_store(path, path.with_name("given-up.jsonl"))
    assert report.given_up == 1
    assert report.left == []
    with DelayedStore.open(path) as store:
        assert [schedule.name for schedule in store.topic("t").schedules()] == ["good"]
        assert list(store.check()) == []
