"""One flipped bit in the pages of any file, most often in headers and branch pages, in a store that is used at once.

No check comes before: what is lost, doubled or wrong must be said by a call, or by `check` after it, and nothing may
kill the process. Each trial uses a copy in a process of its own. `DUELOG_PAGE_FLIPS=1000` makes so many.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message
from duelog.store.files import lmdb_layout
from duelog.store.files.page_tree import Tree
from tests.disaster.damage import CONFIG, HOUR_MS, START_MS, SUBSCRIPTION, TOPICS, Facts, copy, forked

SEED = 20261122
FLIPS = int(os.environ.get("DUELOG_PAGE_FLIPS", "60"))
PAGE = 4096
WIDE = replace(CONFIG, run_entries=1, snapshot_every_entries=100, durability="none", max_clock_jump_ms=None)
"""An entry is a run of its own, so that a few hundred are a tree with branch pages."""


def build(path: Path) -> Facts:
    """A store whose main environment and hours have branch pages, and all kinds of records."""
    facts = Facts()
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, WIDE, clock=clock) as store:
        for name in TOPICS:
            topic = store.topic(name)
            with topic.subscribe(SUBSCRIPTION) as subscription:
                for first_ms, count in ((1_000, 60), (HOUR_MS // 2, 200), (HOUR_MS, 250), (3 * HOUR_MS, 30), (0, 150)):
                    messages = [
                        Message(b"%s %d %d " % (name.encode(), first_ms, at) * 5, deliver_at=START_MS + first_ms + at)
                        for at in range(count)
                    ]
                    for message_id, message in zip(topic.send_batch(messages), messages, strict=True):
                        assert isinstance(message.payload, bytes)
                        facts.payloads[str(message_id)] = message.payload.decode()
                        facts.owed.add(str(message_id))
                clock.advance(60_000 if name == TOPICS[-1] else 0)
                store.tick()
                for received in subscription.receive(50):
                    subscription.ack(received, durable=True)
                    facts.owed.discard(str(received.message_id))
            waiting = [message.message_id for message in topic.scheduled(limit=40)]
            for message_id in waiting[:5]:
                assert topic.cancel(message_id)
                facts.owed.discard(str(message_id))
            moved = topic.reschedule(waiting[10], deliver_at=clock.now_ms() + 2 * HOUR_MS)
            facts.owed.discard(str(waiting[10]))
            facts.owed.add(str(moved))
            facts.payloads[str(moved)] = facts.payloads[str(waiting[10])]
        store.tick()
        assert list(store.check(deep=True)) == []
    return facts


def use(path: Path) -> dict[str, Any]:
    """Use a store until all has come, and then ask it what is wrong."""
    delivered: list[tuple[str, str]] = []
    said: list[str] = []
    clock = ManualClock(START_MS + 120_000)
    try:
        with DelayedStore.open(path, WIDE, clock=clock) as store:
            for _ in range(9):
                store.tick()
                for name in TOPICS:
                    with store.topic(name).subscribe(SUBSCRIPTION) as subscription:
                        while messages := subscription.receive(1_000):
                            delivered += [(str(each.message_id), each.payload.decode("latin-1")) for each in messages]
                            subscription.ack(messages, durable=True)
                clock.advance(HOUR_MS)
            said = [found.code for found in store.check(deep=True)]
    except Exception as found:
        return {"delivered": delivered, "said": said, "error": f"{type(found).__name__}: {found}"}
    return {"delivered": delivered, "said": said, "error": ""}


class Flips:
    """Where bits are flipped: places in the files of a store, by a seed."""

    def __init__(self, whole: Path) -> None:
        self._random = random.Random(SEED)
        self._whole = whole
        self._files = sorted(each.relative_to(whole) for each in whole.rglob("data.mdb"))
        self._pages = {file: self._in_use(file) for file in self._files}
        assert self._pages[Path("main/data.mdb")][1]
        assert sum(bool(kinds[1]) for kinds in self._pages.values()) > 2

    def _in_use(self, file: Path) -> dict[int, list[int]]:
        """Branch pages (1) and leaf pages (2) of a file."""
        found: dict[int, list[int]] = {1: [], 2: []}
        with lmdb_layout.open_file((self._whole / file).parent) as descriptor:
            page_bytes, metas = lmdb_layout.meta_in_force(descriptor)
            assert page_bytes == PAGE
            for record, integer_keys in ((metas[-1].main, False), (metas[-1].free, True)):
                tree = Tree(descriptor, PAGE, metas[-1].last_page, record, integer_keys=integer_keys)
                for _ in tree.items(values=False):
                    pass
                for number in tree.pages:
                    own, _, kind = struct.unpack("<QHH", os.pread(descriptor, 12, number * PAGE))
                    if own == number and kind in found:
                        found[kind].append(number)
        return found

    def draw(self) -> tuple[Path, int, int]:
        """A file, a byte of it and a bit."""
        source = self._random
        what = source.choices(("meta", "branch", "leaf", "anywhere"), (2, 10, 6, 1))[0]
        kind = {"branch": 1, "leaf": 2}.get(what)
        files = [file for file in self._files if kind is None or self._pages[file][kind]]
        file = source.choice(files)
        bit = source.randrange(8)
        if what == "meta":
            return file, source.choice((0, PAGE)) + source.randrange(152), bit
        if kind is None:
            return file, source.randrange((self._whole / file).stat().st_size), bit
        at = source.choice(self._pages[file][kind]) * PAGE
        with (self._whole / file).open("rb") as opened:
            opened.seek(at)
            page = opened.read(PAGE)
        (lower,) = struct.unpack_from("<H", page, 12)
        nodes = struct.unpack_from(f"<{(lower - 16) // 2}H", page, 16)
        part = source.randrange(3)
        if part == 0:
            return file, at + source.randrange(16), bit
        if part == 1:
            return file, at + source.randrange(16, lower), bit
        return file, at + source.choice(nodes) + source.randrange(8), bit


@pytest.fixture(scope="module")
def places() -> Iterator[Path]:
    """A directory in memory where there is one."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="duelog-flips-", dir=shm if os.access(shm, os.W_OK) else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.fault
