"""`duelog schedules`, and a schedule that cannot be read."""

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Schedule
from duelog.store.codec import format as fmt
from duelog.store.env.transaction import Transaction
from duelog.store.names import TopicName
from duelog.tools.repair.repair_store import repair_store
from tests.tools.command_line import FUTURE_MS, PAST_MS, json_lines_of, json_of, make_store, ok, refused


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
    rows = json_lines_of("schedules", "list", path)
    assert {row["name"] for row in rows} == {"beat", "daily"}
    (beat,) = json_lines_of("schedules", "list", path, "--topic", "t")
    assert (beat["interval_ms"], beat["payload"], beat["next_due_ms"]) == (3_600_000, "tick", PAST_MS + 3_600_000)
    shown = ok("schedules", "list", path)
    assert "each 3600 s" in shown
    assert "0 9 * * * (Europe/Rome)" in shown
    assert "topic 'nothing' does not exist" in refused("schedules", "list", path, "--topic", "nothing")


def test_a_schedule_is_paused_resumed_and_removed(path: Path) -> None:
    """Each is known to the next command; what is not there is refused, or said not to be there."""
    assert json_of("schedules", "pause", path, "t", "beat")["paused"]
    assert "paused" in ok("schedules", "list", path, "--topic", "t")
    assert "next at" in ok("schedules", "resume", path, "t", "beat")
    assert json_of("schedules", "remove", path, "t", "beat") == {"removed": True}
    assert "no such schedule" in ok("schedules", "remove", path, "t", "beat")
    assert "no such schedule" in refused("schedules", "pause", path, "t", "beat")
    assert json_lines_of("schedules", "list", path, "--topic", "t") == []


def test_a_schedule_is_added_shown_and_replaced(path: Path) -> None:
    """The command says which schedule it replaced; the same again replaces nothing."""
    place = ("schedules", "add", path, "t", "promo")
    options = ("hello", "--cron", "@every 1h30m", "--count", 3, "--until", "2100-01-01T00:00:00Z", "--jitter", "5m",
               "--misfires", "skip", "--grace", "10m", "--key", "k", "--property", "a=b")  # fmt: skip
    made = json_of(*place, *options)
    asked = {
        "interval_ms": 5_400_000, "cron": None, "count": 3, "until_ms": FUTURE_MS, "jitter_ms": 300_000,
        "misfires": "skip", "grace_ms": 600_000, "key": "k", "properties": {"a": "b"}, "payload": "hello", "sent": 1,
        "replaced": None, "ended": False, "paused": False,
    }  # fmt: skip
    assert made.items() >= asked.items()
    assert json_of(*place, *options) == made
    shown = json_of("schedules", "show", path, "t", "promo")
    upcoming = shown.pop("upcoming")
    assert shown == made
    assert [due["nominal_ms"] - made["next_nominal_ms"] for due in upcoming] == [0, 5_400_000, 10_800_000]
    assert all(0 <= due["due_ms"] - due["nominal_ms"] <= 300_000 for due in upcoming)
    text = ok("schedules", "show", path, "t", "promo", "--next", 1)
    for part in ("each 5400 s", "1 of 3", "skip", "600 s", "2100-01-01T00:00:00Z", "a=b"):
        assert part in text
    assert "replaces: each 5400 s" in ok(*place, "--cron", "@weekly", "--timezone", "Europe/Rome")
    replaced = json_of(*place, "--interval", "2h")["replaced"]
    assert (replaced["cron"], replaced["timezone"]) == ("0 0 * * 0", "Europe/Rome")
    assert ok(*place, "from stdin", "--interval", "1d").startswith("next at ")


def test_a_received_message_names_its_schedule(path: Path) -> None:
    """And the time that it is of."""
    (message,) = json_lines_of("receive", "--create", path, "t", "s", "--timeout", "0")
    assert message["occurrence"] == {"schedule": "beat", "nominal_ms": PAST_MS + 3_600_000}


def test_a_schedule_that_was_sent_to_its_end_says_so(path: Path) -> None:
    """It is listed until it is removed, and has no occurrence to show."""
    with make_store(path) as store:
        store.topic("t").every("once", interval=1, count=1)
    with DelayedStore.open(path, clock=ManualClock(FUTURE_MS)) as store:
        store.tick()
    assert json_of("schedules", "show", path, "t", "once")["upcoming"] == []
    assert "ended" in ok("schedules", "list", path, "--topic", "t")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing", "s", "--cron", "@daily"], ["TOPIC", "nothing", "--create"]),
        (["t", "s"], ["cron", "one of cron and interval"]),
        (["t", "s", "--cron", "@often"], ["cron", "@often"]),
        (["t", "s", "--interval", "often"], ["--interval", "often"]),
        (["t", "s", "--interval", "999999999999999w"], ["--interval", "999999999999999w"]),
        (["t", "s", "--cron", "@daily", "--jitter", "-5m"], ["--jitter", "-5m"]),
        (["t", "s", "--cron", "@daily", "--grace", "5m"], ["grace", "latest and skip"]),
        (["t", "s", "--cron", "@daily", "--misfires", "some"], ["--misfires", "some"]),
        (["t", "s", "--cron", "@daily", "--count", "0"], ["count", "0"]),
        (["t", "s", "--cron", "@daily", "--until", "soon"], ["--until", "soon"]),
        (["t", "s", "--cron", "@daily", "--until", "2001-09-09T02:00:00Z"], ["until", "before the first"]),
        (["t", "s", "--cron", "@daily", "--timezone", "Mars"], ["timezone", "Mars"]),
    ],
)
def test_what_cannot_be_added_is_refused_by_name_and_value(path: Path, arguments: list[str], named: list[str]) -> None:
    """The store stays as it was."""
    before = json_lines_of("schedules", "list", path)
    said = refused("schedules", "add", path, *arguments)
    assert all(part in said for part in named), said
    assert json_lines_of("schedules", "list", path) == before
    assert "no such schedule" in refused("schedules", "show", path, "t", "s")


def test_a_new_topic_is_made_only_when_that_is_asked_for(path: Path) -> None:
    """A typo in its name makes none."""
    assert ok("schedules", "add", path, "new", "s", "--cron", "@daily", "--create").startswith("next at ")
    assert [row["name"] for row in json_lines_of("schedules", "list", path, "--topic", "new")] == ["s"]


@pytest.mark.parametrize("fields", [b"junk", b"\x80", b"\x83\xa6paused\xc2"])
def test_a_schedule_that_cannot_be_read_is_a_finding_and_is_discarded(path: Path, fields: bytes) -> None:
    """It recurs no more, so check says so; repair removes it, and the topic's other schedules go on."""
    with make_store(path) as store:
        store.topic("t").every("good", interval=60)
        state = store._engine.topics.get(TopicName.parse("t"))

        def spoil(transaction: Transaction) -> None:
            transaction.put(fmt.schedule_key(state.topic_id, "beat"), fields)

        store._engine.storage.main.write(spoil)
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
