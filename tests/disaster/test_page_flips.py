"""One flipped bit in the pages of any file, most often in headers and branch pages, in a store that is used at once.

No check comes before: what is lost, doubled or wrong must be said by a call, or by `check` after it, and nothing may
kill the process. Each trial uses a copy in a process of its own. `DUELOG_PAGE_FLIPS=1000` makes so many.
"""

import os
import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from duelog.store.files import pages
from duelog.store.files.pages import PageWalk
from tests.disaster.damage import CONFIG, Outcome, build, copy, use
from tests.disaster.running import forked
from tests.proof import length
from tests.store.wal.segments import flip

SEED = 20261122
FLIPS = length("DUELOG_PAGE_FLIPS", 15, 60)
PAGE = 4096
WIDE = replace(CONFIG, run_entries=1, snapshot_every_entries=100, max_clock_jump_ms=None)
"""An entry is a run of its own, so that a few hundred are a tree with branch pages."""


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
        with pages.open_file((self._whole / file).parent) as descriptor:
            page_bytes, metas = pages.meta_in_force(descriptor)
            assert page_bytes == PAGE
            walk = PageWalk(descriptor, PAGE, metas[-1].last_page)
            assert [*walk.rows(metas[-1].main), *walk.rows(metas[-1].free)]
            for number in walk.used:
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


@pytest.mark.fault
@pytest.mark.series
def test_a_flipped_bit_in_a_page_is_never_silent_in_use_and_kills_nothing(places: Path) -> None:
    """A call or `check` afterwards reports each loss; a harmless flip costs nothing."""
    facts = build(places / "whole", WIDE, 4)
    flips = Flips(places / "whole")
    undamaged = used(places)
    assert (undamaged.died, undamaged.error, undamaged.codes) == ([], "", [])
    assert not undamaged.missing(facts)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for _ in range(FLIPS):
        file, at, bit = flips.draw()
        outcome = used(places, lambda store: flip(store / file, at, bit))  # noqa: B023
        missing, doubled = outcome.missing(facts), outcome.doubled
        if outcome.died:
            what = "killed a process"
        elif outcome.error:
            what = "seen by a call"
        elif outcome.codes:
            what = "seen by check"
        else:
            what = "silent" if missing or doubled or outcome.wrong(facts) else "harmless"
        counts[what] += 1
        if what in ("killed a process", "silent"):
            name = f"bit {bit} of byte {at % PAGE} of page {at // PAGE} of {file}"
            wrong.append(f"{name}: {what}, {outcome.died}, {len(missing)} missing, {len(doubled)} doubled")
    print(f"\nflipped bits, seed {SEED}: {dict(counts)}")
    assert wrong == []


def used(places: Path, damage: Callable[[Path], object] = lambda store: None) -> Outcome:
    """Use a damaged copy, hour by hour, and return the outcome."""
    store = copy(places / "whole", places / "copy")
    damage(store)
    said, died = forked(lambda: use(store, WIDE, range(9)), places / "report")
    return Outcome([], [], "", [died]) if died else Outcome(**said, died=[])
