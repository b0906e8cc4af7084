"""Moving a namespace: what goes along, what stays, and attempts that are interrupted at every step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, Message, Policies
from duelog.broker.cluster.placement import place_namespace, read_placement
from duelog.store.clock import ManualClock, SystemClock
from duelog.store.config import StoreConfig
from duelog.store.errors import InvalidArgument, StoreLocked
from duelog.tools import move_namespace as module
from duelog.tools.move_namespace import Moved, move_namespace
from tests.conftest import present
from tests.tools.command_line import json_of, refused

MOVES, STAYS, OTHER = "acme/orders", "acme/mail", "other/orders"
NOW_MS = SystemClock().now_ms() // 1_000 * 1_000
CONFIG = StoreConfig(background=False)


class Fleet:
    """Broker a with a store of three namespaces, broker b with none."""

    def __init__(self, folder: Path) -> None:
        self.placement = folder / "placement.toml"
        self.a, self.b = folder / "a", folder / "b"
        self.placement.write_text(
            'default = "a"\n[brokers.a]\nurl = "pulsar://h:1"\nstore = "a"\n'
            '[brokers.b]\nurl = "pulsar://h:2"\nstore = "b"\n'
        )
        with DelayedStore.open(self.a, CONFIG, clock=ManualClock(NOW_MS)) as store:
            for namespace in (MOVES, STAYS, OTHER):
                fill(store, namespace)
        self.before = {namespace: seen(self.a, namespace) for namespace in (MOVES, STAYS, OTHER)}

    def move(self) -> Moved:
        """To b."""
        return move_namespace(self.placement, MOVES, "b")

    def check(self) -> None:
        """Everything is where it belongs, once, and as it was."""
        owner = present(read_placement(self.placement).owner(MOVES))
        assert owner.name == "b"
        assert seen(self.b, MOVES) == self.before[MOVES]
        empty = seen(self.a, MOVES)
        assert empty == {"topics": [], "policies": {}, "documents": {}}
        for namespace in (STAYS, OTHER):
            assert seen(self.a, namespace) == self.before[namespace]
            assert seen(self.b, namespace) == empty
        for path in (self.a, self.b):
            with DelayedStore.open(path, CONFIG) as store:
                assert [each for each in store.check(deep=True) if each.severity == "error"] == []
                assert store.policies() is not None
        with DelayedStore.open(self.b, CONFIG) as store:
            assert {key for key, _ in store.documents.items()} == {
                "tenant/acme", f"namespace/{MOVES}", f"topic/{MOVES}/t", f"schema/{MOVES}/t/0", f"moved/{MOVES}",
                "setting/x",
            }  # fmt: skip


def fill(store: DelayedStore, namespace: str) -> None:
    """Messages delivered, acknowledged, pending and cancelled; policies and documents at every scope."""
    topic = store.topic(f"{namespace}/t")
    consumer, other = topic.subscribe("s", type="shared"), topic.subscribe("all")
    for number in range(20):
        topic.send(b"%d of %s" % (number, namespace.encode()), key=str(number), properties={"n": str(number)})
    held = consumer.receive(20)
    for number in (0, 1, 2, 5, 7):
        consumer.ack(held[number])
    for number in range(30):
        topic.send(b"later %d" % number, deliver_at=NOW_MS + 3_600_000 * (number + 1))
    topic.cancel(topic.send(b"never", deliver_at=NOW_MS + 3_600_000))
    topic.producer("p").send(Message(b"numbered", deliver_at=NOW_MS + 3_600_000), sequence_id=41)
    store.topic(f"{namespace}/empty").create()
    topic.every("daily", cron="0 9 * * *", payload=b"wake up")
    consumer.close()
    other.close()
    policies = Policies(retention_ms=1_000)
    store.set_policies(policies)
    store.set_policies(policies, namespace=namespace)
    store.set_policies(policies, topic=f"{namespace}/t")
    store.set_policies(Policies(ack_timeout_ms=5_000), topic=f"{namespace}/t", subscription="s")
    for key in (f"tenant/{namespace.partition('/')[0]}", f"namespace/{namespace}", f"topic/{namespace}/t",
                f"schema/{namespace}/t/0", "setting/x"):  # fmt: skip
        store.documents.put(key, json.dumps({"of": key}).encode())


def seen(path: Path, namespace: str) -> dict[str, Any]:
    """All that a store has of a namespace."""
    with DelayedStore.open(path, CONFIG, clock=ManualClock(NOW_MS)) as store:
        topics = []
        for topic in store.topics(namespace):
            due = {
                name: [(each.message_id, each.position, each.payload, each.key, each.properties)
                       for each in topic.subscription(name).peek(1_000)]
                for name in topic.subscriptions()
            }  # fmt: skip
            pending = [(each.message_id, each.due_ms, each.payload) for each in topic.scheduled()]
            topics.append(
                (topic.name, due, pending, [each.name for each in topic.schedules()], topic.producer_number("p"))
            )
        policies = {scope: value for scope, value in store.all_policies().items() if f"{namespace}" in scope}
        documents = {
            key: document.value
            for key, document in store.documents.items()
            if f"{namespace}" in key and not key.startswith("moved/")
        }
    return {"topics": topics, "policies": policies, "documents": documents}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two brokers, of which the second has no store yet."""
    return Fleet(tmp_path)


def interrupt(fleet: Fleet, where: Any, step: str, *, before: bool) -> None:
    """Move, with an interrupt right before or right after a step."""
    real: Callable[..., Any] = getattr(where, step)

    def interrupted(*arguments: Any) -> Any:
        if not before:
            real(*arguments)
        raise KeyboardInterrupt

    with patch.object(where, step, interrupted), pytest.raises(KeyboardInterrupt):
        fleet.move()


