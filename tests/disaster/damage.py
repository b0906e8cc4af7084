"""A small store whose every message is known, damaged on a copy, and what a check and a use of the copy come to.

Check and use run in forked children: a death by signal is an outcome like any other. The fork comes from a process
without threads and without an open environment.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duelog import DelayedStore, Finding, ManualClock, Message, StoreConfig
from duelog.tools import store_check
from tests.disaster.wal_stores import in_wal, taken_home, with_wal
from tests.model.driver import copy_store

HOUR_MS = 3_600_000
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
_SECONDS = 60


@dataclass
class Facts:
    """What was put into the store: payloads by id, the ids that must come out of it, those that no partition has."""

    payloads: dict[str, str] = field(default_factory=dict)
    owed: set[str] = field(default_factory=set)
    in_wal: list[str] = field(default_factory=list)


def build(path: Path) -> Facts:
    """A store with a closed partition, a begun one with a snapshot, future ones, markers, acknowledgements, a WAL.

    It is a copy of one that was open, so that the WAL holds what no partition has.
    """
    facts = Facts()
    clock = ManualClock(START_MS)
    live = path.with_name(path.name + "-live")
    with DelayedStore.open(live, CONFIG, clock=clock) as store:
        subscriptions = {name: store.topic(name).subscribe(SUBSCRIPTION) for name in TOPICS}
        number = 0

        def send(name: str, count: int, first_ms: int, step_ms: int, size: int) -> list[str]:
            nonlocal number
            messages = []
            for at in range(count):
                number += 1
                payload = f"{number}:".encode() * (size // 4 + 1)
                messages.append(Message(payload, deliver_at=clock.now_ms() + first_ms + at * step_ms))
            ids = store.topic(name).send_batch(messages)
            for message_id, message in zip(ids, messages, strict=True):
                facts.payloads[str(message_id)] = bytes(message.payload).decode()
                facts.owed.add(str(message_id))
            return ids  # type: ignore[return-value]

        for name in TOPICS:
            send(name, 60, 1_000, 10_000, 30)
            send(name, 12, 2_000, 20_000, 3_000)
            send(name, 50, HOUR_MS, 60_000, 100)
            send(name, 30, 3 * HOUR_MS, 60_000, 100)
            send(name, 3, 0, 0, 9_000)
        clock.advance(20 * 60_000)
        for name in TOPICS:
            store.tick()
            for at, message in enumerate(subscriptions[name].receive(50, timeout=0)):
                if at % 3:
                    subscriptions[name].ack(message)
                    facts.owed.discard(str(message.message_id))
            future = send(name, 6, 2 * HOUR_MS, 1_000, 200)
            for message_id in future[:2]:
                assert store.topic(name).cancel(message_id)  # type: ignore[arg-type]
                facts.owed.discard(str(message_id))
            moved = store.topic(name).reschedule(future[3], deliver_at=clock.now_ms() + 4 * HOUR_MS)  # type: ignore[arg-type]
            facts.owed.discard(str(future[3]))
            facts.owed.add(str(moved))
            facts.payloads[str(moved)] = facts.payloads[str(future[3])]
        store.tick()
        clock.advance(HOUR_MS)
        store.tick()
        for name in TOPICS:
            send(name, 5, 10 * 60_000, 1_000, 20)
            store.topic(name).send(b"last", deliver_after=30 * 60)
            facts_id = send(name, 1, 31 * 60_000, 1, 20)
            assert facts_id
        assert list(store.check(deep=True)) == []
    _learn_last(live, facts)
    _leave_wal(live, path, clock, facts)
    shutil.rmtree(live)
    return facts


def _leave_wal(live: Path, path: Path, clock: ManualClock, facts: Facts) -> None:
    """Send one by one until the WAL has been begun anew, and leave the files as a crash then would."""
    with DelayedStore.open(live, with_wal(CONFIG), clock=clock) as store:
        for number in range(40):
            payload = f"journal {number} ".encode() * (150 if number % 20 == 17 else 2)
            due_ms = START_MS + (2 + number // 2 % 2) * HOUR_MS + 1_800_000 + number
            found = str(store.topic(TOPICS[number % 2]).send(payload, deliver_at=due_ms))
            facts.payloads[found] = payload.decode()
            facts.owed.add(found)
        copy_store(live, path)
    facts.in_wal = in_wal(path)
    assert len(taken_home(path)) > len(facts.in_wal) > 4


def _learn_last(path: Path, facts: Facts) -> None:
    """The ids of what was sent one by one, which the dump of a read-only store knows."""
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=True) as store:
        for name in TOPICS:
            for message in store.topic(name).scheduled():
                facts.payloads.setdefault(str(message.message_id), message.payload.decode())
                facts.owed.add(str(message.message_id))


@dataclass
class Outcome:
    """What became of a damaged copy."""

    codes: list[str]
    """Codes of the findings of `check`."""
    delivered: dict[str, str]
    error: str
    """The error that ended opening or using it, if one did."""
    died: list[str]
    """What killed a child, if something did."""

    @property
    def detected(self) -> bool:
        return bool(self.codes)

    def wrong(self, facts: Facts) -> list[str]:
        """Ids delivered with a payload that is not theirs."""
        return [each for each, payload in self.delivered.items() if facts.payloads.get(each) != payload]

    def missing(self, facts: Facts) -> set[str]:
        return facts.owed - self.delivered.keys()


def forked(work: Callable[[], object], report: Path) -> tuple[object, str]:
    """(what `work` returns, "") from a child process; (None, how it died) if a signal killed it."""
    report.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            signal.alarm(_SECONDS)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            report.write_text(json.dumps(work()))
            os._exit(0)
        except BaseException:
            report.with_suffix(".error").write_text(traceback.format_exc())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None, signal.Signals(os.WTERMSIG(status)).name
    if os.WEXITSTATUS(status):
        raise AssertionError(report.with_suffix(".error").read_text())
    return json.loads(report.read_text()), ""


def check_in_fork(report: Path) -> Callable[[Path, bool], list[Finding]]:
    """A child as `duelog check` makes one, without starting an interpreter."""

    def check(path: Path, deep: bool) -> list[Finding]:
        work = lambda: [found.code for found in store_check.check_opened(path, deep)]  # noqa: E731
        codes, died = forked(work, report.with_name("grandchild"))
        found: object = [died] if died else codes
        assert isinstance(found, list)
        return [Finding("error", str(code), "", "", "") for code in found]

    return check


def use(path: Path) -> dict[str, object]:
    """Open a store for writing, have everything fire, and receive it all."""
    delivered: dict[str, str] = {}
    error = ""
    clock = ManualClock(START_MS + 30 * HOUR_MS)
    try:
        with DelayedStore.open(path, CONFIG, clock=clock) as store:
            store.tick()
            for topic in list(store.topics()):
                subscription = topic.subscribe(SUBSCRIPTION)
                while messages := subscription.receive(1_000, timeout=0):
                    for message in messages:
                        delivered[str(message.message_id)] = message.payload.decode(errors="replace")
                        subscription.ack(message)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    return {"delivered": delivered, "error": error}


def try_out(path: Path, report: Path) -> Outcome:
    """Check a damaged store, then use it, each in a child."""

    def check() -> list[str]:
        vars(store_check)["_check_in_child"] = check_in_fork(report)  # of this child alone
        return [found.code for found in store_check.check_store(path, deep=True)]

    codes, died_checking = forked(check, report)
    used, died = forked(lambda: use(path), report)
    fields: dict[str, Any] = used if isinstance(used, dict) else {"delivered": {}, "error": ""}
    deaths = [f"check: {died_checking}"] if died_checking else []
    if died:
        deaths.append(f"use: {died}")
    return Outcome(list(codes) if isinstance(codes, list) else [], fields["delivered"], fields["error"], deaths)


def copy(source: Path, target: Path) -> Path:
    """A fresh copy of a closed store."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
