"""The places of a backup between which a store goes on: where others write while it is made.

Run as a program it makes backups in a process of its own, of a store that its parent writes: `STORE CONFIG`, then a
destination a line. It says each place that it comes to and waits for a line before it goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duelog import DelayedStore, StoreConfig
from duelog.backup import HeldPartition, PointInTime, back_up
from duelog.engine import Engine
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead

BEFORE, INSTANT, AFTER, COPY, DONE = "before", "instant", "after", "copy", "done"
"""Before the instant, right after it, and after that; before an environment is copied; at the end."""

Said = Callable[[str], None]


@contextmanager
def saying_where(engine: Engine, said: Said) -> Iterator[None]:
    """Have `said` called in the backups of a store at each place."""
    renew, copy = HeldRead.renew, Environment.copy

    def renew_main(held: HeldRead) -> None:
        main = held._environment is engine.storage.main._env and held._raw is not None
        if main:
            said(BEFORE)
        renew(held)
        if main:
            said(INSTANT)
            said(AFTER)

    def copy_between(environment: Environment, path: Path, held: HeldRead) -> None:
        said(COPY)
        copy(environment, path, held)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HeldRead, "renew", renew_main)
        patched.setattr(Environment, "copy", copy_between)
        yield


@contextmanager
def trusting_what_is_newer() -> Iterator[None]:
    """A wrong engine: what was committed to partitions after the instant is taken for part of it."""
    hold = PointInTime.partitions

    def partitions(point: PointInTime) -> Iterator[HeldPartition]:
        point.wal = point._wal.follow()
        for held in hold(point):
            held.read.renew()
            yield held

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HeldRead, "moved", lambda held: False)
        patched.setattr(PointInTime, "partitions", partitions)
        yield


def _say(place: str) -> None:
    print(place, flush=True)
    sys.stdin.readline()


def main(path: str, fields: str) -> None:
    """Make the backups that are asked for."""
    with DelayedStore.open(path, StoreConfig(**json.loads(fields)), read_only=True) as store:
        engine = store._engine
        for line in iter(sys.stdin.readline, ""):
            with saying_where(engine, _say):
                back_up(engine, Path(line.strip()))
            _say(DONE)


if __name__ == "__main__":
    main(*sys.argv[1:])
