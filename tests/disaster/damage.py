"""A small store whose every message is known, damaged on a copy, and what a check and a use of the copy come to.

Check and use run in forked children: a death by signal is an outcome like any other. The fork comes from a process
without threads and without an open environment.
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duelog import DelayedStore, Finding, ManualClock, MessageId, ReceivedMessage, StoreConfig, Topic
from duelog.tools import store_check
from tests.conftest import HOUR_MS, present
from tests.disaster.running import forked
from tests.disaster.wal_stores import in_wal, needed, salvaged, with_wal
from tests.model.driver import copy_store

START_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
CONFIG = StoreConfig(
    partition_ms=HOUR_MS,
    ledger_max_entries=40,
    snapshot_every_entries=50,
    run_entries=16,
    inline_delay_ms=0,
    background=False,
)
TOPICS = ("bills", "mails")
SUBSCRIPTION = "reader"


@dataclass
class Facts:
    """The content of a store: payloads by id, the ids that must come out of it, those that no partition has."""

    payloads: dict[str, str] = field(default_factory=dict)
    owed: set[str] = field(default_factory=set)
    in_wal: list[str] = field(default_factory=list)

    def sent(self, message_id: MessageId, payload: bytes) -> None:
        self.payloads[str(message_id)] = payload.decode()
        self.owed.add(str(message_id))

    def gone(self, message_id: MessageId) -> None:
        self.owed.discard(str(message_id))


def build(path: Path, config: StoreConfig = CONFIG, many: int = 1) -> Facts:
    """A store with a closed partition, a begun one with a snapshot, future ones, markers, acknowledgements, a WAL.

    It is a copy of one that was open, so that the WAL holds what no partition has. many: times so many messages.
    """
    facts = Facts()
    clock = ManualClock(START_MS)
    live = path.with_name(path.name + "-live")
    numbers = itertools.count(1)

    def send(topic: Topic, count: int, first_ms: int, step_ms: int, size: int) -> list[MessageId]:
        payloads = [f"{number}:".encode() * (size // 4 + 1) for number in itertools.islice(numbers, count)]
        dues = [clock.now_ms() + first_ms + at * step_ms for at in range(count)]
        ids = topic.send_payloads(payloads, deliver_at=dues)
        for message_id, payload in zip(ids, payloads, strict=True):
            facts.sent(message_id, payload)
        return list(ids)

    with DelayedStore.open(live, config, clock=clock) as store:
        topics = [store.topic(name) for name in TOPICS]
        subscriptions = [topic.subscribe(SUBSCRIPTION) for topic in topics]
        for topic in topics:
            send(topic, 60 * many, 1_000, 10_000 // many, 30)
            send(topic, 12, 2_000, 20_000, 3_000)
            send(topic, 50 * many, HOUR_MS, 60_000 // many, 100)
            send(topic, 30 * many, 3 * HOUR_MS, 60_000 // many, 100)
            send(topic, 3 * many, 0, 0, 9_000 // many)
        clock.advance(20 * 60_000)
        for topic, subscription in zip(topics, subscriptions, strict=True):
            store.tick()
            for at, message in enumerate(subscription.receive(50, timeout=0)):
                if at % 3:
                    subscription.ack(message)
                    facts.gone(message.message_id)
            future = send(topic, 6, 2 * HOUR_MS, 1_000, 200)
            for message_id in future[:2]:
                assert topic.cancel(message_id)
                facts.gone(message_id)
            moved = present(topic.reschedule(future[3], deliver_at=clock.now_ms() + 4 * HOUR_MS))
            facts.gone(future[3])
            facts.sent(moved, facts.payloads[str(future[3])].encode())
        store.tick()
        clock.advance(HOUR_MS)
        store.tick()
        for topic in topics:
            send(topic, 5, 10 * 60_000, 1_000, 20)
            facts.sent(topic.send(b"last", deliver_after=30 * 60), b"last")
            send(topic, 1, 31 * 60_000, 1, 20)
        assert list(store.check(deep=True)) == []
    _leave_wal(live, path, config, clock, facts)
    shutil.rmtree(live)
    return facts


def _leave_wal(live: Path, path: Path, config: StoreConfig, clock: ManualClock, facts: Facts) -> None:
    """Send one by one until segments have been used again, and leave the files as a crash then would."""
    with DelayedStore.open(live, with_wal(config), clock=clock) as store:
        for number in range(40):
            payload = f"single {number} ".encode() * (150 if number % 20 == 17 else 2)
            due_ms = START_MS + (2 + number // 2 % 2) * HOUR_MS + 1_800_000 + number
            facts.sent(store.topic(TOPICS[number % 2]).send(payload, deliver_at=due_ms), payload)
        copy_store(live, path)
    facts.in_wal = in_wal(path)
    assert len(salvaged(path)) > len(facts.in_wal) > 4
    assert len(needed(path)) == 1


@dataclass
class Outcome:
    """Findings, deliveries and deaths of a damaged copy."""

    codes: list[str]
    """Codes of the findings of `check`."""
    delivered: Sequence[tuple[str, str]]
    """Ids and payloads, in order."""
    error: str
    """The error that ended opening or using it, if one did."""
    died: list[str]
    """The signals or errors that ended a child."""

    @property
    def detected(self) -> bool:
        return bool(self.codes)

    @property
    def doubled(self) -> set[str]:
        """Ids delivered more than once."""
        return {each for each, times in Counter(each for each, _ in self.delivered).items() if times > 1}

    def wrong(self, facts: Facts) -> list[str]:
        """Ids delivered with a payload that is not theirs."""
        return [each for each, payload in self.delivered if facts.payloads.get(each) != payload]

    def missing(self, facts: Facts) -> set[str]:
        return facts.owed - {each for each, _ in self.delivered}


def check_in_fork(report: Path) -> Callable[[Path, bool], list[Finding]]:
    """A child as `duelog check` makes one, without starting an interpreter."""

    def check(path: Path, deep: bool) -> list[Finding]:
        work = lambda: [found.code for found in store_check.check_opened(path, deep)]  # noqa: E731
        codes, died = forked(work, report.with_name("grandchild"))
        found: object = [died] if died else codes
        assert isinstance(found, list)
        return [Finding("error", str(code), "", "", "") for code in found]

    return check


def use(path: Path, config: StoreConfig = CONFIG, hours: Sequence[int] = (30,)) -> dict[str, Any]:
    """Open a store for writing, have everything fire and receive it all, at each of the hours; then check it."""
    used: dict[str, Any] = {"delivered": [], "codes": [], "error": ""}
    clock = ManualClock(START_MS)
    try:
        clock.set(START_MS + hours[0] * HOUR_MS)
        with DelayedStore.open(path, config, clock=clock) as store:
            for hour in hours:
                clock.set(START_MS + hour * HOUR_MS)
                store.tick()
                for topic in list(store.topics()):
                    with topic.subscribe(SUBSCRIPTION) as subscription:
                        while messages := subscription.receive(1_000, timeout=0):
                            used["delivered"] += [(str(each.message_id), _text(each)) for each in messages]
                            subscription.ack(messages, durable=True)
            used["codes"] = [found.code for found in store.check(deep=True)]
    except Exception as found:
        used["error"] = f"{type(found).__name__}: {found}"
    return used


def _text(message: ReceivedMessage) -> str:
    return message.payload.decode(errors="replace")


def try_out(path: Path, report: Path) -> Outcome:
    """Check a damaged store, then use it, each in a child."""

    def check() -> list[str]:
        vars(store_check)["_check_in_child"] = check_in_fork(report)  # of this child alone
        return [found.code for found in store_check.check_store(path, deep=True)]

    codes, died_checking = forked(check, report)
    used, died = forked(lambda: use(path), report)
    fields: dict[str, Any] = used if isinstance(used, dict) else {"delivered": (), "error": ""}
    deaths = [f"check: {died_checking}"] if died_checking else []
    if died:
        deaths.append(f"use: {died}")
    return Outcome(list(codes) if isinstance(codes, list) else [], fields["delivered"], fields["error"], deaths)


def copy(source: Path, target: Path) -> Path:
    """A fresh copy of a closed store."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
