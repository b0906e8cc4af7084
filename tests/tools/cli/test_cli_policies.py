"""`duelog policies` and `duelog schedules`, and a schedule that cannot be read."""

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Schedule
from duelog.opening import stored_span_ms
from duelog.store.codec import format as fmt
from duelog.store.env.transaction import Transaction
from duelog.store.names import TopicName
from duelog.store.policy.policies import CONFIG_FIELDS, DELAY_FIELDS
from duelog.tools.repair.repair_store import repair_store
from tests.tools.command_line import FUTURE_MS, PAST_MS, json_lines_of, json_of, make_store, ok, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store without messages."""
    make_store(tmp_path / "store").close()
    return tmp_path / "store"


def test_what_is_set_is_shown_with_the_scope_that_wins(path: Path) -> None:
    """A topic's view has what is set there, what is in force, and where it comes from. Flags may be Pulsar's."""
    ok("policies", "set", path, "-d", "-md", "7d")
    ok("policies", "set", path, "-n", "public/default", "-e", "-t", "1s", "-fd", "1s")
    ok("policies", "set", path, "--topic", "t", "--fixedDelay", "30s")
    shown = json_of("policies", "get", path, "--topic", "t")
    assert {name: shown["effective"][name] for name in DELAY_FIELDS} == {
        "active": True,
        "tick_time_ms": 1_000,
        "max_delivery_delay_ms": 604_800_000,
        "fixed_delivery_delay_ms": 30_000,
    }
    assert shown["set_at"]["max_delivery_delay_ms"] == "store"
    assert shown["set_at"]["tick_time_ms"] == "namespace public/default"
    assert shown["set"]["fixed_delivery_delay_ms"] == 30_000
    assert "namespace public/default" in ok("policies", "get", path, "--topic", "t")
    assert [row["scope"] for row in json_lines_of("policies", "get", path)] == [
        "topic persistent://public/default/t",
        "namespace public/default",
        "store",
    ]


def test_what_is_kept_is_set_at_every_scope_and_shown_with_where_it_comes_from(path: Path) -> None:
    """Store, namespace, topic, subscription; a subscription's view has all four."""
    ok("policies", "set", path, "--retention", "7d", "--ttl", "30d", "--max-redeliveries", "9")
    ok("policies", "set", path, "-n", "public/default", "--ack-timeout", "90s", "--retention-bytes", "1000")
    ok("policies", "set", path, "--topic", "t", "--dead-letter-topic", "graves", "--backoff", "0.5")
    ok("policies", "set", path, "--topic", "t", "-s", "mailer", "--max-redeliveries", "-1", "--max-backoff", "5m")
    shown = json_of("policies", "get", path, "--topic", "t", "--subscription", "mailer")
    assert {name: shown["effective"][name] for name in CONFIG_FIELDS} == {
        "retention_ms": 604_800_000,
        "retention_bytes": 1_000,
        "ttl_ms": 2_592_000_000,
        "max_redeliveries": -1,
        "dead_letter_topic": "graves",
        "ack_timeout_ms": 90_000,
        "nack_backoff_ms": 500,
        "nack_backoff_max_ms": 300_000,
    }
    topic = "topic persistent://public/default/t"
    assert [shown["set_at"][name] for name in CONFIG_FIELDS] == [
        "store", "namespace public/default", "store", f"subscription mailer of {topic}", topic,
        "namespace public/default", topic, f"subscription mailer of {topic}",
    ]  # fmt: skip
    ok("policies", "set", path, "-n", "public/default", "--max-in-flight", "7", "--max-pending", "9")
    ok("policies", "set", path, "--topic", "t", "-s", "mailer", "--max-in-flight", "5")
    flow = json_of("policies", "get", path, "--topic", "t", "--subscription", "mailer")
    assert [(flow["effective"][name], flow["set_at"][name]) for name in ("max_in_flight", "max_pending")] == [
        (5, f"subscription mailer of {topic}"), (9, "namespace public/default")
    ]  # fmt: skip
    assert "604,800,000" in ok("policies", "get", path, "--topic", "t")
    assert "subscription mailer of topic t " in ok("policies", "get", path)
    assert "retention_ms=1000" in refused("policies", "set", path, "--topic", "t", "-s", "mailer", "--retention", "1")


def test_one_policy_is_set_or_unset_and_the_others_stay(path: Path) -> None:
    """By its name; an unknown one is refused with the names there are, and so is to set nothing."""
    assert "--max-delay" in refused("policies", "set", path)
    ok("policies", "set", path, "--maxDelay", "0.5")
    assert json_of("policies", "set", path, "--disable")["max_delivery_delay_ms"] == 500
    assert json_lines_of("policies", "get", path)[0]["active"] is False
    assert json_of("policies", "remove", path) == {"removed": True}
    ok("policies", "set", path, "--topic", "t", "--retention", "7d", "--ttl", "1d", "--max-delay", "5")
    left = json_of("policies", "unset", path, "--topic", "t", "retention_ms", "max_delivery_delay_ms")
    assert {name: value for name, value in left.items() if value is not None} == {"ttl_ms": 86_400_000}
    assert "retention_ms" in refused("policies", "unset", path, "--topic", "t", "retention")
    assert ok("policies", "unset", path, "--topic", "t", "ttl_ms") == "nothing is set there\n"
    assert json_lines_of("policies", "get", path) == []