def test_a_flipped_bit_in_a_page_is_never_silent_in_use_and_kills_nothing(places: Path) -> None:
    """What it costs is said by a call or by `check` afterwards; what is harmless costs nothing."""
    facts = build(places / "whole")
    flips = Flips(places / "whole")
    again = copy(places / "whole", places / "again")
    undamaged, _ = forked(lambda: use(again), places / "report")
    assert isinstance(undamaged, dict)
    assert (undamaged["error"], undamaged["said"]) == ("", [])
    assert {each for each, _ in undamaged["delivered"]} == facts.owed
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for _ in range(FLIPS):
        file, at, bit = flips.draw()
        store = copy(places / "whole", places / "copy")
        with (store / file).open("r+b") as opened:
            opened.seek(at)
            (byte,) = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << bit]))
        used, died = forked(lambda: use(store), places / "report")  # noqa: B023
        name = f"bit {bit} of byte {at % PAGE} of page {at // PAGE} of {file}"
        if died:
            counts["killed a process"] += 1
            wrong.append(f"{name}: {died}")
            continue
        assert isinstance(used, dict)
        delivered = [(message_id, payload) for message_id, payload in used["delivered"]]
        ids = [message_id for message_id, _ in delivered]
        right = set(ids) == facts.owed and len(ids) == len(set(ids))
        right &= all(facts.payloads.get(message_id) == payload for message_id, payload in delivered)
        if used["error"]:
            counts["seen by a call"] += 1
        elif used["said"]:
            counts["seen by check"] += 1
        elif right:
            counts["harmless"] += 1
        else:
            counts["silent"] += 1
            missing, doubled = len(facts.owed - set(ids)), len(ids) - len(set(ids))
            wrong.append(f"{name}: {missing} missing, {doubled} doubled, {len(set(ids) - facts.owed)} not owed")
    print(f"\nflipped bits, seed {SEED}: {dict(counts)}")
    assert wrong == []