def test_everything_of_a_namespace_goes_along_and_nothing_else(fleet: Fleet) -> None:
    """Ids, positions, acknowledgements, what is pending, schedules, policies and documents; the command tells it."""
    assert json_of("move-namespace", MOVES, "--to", "b", "--placement", fleet.placement) == {
        "source": str(fleet.a), "target": str(fleet.b), "topics": 2, "pending": 32, "backlog": 15 + 20, "copied": True
    }  # fmt: skip
    fleet.check()
    fleet.move()  # again is nothing
    fleet.check()


@pytest.mark.parametrize(
    ("step", "before"),
    [
        ("backup", False),
        ("_remove_rest", False),
        ("move", False),
        ("place_namespace", True),
        ("_remove", True),
        ("_remove", False),
    ],
)
def test_a_move_that_is_interrupted_goes_on_or_begins_anew(fleet: Fleet, step: str, before: bool) -> None:
    """Right before or right after each step: until the switch the old store has it all, and another attempt ends it."""
    interrupt(fleet, DelayedStore if step == "backup" else module, step, before=before)
    owner = present(read_placement(fleet.placement).owner(MOVES))
    if owner.name == "a":
        assert seen(fleet.a, MOVES) == fleet.before[MOVES]
    fleet.move()
    fleet.check()


@pytest.mark.parametrize("interrupted", [True, False], ids=["left by a move", "of others"])
def test_a_new_store_that_was_used_before_the_switch_is_not_removed(fleet: Fleet, interrupted: bool) -> None:
    """An attempt was interrupted there, and a broker has served the store since, or it was never there for this."""
    if interrupted:
        interrupt(fleet, module, "place_namespace", before=True)
    with DelayedStore.open(fleet.b, CONFIG) as store:
        store.topic("x").send(b"mine")
    with pytest.raises(InvalidArgument, match="is not empty"):
        fleet.move()
    with DelayedStore.open(fleet.b, CONFIG) as store:
        assert store.topic("x").exists()


def test_a_second_command_leaves_alone_what_the_first_has_made(fleet: Fleet) -> None:
    """The first is about to switch the table, and has the old store: the new one, which no table names yet, stays."""
    interrupt(fleet, module, "place_namespace", before=True)
    with DelayedStore.open(fleet.a, CONFIG), pytest.raises(StoreLocked):
        fleet.move()
    assert seen(fleet.b, MOVES) == fleet.before[MOVES]


def test_a_table_that_is_put_back_amid_the_last_step_has_nothing_removed(fleet: Fleet) -> None:
    """The old store has not all of the namespace any more: the new one stays, though no broker has used it."""
    interrupt(fleet, module, "_remove", before=False)
    place_namespace(fleet.placement, MOVES, "a")
    with pytest.raises(InvalidArgument, match="is not empty"):
        fleet.move()
    assert seen(fleet.b, MOVES) == fleet.before[MOVES]


def test_topics_that_came_to_the_old_store_after_a_move_are_not_removed(fleet: Fleet) -> None:
    """The same command again finishes what was interrupted, no more."""
    fleet.move()
    with DelayedStore.open(fleet.a, CONFIG) as store:
        store.topic(f"{MOVES}/late").send(b"by mistake")
    with pytest.raises(InvalidArgument, match="topics of it that came later"):
        fleet.move()
    with DelayedStore.open(fleet.a, CONFIG) as store:
        assert store.topic(f"{MOVES}/late").exists()


def test_a_store_that_is_served_is_not_moved_from(fleet: Fleet) -> None:
    """The broker has to be ended first; nothing has changed."""
    with DelayedStore.open(fleet.a, CONFIG), pytest.raises(StoreLocked):
        fleet.move()
    assert not fleet.b.exists()
    assert fleet.move().copied


@pytest.mark.parametrize("target", ["file", "link", "gone"])
def test_a_place_that_is_no_store_is_named(fleet: Fleet, target: str) -> None:
    """Before anything is copied; or the table names it, and it is not there any more."""
    if target == "file":
        fleet.b.touch()
    elif target == "link":
        fleet.b.symlink_to(fleet.b.with_name("elsewhere"))
    else:
        place_namespace(fleet.placement, MOVES, "b")
    said = refused("move-namespace", MOVES, "--to", "b", "--placement", fleet.placement)
    assert f"store='{fleet.b}': is no {'store' if target == 'gone' else 'directory'}" in said
    assert "copying" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([MOVES, "--to", "c"], "broker='c'"),
        (["acme", "--to", "b"], "namespace='acme'"),
        ([MOVES, "--to", "a"], "is served by the store"),
        (["acme/oders", "--to", "b"], "a has no topic, policy or document of it"),
    ],
)
def test_what_cannot_be_moved_is_named(fleet: Fleet, arguments: list[str], message: str) -> None:
    """In one line, with status 2."""
    assert message in refused("move-namespace", *arguments, "--placement", fleet.placement)
    assert not fleet.b.exists()


def test_a_namespace_that_has_no_topic_yet_is_moved(fleet: Fleet) -> None:
    """It was made over HTTP, or has a policy."""
    with DelayedStore.open(fleet.a, CONFIG) as store:
        store.set_policies(Policies(max_redeliveries=3), namespace="acme/new")
    assert move_namespace(fleet.placement, "acme/new", "b").topics == 0
    with DelayedStore.open(fleet.b, CONFIG) as store:
        assert present(store.policies(namespace="acme/new")).max_redeliveries == 3