def test_a_store_is_made_with_a_span_and_defaults_of_its_own(tmp_path: Path) -> None:
    """`init` says what was made; commands and programs go by it; a store that is there is left alone."""
    path = tmp_path / "made"
    made = json_of("init", path, "--partition", "1h", "--retention", "7d", "--ttl", "0", "--max-redeliveries", "5")
    assert made == {"partition_ms": 3_600_000, "policies": {"retention_ms": 604_800_000, "max_redeliveries": 5}}
    ok("send", "--create", path, "t", "x", "--at", FUTURE_MS)
    assert stored_span_ms(path) == 3_600_000
    assert json_of("policies", "get", path, "--topic", "t")["effective"]["max_redeliveries"] == 5
    assert "there is a store already" in refused("init", path)
    assert "partition_ms=0" in refused("init", tmp_path / "other", "--partition", "0")
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("")
    refused("init", tmp_path / "file")


@pytest.fixture
def recurring(tmp_path: Path) -> Path:
    """A store with two schedules in two topics."""
    with make_store(tmp_path / "store") as store:
        assert isinstance(store.topic("t").every("beat", interval=3_600, payload=b"tick"), Schedule)
        store.topic("other").every("daily", cron="0 9 * * *", timezone="Europe/Rome")
    return tmp_path / "store"


def test_schedules_are_listed_of_the_store_and_of_a_topic(recurring: Path) -> None:
    """With what recurs when, and the pending occurrence."""
    assert {row["name"] for row in json_lines_of("schedules", "list", recurring)} == {"beat", "daily"}
    (beat,) = json_lines_of("schedules", "list", recurring, "--topic", "t")
    assert (beat["interval_ms"], beat["payload"], beat["next_due_ms"]) == (3_600_000, "tick", PAST_MS + 3_600_000)
    shown = ok("schedules", "list", recurring)
    assert "each 3600 s" in shown
    assert "0 9 * * * (Europe/Rome)" in shown
    assert "topic 'nothing' does not exist" in refused("schedules", "list", recurring, "--topic", "nothing")


def test_a_schedule_is_paused_resumed_and_removed(recurring: Path) -> None:
    """Each is known to the next command; what is not there is refused, or said not to be there."""
    assert json_of("schedules", "pause", recurring, "t", "beat")["paused"]
    assert "paused" in ok("schedules", "list", recurring, "--topic", "t")
    assert "next at" in ok("schedules", "resume", recurring, "t", "beat")
    assert json_of("schedules", "remove", recurring, "t", "beat") == {"removed": True}
    assert "no such schedule" in ok("schedules", "remove", recurring, "t", "beat")
    assert "no such schedule" in refused("schedules", "pause", recurring, "t", "beat")
    assert json_lines_of("schedules", "list", recurring, "--topic", "t") == []


def test_a_schedule_is_added_shown_and_replaced(recurring: Path) -> None:
    """The command says which schedule it replaced; the same again replaces nothing."""
    place = ("schedules", "add", recurring, "t", "promo")
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
    shown = json_of("schedules", "show", recurring, "t", "promo")
    upcoming = shown.pop("upcoming")
    assert shown == made
    assert [due["nominal_ms"] - made["next_nominal_ms"] for due in upcoming] == [0, 5_400_000, 10_800_000]
    assert all(0 <= due["due_ms"] - due["nominal_ms"] <= 300_000 for due in upcoming)
    text = ok("schedules", "show", recurring, "t", "promo", "--next", 1)
    for part in ("each 5400 s", "1 of 3", "skip", "600 s", "2100-01-01T00:00:00Z", "a=b"):
        assert part in text
    assert "replaces: each 5400 s" in ok(*place, "--cron", "@weekly", "--timezone", "Europe/Rome")
    replaced = json_of(*place, "--interval", "2h")["replaced"]
    assert (replaced["cron"], replaced["timezone"]) == ("0 0 * * 0", "Europe/Rome")
    assert ok(*place, "from stdin", "--interval", "1d").startswith("next at ")


def test_a_schedule_that_was_sent_to_its_end_says_so(recurring: Path) -> None:
    """It is listed until it is removed, and has no occurrence to show."""
    with make_store(recurring) as store:
        store.topic("t").every("once", interval=1, count=1)
    with DelayedStore.open(recurring, clock=ManualClock(FUTURE_MS)) as store:
        store.tick()
    assert json_of("schedules", "show", recurring, "t", "once")["upcoming"] == []
    assert "ended" in ok("schedules", "list", recurring, "--topic", "t")


NOT_ADDED: list[tuple[list[str], list[str]]] = [
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
]


def test_what_cannot_be_added_is_refused_by_name_and_value(recurring: Path) -> None:
    """The store stays as it was."""
    before = json_lines_of("schedules", "list", recurring)
    for arguments, named in NOT_ADDED:
        said = refused("schedules", "add", recurring, *arguments)
        assert all(part in said for part in named), said
        assert json_lines_of("schedules", "list", recurring) == before
        assert "no such schedule" in refused("schedules", "show", recurring, "t", "s")


@pytest.mark.parametrize("fields", [b"junk", b"\x80", b"\x83\xa6paused\xc2"])
def test_a_schedule_that_cannot_be_read_is_a_finding_and_is_discarded(recurring: Path, fields: bytes) -> None:
    """It recurs no more, so check says so; repair removes it, and the topic's other schedules go on."""
    with make_store(recurring) as store:
        store.topic("t").every("good", interval=60)
        state = store._engine.topics.get(TopicName.parse("t"))

        def spoil(transaction: Transaction) -> None:
            transaction.put(fmt.schedule_key(state.topic_id, "beat"), fields)

        store._engine.storage.main.write(spoil)
    with make_store(recurring) as store:
        (finding,) = store.check()
        assert finding.code == "corrupt-record"
        assert "schedule" in finding.message
    report = repair_store(recurring, recurring.with_name("given-up.jsonl"))
    assert report.given_up == 1
    assert report.left == []
    with DelayedStore.open(recurring) as store:
        assert [schedule.name for schedule in store.topic("t").schedules()] == ["good"]
        assert list(store.check()) == []
