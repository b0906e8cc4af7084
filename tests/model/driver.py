"""Ways of the model test to reach into a store: it listens, fails writes, and copies it as a crash would."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duelog.engine import Engine
from duelog.markers.firing.firing import Firing
from duelog.metrics import SPECS
from duelog.store.codec.body import decode_body
from duelog.store.errors import StoreFull
from duelog.store.files import failpoints
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.position import MessageId
from duelog.topics.seeking import expired
from duelog.topics.topic_state import SubscriptionState, TopicState
from duelog.upkeep.policies_in_force import Expiry

PAYLOAD = 6
"""Digits of a message's number, which is its payload."""

ROLLED = "rolled"


class Recorded(dict[int, list[MessageId | int | str]]):
    """By topic id, what was appended to main logs in order.

    The id that a marker points at, or a message's number; ROLLED where the open ledger was closed for its age.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fired_ms: dict[MessageId, int] = {}
        """The time of each marker."""
        self.expired: dict[tuple[int, str], list[int]] = {}
        """By topic id and subscription, places that were found too old, counted from the first that is kept.

        A subscription that was looked at, and had nothing too old, is there too.
        """


def scratch_directory() -> Path:
    """A directory of its own, in memory where the machine has a place for that: the model is about order, not disks."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="duelog-model-", dir=memory if os.access(memory, os.W_OK) else None))


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Record what is appended to main logs, and expires, within the block."""
    found = Recorded()
    confirms, messages, rolls = Firing._confirm, ManagedLedger.append_messages, ManagedLedger.roll
    expires = Expiry._expire

    def confirm(firing: Firing, batch: Any, records: Any, by_ms: int) -> None:
        confirms(firing, batch, records, by_ms)
        for pending, taken, log in batch:
            ids = [MessageId(pending.ledger_id, entry) for entry in taken.entries.tolist()]
            found.setdefault(log.topic_id, []).extend(ids)
            found.fired_ms.update(dict.fromkeys(ids, by_ms))

    def append_messages(log: ManagedLedger, transaction: Any, dues: Any, bodies: Sequence[bytes], *rest: Any) -> Any:
        segments = messages(log, transaction, dues, bodies, *rest)
        numbers = [int(decode_body(body)[1][:PAYLOAD]) for body in bodies]
        transaction.after_commit(lambda: found.setdefault(log.topic_id, []).extend(numbers))
        return segments

    def roll(log: ManagedLedger, transaction: Any, now_ms: int) -> bool:
        rolled = rolls(log, transaction, now_ms)
        if rolled:
            found.setdefault(log.topic_id, []).append(ROLLED)
        return rolled

    def expire(self: Expiry, topic: TopicState, subscription: SubscriptionState, before_ms: int) -> int:
        offsets, at = {}, 0
        for ledger in topic.log.ledgers():
            offsets[ledger.ledger_id] = at
            at += ledger.entries
        rows = expired(self._main, topic.log, subscription.acks, before_ms)
        places = [offsets[ledger_id] + entry for ledger_id, entries in rows for entry in entries]
        found.expired[topic.topic_id, subscription.name] = places
        return expires(self, topic, subscription, before_ms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ManagedLedger, "roll", roll)
        patch.setattr(Firing, "_confirm", confirm)
        patch.setattr(ManagedLedger, "append_messages", append_messages)
        patch.setattr(Expiry, "_expire", expire)
        yield found


class Told:
    """Stands in for a store's instruments: sums what counters are told, by name and topic."""

    listening = True

    def __init__(self) -> None:
        self.sums: Counter[tuple[str, str]] = Counter()
        self.stores: set[object] = set()
        self.counters = {spec.name: _Teller(spec.name, self.sums) for spec in SPECS if spec.kind == "counter"}
        self.histograms = {spec.name: _Teller("", Counter()) for spec in SPECS if spec.kind == "histogram"}

    def record_all(self, name: str, values: object, attributes: Mapping[str, str]) -> None:
        """Ignore them, like `_Teller.record`."""


class _Teller:
    """A counter or a histogram."""

    def __init__(self, name: str, sums: Counter[tuple[str, str]]) -> None:
        self._name, self._sums = name, sums

    def add(self, count: int, attributes: Mapping[str, str]) -> None:
        self._sums[self._name, attributes.get("pulsar.topic", "")] += count

    def record(self, value: float, attributes: Mapping[str, str]) -> None:
        """Ignore it: a histogram is about time and bytes."""


class SimulatedCrash(BaseException):
    """Ends a tick at a failpoint, after the files were copied."""


class Once:
    """An action that is run the `count`-th time it is called, and no other time."""

    def __init__(self, count: int, action: Callable[[], object]) -> None:
        self.left = count
        self.action = action

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()

    @property
    def done(self) -> bool:
        return self.left <= 0


@contextmanager
def armed(point: str, action: Callable[[], None]) -> Iterator[None]:
    """Run `action` whenever the engine reaches `point` within the block."""
    failpoints.arm(point, action)
    try:
        yield
    finally:
        failpoints.disarm()


@contextmanager
def full_disk(engine: Engine, count: int) -> Iterator[None]:
    """Let the `count`-th commit of the main environment, or firing, within the block find no space."""
    main, left = engine.storage.main, count

    def failing(write: Callable[..., Any]) -> Callable[..., Any]:
        def fail(work: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise StoreFull(main.path, "no room, says the test")
            return write(work, **options)

        return fail

    with patch.object(main, "write", failing(main.write)):
        yield


@contextmanager
def stalled_sender(engine: Engine, meanwhile: Callable[[Callable[[], list[MessageId]]], None]) -> Iterator[None]:
    """Interrupt the next send between its look at the clock and its first write.

    `meanwhile` gets what does the rest of the send and gives the ids; it has to call it.
    """
    with pytest.MonkeyPatch.context() as patch:

        def stall(send: Callable[..., Any]) -> Callable[..., Any]:
            def interrupted(*arguments: Any) -> Any:
                patch.undo()
                answers: list[Any] = []

                def write() -> list[MessageId]:
                    answers.append(send(*arguments))
                    return [answers[0]] if isinstance(answers[0], MessageId) else list(answers[0])

                meanwhile(write)
                return answers[0]

            return interrupted

        patch.setattr(engine.sending.sender, "send", stall(engine.sending.sender.send))
        patch.setattr(engine.sending.sender, "send_one", stall(engine.sending.sender.send_one))
        yield


def copy_store(path: Path, target: Path) -> None:
    """The files as a crash of the process would leave them now. LMDB makes its lock files anew at opening."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("lock.mdb", "CONTROL"))
