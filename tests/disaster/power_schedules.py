"""Power cuts amid schedules: each is there with its options, and its occurrences come as often as it says.

    python -m tests.disaster.power_cut power_schedules [--states 500] [--seed 7] [--durability relaxed]

The recorded process asks for schedules of all kinds (ends, counts, jitter, misfires), replaces, pauses, resumes and
removes them, and lets time pass, at times so much that occurrences are missed. Each disk that a cut could have left is
opened at the time of the cut, and a plain twin of each schedule says what has come, what waits, and what comes next.
With durability "relaxed" what was done last may be lost, and nothing comes twice.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from duelog import DelayedStore, ManualClock, Schedule, Topic
from duelog.errors import InvalidArgument
from duelog.store.config import SendDurability
from duelog.store.held import Held
from duelog.upkeep.recurring import Recurring
from duelog.upkeep.schedule import MISFIRES, WITH_GRACE
from tests.disaster.power_story import Facts
from tests.disaster.working import CONFIG, START_MS, say
from tests.duelog.upkeep.twin_schedule import Asked, TwinSchedule

TOPIC, NAMES, SUBSCRIPTION = "t", ("x", "y", "z"), "worker"
STEPS = 30
SECOND_MS = 1_000


def asked_by(source: random.Random) -> Asked:
    """The state that a schedule is to have."""
    by_cron, misfires = source.random() < 0.4, source.choice(MISFIRES)
    return Asked(
        step_ms=SECOND_MS * source.choice((60, 120) if by_cron else (20, 45)),
        by_cron=by_cron,
        until_ms=source.choice((None, None, START_MS + source.randrange(100, 1_500) * SECOND_MS)),
        count=source.choice((None, None, source.randrange(1, 9))),
        jitter_ms=SECOND_MS * source.choice((0, 0, 15, 90)),
        misfires=misfires,
        grace_ms=SECOND_MS * source.choice((0, 10, 100)) if misfires in WITH_GRACE else 0,
    )


def every(topic: Topic, name: str, asked: Asked) -> Schedule:
    """Ask for a schedule."""
    seconds = asked.step_ms // SECOND_MS
    how: dict[str, Any] = {"cron": f"*/{seconds // 60} * * * *"} if asked.by_cron else {"interval": seconds}
    if asked.misfires in WITH_GRACE:
        how["grace"] = timedelta(milliseconds=asked.grace_ms)
    return topic.every(
        name, until=asked.until_ms, count=asked.count, jitter=timedelta(milliseconds=asked.jitter_ms),
        misfires=asked.misfires, **how,
    )  # fmt: skip


def work(path: Path, seed: int, durability: SendDurability) -> None:
    """Two sessions on one store; the first ends with a close, the second with the process."""
    source, clock = random.Random(seed), ManualClock(START_MS)
    for session in range(2):
        with DelayedStore.open(path, replace(CONFIG, durability=durability), clock=clock) as store:
            topic = store.topic(TOPIC)
            topic.subscribe(SUBSCRIPTION, type="shared").close()
            if session == 0:
                say("begun")
            for _ in range(STEPS):
                change(topic, source)
                far = source.random() < 0.3
                clock.advance(SECOND_MS * (source.randrange(200, 600) if far else source.randrange(1, 40)))
                say("clock", clock.now_ms())
                while store.tick().fired:
                    pass
            if session:
                os._exit(0)


def change(topic: Topic, source: random.Random) -> None:
    """Change a schedule, or leave all as they are."""
    name, what = source.choice(NAMES), source.choice(("every", "every", "pause", "resume", "remove", "", "", ""))
    there = {schedule.name for schedule in topic.schedules()}
    if what == "every" or (what and name not in there):
        asked = asked_by(source)
        say("try", name, "every", asdict(asked))
        try:
            every(topic, name, asked)
            say("done")
        except InvalidArgument:  # it would have ended
            say("not")
    elif what:
        say("try", name, what, None)
        {"pause": topic.pause_schedule, "resume": topic.resume_schedule, "remove": topic.remove_schedule}[what](name)
        say("done")


@dataclass
class Twin:
    """Facts about a name."""

    of: TwinSchedule
    exists: bool

    def after(self, what: str, asked: dict[str, Any] | None, now_ms: int) -> "Twin":
        """Another, changed."""
        made = deepcopy(self)
        if asked is not None:
            wanted = Asked(**asked)
            if not self.exists or wanted != self.of.asked:
                made = Twin(TwinSchedule(wanted, came=made.of.came, name=self.of.name), True)
                made.of.begin(now_ms)
        elif what == "resume":
            if made.of.paused:
                made.of.begin(now_ms)
        elif what == "remove" or made.of.waiting_ms is not None:
            made.of.take_back()
            made.of.paused, made.exists = what == "pause", what == "pause"
        return made


class Told(Facts):
    """Facts before a cut: the twins, and those that may be instead."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False
        nothing = Asked(60_000, True, None, None, 0, "first", 0)
        self.twins = [{name: Twin(TwinSchedule(nothing, name=name), False) for name in NAMES}]

    def take(self, fact: list[Any]) -> None:
        match fact:
            case ["begun"]:
                self.begun = True
            case ["try", name, what, asked]:
                now = self.twins[0]
                self.twins = [now, {**now, name: now[name].after(what, asked, self.now_ms)}]
            case ["not"]:
                self.twins = self.twins[:1]
            case ["done"]:
                self.twins = self.twins[-1:]
            case ["clock", ms]:
                self.now_ms = ms
                for twin in self.twins[0].values():
                    twin.of.tick(ms)

    def look(self, store: DelayedStore, clock: ManualClock, *, relaxed: bool) -> list[str]:
        found, topic = list[str](), store.topic(TOPIC)
        if not self.begun or (relaxed and not (topic.exists() and topic.subscriptions())):
            return found
        twins = deepcopy(self.twins)
        for seconds in (0, 17, 61, 300):
            clock.advance(seconds * SECOND_MS)
            while store.tick().fired:
                pass
            for twin in (twin for world in twins for twin in world.values()):
                twin.of.tick(clock.now_ms())
            found += [f"after {seconds} s: {each}" for each in doubled(topic)]
            if not relaxed:
                worlds = ([each for twin in world.values() for each in differs(topic, twin)] for world in twins)
                found += [f"after {seconds} s: {each}" for each in min(worlds, key=len)]
        return found


