"""Power cuts amid keys, pauses, quotas and policies: what was set holds, what was under way is whole or not there.

    python -m tests.disaster.power_cut power_keys [--states 500] [--seed 7] [--durability relaxed]

The recorded process sends, replaces, cancels and moves by keys, pauses and sets policies by scope. It says each change
before it makes it and when it has returned. On each disk that a cut could have left, the store is as before the change
or as after it, in all that is compared; a key is of one pending message at most, which it finds; and a quota counts
what is pending. With durability "relaxed" what was done last may be lost, and the rules on keys and quotas hold.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from duelog import DelayedStore, ManualClock, Message, MessageId, Policies, Topic
from duelog.errors import QuotaExceeded
from duelog.markers.pending_entries import Outcome
from duelog.sending.withdrawal import Withdrawals
from duelog.store.config import SendDurability
from duelog.store.held import Held as Block
from duelog.store.policy.policy_records import Scope
from tests.disaster.power_story import Facts
from tests.disaster.working import CONFIG, SPAN_MS, START_MS, say

TOPIC, KEYS, SUBSCRIPTIONS = "t", ("k1", "k2", "k3"), ("a", "b")
PLACES: tuple[dict[str, str], ...] = (
    {},
    {"namespace": "public/default"},
    {"topic": TOPIC},
    {"topic": TOPIC, "subscription": "a"},
)
STEPS = 45
MOST_AT_ONCE = 5
"""Messages of a batch; so many that were to replace others are left over by one cut, and counted as pending."""
DAY_MS = 86_400_000


class Held(NamedTuple):
    """The state of a key: its last message, and until when it holds at least. message_id None: not heard of."""

    text: str
    message_id: list[int] | None
    until_ms: int
    due_ms: int


@dataclass
class World:
    """The state that a store is to have."""

    texts: set[str] = field(default_factory=set)
    """Messages, pending or in the backlogs."""
    keys: dict[str, Held] = field(default_factory=dict)
    pauses: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(SUBSCRIPTIONS, 0))
    """Until when each subscription is paused; 0: it is not, None: for ever."""
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By scope, what is set there."""

    def after(self, change: dict[str, Any]) -> Self:
        """Another, with a change made."""
        made = deepcopy(self)
        made.texts -= set(change.get("gone", ()))
        made.texts |= set(change.get("sent", ()))
        for key, held in change.get("keys", {}).items():
            made.keys.pop(key, None)
            if held is not None:
                made.keys[key] = Held(*held)
        made.pauses.update(change.get("pauses", {}))
        made.policies.update(change.get("policies", {}))
        return made


