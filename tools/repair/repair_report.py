"""The account of a repair: its steps, what it discarded with the bytes, and what that means for messages."""

import base64
import json
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from ... import Finding
from ...store.env.environment import Environment
from ...store.env.transaction import LmdbTransaction as Transaction
from ...store.errors import BrokenInvariant

P = ParamSpec("P")
T = TypeVar("T")


class Discarded(NamedTuple):
    """Something that could not be read: `entry_id` None for a record of the catalog, `raw` as far as it is there."""

    environment: str
    ledger_id: int
    entry_id: int | None
    reason: str
    raw: bytes


@dataclass(slots=True)
class Tally:
    """One kind of thing: `found` before the repair, as far as anything tells of it, is `kept` and `discarded`."""

    found: int = 0
    kept: int = 0
    discarded: int = 0


@dataclass(slots=True)
class RepairReport:
    """The steps and the figures of a repair; empty where nothing was to be repaired.

    actions: its steps in words. given_up: lines of its file, each a record, an entry or a range of entries. left: what
    it could not mend. lost: messages that are not delivered any more to a subscription that they were for, each counted
    once. again: at most so many messages may be delivered though they were acknowledged. uncancelled: at most so many
    may be delivered though they were cancelled. subscriptions: those whose place was lost, with what became of them.
    kinds: how much of each kind was found, kept and discarded: records; entries of partitions, and of main logs, those
    of a range one by one; runs that belong to no log; entries that the write-ahead log has of partitions that are gone.
    """

    actions: list[str] = field(default_factory=list)
    given_up: int = 0
    left: list[Finding] = field(default_factory=list)
    lost: int = 0
    again: int = 0
    uncancelled: int = 0
    subscriptions: list[str] = field(default_factory=list)
    kinds: dict[str, Tally] = field(default_factory=dict)


class Account:
    """The report of a repair under way; what is discarded goes to the file at once."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.report = RepairReport()

    def write(
        self,
        environment: Environment,
        step: Callable[Concatenate[Transaction, P], T],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Have a step done in one transaction, and noted once, though it may run more than once."""
        before = self.report
        size = self._output.stat().st_size if self._output.exists() else 0

        def noted(transaction: Transaction) -> T:
            self.report = deepcopy(before)
            if self._output.exists():
                os.truncate(self._output, size)
            return step(transaction, *args, **named)

        return environment.commit(noted)

    def say(self, action: str) -> None:
        self.report.actions.append(action)

    def count(self, kind: str, found: int, discarded: int) -> None:
        """Note how many of a kind were found, and how many of them are discarded."""
        if not 0 <= discarded <= found:
            raise BrokenInvariant(f"{discarded} {kind} are discarded, {found} were found")
        tally = self.report.kinds.setdefault(kind, Tally())
        tally.found += found
        tally.discarded += discarded
        tally.kept += found - discarded

    def discard(self, lost: Discarded) -> None:
        """Add a line to the file."""
        self.report.given_up += 1
        fields = {"environment": lost.environment, "ledger": lost.ledger_id, "entry": lost.entry_id}
        line = {**fields, "reason": lost.reason, "raw": base64.b64encode(lost.raw).decode()}
        with self._output.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def subscription(self, topic: str, name: str, fate: str) -> None:
        """Note what became of a subscription whose place was lost."""
        self.report.subscriptions.append(f"{topic}, subscription {name}: {fate}")
        self.say(self.report.subscriptions[-1])