def occurrences(topic: Topic) -> list[tuple[str, int]]:
    """Schedule and nominal time of all that came."""
    backlog = (each.occurrence for each in topic.subscription(SUBSCRIPTION).peek(10_000))
    return [(each.schedule, each.nominal_ms) for each in backlog if each is not None]


def doubled(topic: Topic) -> list[str]:
    """Occurrences that came twice, or wait though their schedule does not know them."""
    found = [f"{each} came {count} times" for each, count in Counter(occurrences(topic)).items() if count > 1]
    waiting = Counter((each.occurrence.schedule, each.message_id) for each in topic.scheduled() if each.occurrence)
    known = Counter((each.name, each.next_id) for each in topic.schedules() if each.next_id is not None)
    return [*found, *([f"{waiting} wait, of schedules that wait for {known}"] if waiting != known else [])]


def differs(topic: Topic, twin: Twin) -> list[str]:
    """Where a schedule is not what its twin is."""
    of, name = twin.of, twin.of.name
    came = [nominal_ms for schedule, nominal_ms in occurrences(topic) if schedule == name]
    found = [] if came == of.came else [f"of {name} {came} came, and not {of.came}"]
    there = {schedule.name: schedule for schedule in topic.schedules()}.get(name)
    if there is None or not twin.exists:
        return [*found, *([f"{name} is {there}"] if (there is not None) != twin.exists else [])]
    asked = of.asked
    options = (asked.until_ms, asked.count, asked.jitter_ms, asked.misfires)
    if (there.until_ms, there.count, there.jitter_ms, there.misfires) != options:
        found.append(f"{name} is {there}, and was asked to be {asked}")
    if (there.grace_ms or 0, there.interval_ms is None) != (asked.grace_ms, asked.by_cron):
        found.append(f"{name} is {there}, and was asked to be {asked}")
    state = (of.waiting_ms, of.sent, of.paused)
    if (there.next_nominal_ms, there.sent, there.paused) != state:
        found.append(f"{name} is {there}, and its twin {of}")
    if there.next_nominal_ms is not None and there.next_due_ms != of.due_ms(there.next_nominal_ms):
        found.append(f"{name} is due {there.next_due_ms}, and not {of.due_ms(there.next_nominal_ms)}")
    return found


def records_before_it_sends() -> None:
    """A schedule goes on to its next occurrence, and what was missed is sent with the next change of a schedule."""
    plain, missed = Recurring._put, list[Any]()

    def apart(self: Any, topic: Any, schedule: Any, old: Any, late: Any = None, **options: Any) -> Any:
        before, missed[:] = list(missed), late or ()
        return plain(self, topic, schedule, old, before, **options)

    setattr(Recurring, "_put", apart)  # noqa: B010 - what mypy does not follow


def takes_back_before_it_records() -> None:
    """The occurrence that waits is cancelled in a transaction before that which changes its schedule."""
    plain = Recurring._put

    def apart(self: Any, topic: Any, schedule: Any, old: Any, *rest: Any, **options: Any) -> Any:
        if old is not None:
            with Held() as held:
                self._main.write(self._withdrawals.cancelling(held, topic, [old], keyed=False))
        return plain(self, topic, schedule, old, *rest, **options)

    setattr(Recurring, "_put", apart)  # noqa: B010


MUTANTS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (records_before_it_sends, takes_back_before_it_records)
}
TOLD = Told