class Work:
    """Changes of a store, said before and after."""

    def __init__(self, store: DelayedStore, clock: ManualClock, source: random.Random, world: World, tag: str) -> None:
        self.store, self.clock, self.source, self.world, self.tag = store, clock, source, world, tag
        self.topic = store.topic(TOPIC)

    def step(self, number: int) -> None:
        """One change, or time goes on."""
        steps: tuple[Callable[[str], None], ...] = (
            self.send, self.send, self.replace, self.replace, self.replace, self.batch, self.batch, self.cancel,
            self.move, self.plain, self.pause, self.set_policies, self.go_on, self.go_on,
        )  # fmt: skip
        self.source.choice(steps)(f"{self.tag}-{number}")

    def change(self, change: dict[str, Any], make: Callable[[], dict[str, Any] | None]) -> None:
        """`make` gives what is known afterwards only; None: nothing was changed."""
        say("try", change)
        try:
            known = make()
        except QuotaExceeded:
            known = None
        if known is None:
            say("not")
        else:
            self.world = self.world.after({**change, **known})
            say("done", {**change, **known})

    def pending(self, key: str) -> Held | None:
        """Pending messages of a key, by what was sent; due ones have fired."""
        held = self.world.keys.get(key)
        return held if held is not None and held.due_ms > self.clock.now_ms() else None

    def send(self, number: str, *, replaces: bool = False) -> None:
        key, now_ms = self.source.choice(KEYS), self.clock.now_ms()
        text, due_ms = f"{key}:{number}", now_ms + self.source.randrange(1_000, 3 * SPAN_MS)
        hold = self.source.choice((None, None, 40))
        until_ms = 0 if hold is None else now_ms + 1_000 * hold
        held, pending = self.world.keys.get(key), self.pending(key)
        known = held is not None and not replaces and (pending is not None or held.until_ms > now_ms)

        def make() -> dict[str, Any] | None:
            message_id = self.topic.send(
                text.encode(), deliver_at=due_ms, dedup_key=key, dedup_for=hold, replace=replaces
            )
            if known and held is not None and list(message_id) != held.message_id:
                say("trouble", f"{key} is of {held}, and was answered with {message_id}")
            return None if known else {"keys": {key: [text, list(message_id), until_ms, due_ms]}}

        gone = [pending.text] if pending is not None and replaces else []
        change = {"gone": gone, "sent": [text], "keys": {key: [text, None, until_ms, due_ms]}}
        self.change({} if known else change, make)

    def replace(self, number: str) -> None:
        self.send(number, replaces=True)

    def batch(self, number: str) -> None:
        """Messages with keys and without, as if sent one after the other, and all or none."""
        now_ms, messages = self.clock.now_ms(), list[Message]()
        keys: dict[str, Held | None] = {key: self.world.keys.get(key) for key in KEYS}
        rows: dict[str, int] = {}
        """The message, of those that this sends, that holds a key now."""
        gone, sent = list[str](), list[str]()
        for at in range(self.source.randrange(2, MOST_AT_ONCE + 1)):
            key, replaces = self.source.choice((*KEYS, None)), self.source.random() < 0.5
            hold = None if key is None else self.source.choice((None, 40))
            text, due_ms = f"{key or 'plain'}:{number}-{at}", now_ms + self.source.randrange(1_000, 3 * SPAN_MS)
            replaces = replaces and key is not None
            message = Message(text.encode(), deliver_at=due_ms, dedup_key=key, dedup_for=hold, replace=replaces)
            messages.append(message)
            held = None if key is None else keys[key]
            if held is not None and (held.due_ms > now_ms or (held.until_ms > now_ms and not replaces)):
                if not replaces:
                    continue
                gone.append(held.text)
            sent.append(text)
            if key is not None:
                keys[key], rows[key] = Held(text, None, 0 if hold is None else now_ms + 1_000 * hold, due_ms), at

        changed = {key: held for key, held in keys.items() if held is not None and key in rows}

        def make() -> dict[str, Any]:
            ids = self.topic.send_batch(messages)
            return {"keys": {key: [held.text, list(ids[rows[key]]), *held[2:]] for key, held in changed.items()}}

        stays = [text for text in sent if text not in gone]
        self.change({"gone": gone, "sent": stays, "keys": changed}, make)

    def cancel(self, _: str) -> None:
        key = self.source.choice(KEYS)
        pending = self.pending(key)

        def make() -> dict[str, Any] | None:
            if self.topic.cancel_key(key) != (pending is not None):
                say("trouble", f"cancelling {key}, which was of {pending}, was said to do something else")
            return {} if pending is not None else None

        self.change({} if pending is None else {"gone": [pending.text], "keys": {key: None}}, make)

    def move(self, _: str) -> None:
        key, now_ms = self.source.choice(KEYS), self.clock.now_ms()
        pending, due_ms = self.pending(key), now_ms + self.source.choice((0, 5_000, 2 * SPAN_MS))
        if pending is None or pending.message_id is None:
            return
        old = MessageId(*pending.message_id)

        def make() -> dict[str, Any] | None:
            new = self.topic.reschedule(old, deliver_at=due_ms)
            if new is None:
                say("trouble", f"{pending} could not be moved")
                return None
            return {"keys": {key: [pending.text, list(new), pending.until_ms, due_ms]}}

        self.change({"keys": {key: [pending.text, None, pending.until_ms, due_ms]}}, make)

    def plain(self, number: str) -> None:
        texts = [f"plain:{number}-{at}" for at in range(self.source.randrange(1, 5))]
        messages = [Message(text.encode(), deliver_after=self.source.randrange(1, 150)) for text in texts]

        def make() -> dict[str, Any]:
            self.topic.send_batch(messages)
            return {}

        self.change({"sent": texts}, make)

    def pause(self, _: str) -> None:
        name, ms = self.source.choice(SUBSCRIPTIONS), self.source.choice((None, 0, 20_000, 10 * DAY_MS))
        until_ms = ms and self.clock.now_ms() + ms
        admin = self.topic.subscription(name)

        def make() -> dict[str, Any]:
            admin.resume() if until_ms == 0 else admin.pause(until_ms)
            return {}

        self.change({"pauses": {name: until_ms}}, make)

    def set_policies(self, _: str) -> None:
        place: dict[str, Any] = self.source.choice(PLACES)
        scope = str(Scope.of(**place))
        values: dict[str, Any] = {"max_redeliveries": self.source.randrange(5), "max_in_flight": 100}
        if "subscription" not in place:
            days = self.source.randrange(1, 9)
            values = {"max_pending": self.source.choice((0, 6, 25)), "retention_ms": days * DAY_MS}
        values = dict(self.source.sample(sorted(values.items()), self.source.randrange(1, 3)))
        how = self.source.choice(("set", "update", "remove"))
        before = self.world.policies.get(scope, {})

        def make() -> dict[str, Any]:
            if how == "set":
                self.store.set_policies(Policies(**values), **place)
            elif how == "update":
                self.store.update_policies(**place, **values)
            elif self.store.remove_policies(**place) != bool(before):
                say("trouble", f"removing the policies of {scope}, {before}, was said to do something else")
            return {}

        self.change(
            {"policies": {scope: {} if how == "remove" else (before if how == "update" else {}) | values}}, make
        )

    def go_on(self, _: str) -> None:
        self.clock.advance(self.source.randrange(30_000))
        say("clock", self.clock.now_ms())
        while self.store.tick().fired:
            pass


def work(path: Path, seed: int, durability: SendDurability) -> None:
    """Two sessions on one store; the first ends with a close, the second with the process."""
    source, clock, world = random.Random(seed), ManualClock(START_MS), World()
    for session in range(2):
        store = DelayedStore.open(path, replace(CONFIG, durability=durability), clock=clock)
        if session == 0:
            for name in SUBSCRIPTIONS:
                store.topic(TOPIC).subscribe(name, type="shared").close()
            world.policies = policies_of(store)
            say("begun", world.policies)
        worker = Work(store, clock, source, world, str(session))
        for number in range(STEPS):
            worker.step(number)
        world = worker.world
        if session == 0:
            store.close()
    os._exit(0)


def policies_of(store: DelayedStore) -> dict[str, dict[str, Any]]:
    """Policies by scope."""
    return {scope: dict(policies.fields_set()) for scope, policies in store.all_policies().items()}


class Told(Facts):
    """Facts before a cut: the state, and the one that there may be instead."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False
        self.worlds = [World()]
        self.troubles: list[str] = []

    def take(self, fact: list[Any]) -> None:
        match fact:
            case ["begun", policies]:
                self.begun = True
                self.worlds = [World(policies=policies)]
            case ["try", change]:
                self.worlds = [self.worlds[0], self.worlds[0].after(change)]
            case ["not"]:
                self.worlds = self.worlds[:1]
            case ["done", change]:
                self.worlds = [self.worlds[0].after(change)]
            case ["clock", ms]:
                self.now_ms = ms
            case ["trouble", text]:
                self.troubles.append(text)

    def look(self, store: DelayedStore, clock: ManualClock, *, relaxed: bool) -> list[str]:
        found = list(self.troubles)
        while store.tick().fired:
            pass
        if not self.begun or (relaxed and not store.topic(TOPIC).exists()):
            return found
        seen = Seen(store)
        found += seen.troubles
        if not relaxed:
            differ = [seen.differs_from(world, clock.now_ms()) for world in self.worlds]
            found += sorted(differ, key=len)[0]
            if not 0 <= seen.left_over <= MOST_AT_ONCE:
                found.append(f"{seen.left_over} more are counted than are pending")
        return found + _quota(store, seen) + _go_on(store, seen, clock)


class Seen:
    """The state of a store."""

    def __init__(self, store: DelayedStore) -> None:
        self.topic = topic = store.topic(TOPIC)
        self.pending = {each.payload.decode(): list(each.message_id) for each in topic.scheduled()}
        self.backlogs = {name: backlog(topic, name) for name in topic.subscriptions()}
        self.keys = {key: found for key in KEYS if (found := topic.find(key)) is not None}
        stats = {name: topic.subscription(name).stats() for name in self.backlogs}
        self.pauses = {name: each.paused_until_ms if each.paused else 0 for name, each in stats.items()}
        self.policies = policies_of(store)
        self.troubles = []
        waiting = Counter(each.payload.decode() for each in topic.scheduled())
        for name, texts in self.backlogs.items():
            doubled = [text for text, count in (texts + waiting).items() if count > 1]
            self.troubles += [f"{text} is there twice for {name}" for text in doubled]
        under = {key: [text for text in self.pending if text.startswith(f"{key}:")] for key in KEYS}
        for key, waits in under.items():
            finds = [self.keys[key].payload.decode()] if key in self.keys else []
            if waits != finds:
                self.troubles.append(f"{waits} are pending under {key}, which finds {finds}")
        self.left_over = topic.stats().pending - len(self.pending)
        if sorted(self.keys) != list(topic.keys()):
            self.troubles.append(f"{list(topic.keys())} are listed, and {sorted(self.keys)} found")

    def differs_from(self, world: World, now_ms: int) -> list[str]:
        found: list[str] = []
        for name in SUBSCRIPTIONS:
            texts = {*self.backlogs.get(name, ()), *self.pending}
            if lost := world.texts - texts:
                found.append(f"{name} never gets {sorted(lost)}")
            if more := texts - world.texts:
                found.append(f"{name} gets {sorted(more)}, which was taken back or never sent")
        for key, held in world.keys.items():
            here = self.keys.get(key)
            if here is None and held.text in self.pending:
                found.append(f"{key} does not find {held}")
            if here is not None and here.payload.decode() != held.text:
                found.append(f"{key} finds {here}, and is of {held}")
            if here is not None and held.message_id not in (None, list(here.message_id)):
                found.append(f"{key} finds {here.message_id}, and is of {held}")
        for name, until_ms in world.pauses.items():
            wanted = 0 if until_ms and until_ms <= now_ms else until_ms
            if self.pauses.get(name, -1) != wanted:
                found.append(f"{name} is paused until {self.pauses.get(name, -1)}, and not {wanted}")
        if self.policies != (policies := {scope: each for scope, each in world.policies.items() if each}):
            found.append(f"policies are {self.policies}, and not {policies}")
        return found


def backlog(topic: Topic, name: str) -> Counter[str]:
    """How often each message is in the backlog of a subscription."""
    return Counter(each.payload.decode() for each in topic.subscription(name).peek(10_000))


def _quota(store: DelayedStore, seen: Seen) -> list[str]:
    """Up to the quota all is taken, and nothing beyond; what was taken is cancelled again."""
    limit = store.effective_policies(TOPIC).max_pending
    if not limit:
        return []
    one, topic = Message(b"one more", deliver_after=50), seen.topic
    free = max(limit - topic.stats().pending, 0)
    try:
        topic.send_batch([one] * (free + 1))
        return [f"{len(seen.pending)} are pending, and {free + 1} more are taken, of {limit}"]
    except QuotaExceeded:
        taken = topic.cancel_batch(topic.send_batch([one] * free)) if free else []
        return [f"what was just sent is {each}" for each in taken if each is not Outcome.CANCELLED]


def _go_on(store: DelayedStore, seen: Seen, clock: ManualClock) -> list[str]:
    """Keys hold and are freed, pauses hold, and everything fires once."""
    found, topic = list[str](), seen.topic
    for place in PLACES:
        store.remove_policies(**place)
    there = set(seen.pending)
    for key in KEYS:
        waiting = seen.keys.get(key)
        if waiting is not None:
            again = topic.send(b"not stored", deliver_after=60, dedup_key=key)
            if again != waiting.message_id:
                found.append(f"{key} is of {waiting.message_id}, and was answered with {again}")
            there.discard(waiting.payload.decode())
        if topic.cancel_key(key) != (waiting is not None) or topic.find(key) is not None:
            found.append(f"{key}, of {waiting}, is not free after cancelling it")
        first = topic.send(b"first", deliver_after=60, dedup_key=key, replace=True)
        second = topic.send(f"{key}:second".encode(), deliver_after=60, dedup_key=key, replace=True)
        there.add(f"{key}:second")
        if topic.state(first) != "cancelled" or topic.find(key) is None or second == first:
            found.append(f"{key} is not replaced")
    for name, until_ms in seen.pauses.items():
        with topic.subscribe(name, type="shared") as consumer:
            got = len(consumer.receive(10_000))
            wanted = sum(seen.backlogs[name].values()) if until_ms == 0 else 0
            if got != wanted:
                found.append(f"{name}, paused until {until_ms}, gets {got} messages, and not {wanted}")
    clock.advance(10 * SPAN_MS)
    while store.tick().fired:
        pass
    for name, texts in seen.backlogs.items():
        if backlog(topic, name) != texts + Counter(there):
            found.append(f"{name} gets {backlog(topic, name)}, and not {texts + Counter(there)}")
    return found


def replaced_in_two_steps() -> None:
    """The pending message of a key is cancelled in a transaction before that which sends the other."""
    replacing = Withdrawals.replacing

    def apart(self: Any, held: Any, batches: Any) -> Any:
        for new in batches:
            with Block() as before:
                self._entries.enter_gate(before)
                for known, ids in new.olds_by_partition().items():
                    logs, outcomes = self._entries.located(before, new.log, ids, known)
                    for found in logs:
                        cancel = partial(
                            self._entries.cancel, topic_id=new.log.topic_id, found=found, outcomes=outcomes
                        )
                        self._main.write(cancel)
        return replacing(self, held, batches)

    setattr(Withdrawals, "replacing", apart)  # noqa: B010 - what mypy does not follow


MUTANTS: dict[str, Callable[[], None]] = {"replaced_in_two_steps": replaced_in_two_steps}
TOLD = Told
