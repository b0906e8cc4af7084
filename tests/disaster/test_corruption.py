"""Files of a store damaged in every way: no wrong payload is ever delivered, and whatever is lost is a finding.

Each trial damages one file of a copy, checks the copy, and uses it until nothing more comes. What is expected and does
not come must be a finding of `duelog check`; a process that dies must have been warned of by one.
"""

import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from duelog.tools import store_check
from tests.disaster.damage import Facts, Outcome, build, copy, try_out
from tests.disaster.wal_stores import GROUP_BYTES, HEADER_BYTES, groups, needed
from tests.proof import length, sample
from tests.store.wal.segments import flip, write_at

pytestmark = pytest.mark.series

SEED = 20261121
FLIPS = length("DUELOG_FLIPS", 42, 420)
"""Flipped bits; about 0.1 s each."""
PAGE = 4096


@pytest.fixture(scope="module")
def facts(places: Path) -> Facts:
    """The content of the store that is copied for each trial."""
    return build(places / "whole")


class Trials:
    """Trials on copies of one store, judged and counted."""

    def __init__(self, places: Path, facts: Facts) -> None:
        self._places = places
        self._facts = facts
        self.counts: Counter[str] = Counter()

    def files(self) -> list[Path]:
        """Every file of the store, relative, locks left out: they hold nothing."""
        whole = self._places / "whole"
        found = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
        return [path for path in found if path.name not in ("LOCK", "lock.mdb")]

    def files_of_wal(self) -> set[Path]:
        """The segments, those that are needed and others."""
        return {file for file in self.files() if file.parts[0] == "wal"}

    @property
    def segment(self) -> Path:
        (file,) = needed(self._places / "whole")
        return file

    def content(self, file: Path) -> bytes:
        return (self._places / "whole" / file).read_bytes()

    def size(self, file: Path) -> int:
        return (self._places / "whole" / file).stat().st_size

    def run(self, name: str, damage: Callable[[Path], object], excused: Collection[str] = ()) -> Outcome:
        """One trial; fails for a wrong payload, a silent loss of messages not `excused`, or an unannounced death."""
        store = copy(self._places / "whole", self._places / "copy")
        damage(store)
        outcome = try_out(store, self._places / "report")
        missing = outcome.missing(self._facts)
        assert outcome.wrong(self._facts) == [], f"{name}: wrong payloads"
        if not outcome.detected:
            assert not outcome.died, f"{name}: died unannounced: {outcome.died}"
            assert not outcome.error, f"{name}: failed unannounced: {outcome.error}"
            assert missing <= set(excused), f"{name}: lost silently: {sorted(missing)[:5]}"
            assert not outcome.doubled, f"{name}: doubled silently: {outcome.doubled}"
        self.counts["trials"] += 1
        self.counts["found by check" if outcome.detected else "harmless"] += 1
        self.counts["refused at open or in use"] += bool(outcome.error)
        self.counts["killed a process"] += bool(outcome.died)
        self.counts["lost messages"] += bool(missing) and not outcome.error and not outcome.died
        return outcome


@pytest.fixture(scope="module")
def trials(places: Path, facts: Facts) -> Iterator[Trials]:
    """The trials of this module, their figures printed at the end."""
    trials = Trials(places, facts)
    yield trials
    print(f"\ncorruption, seed {SEED}: {dict(trials.counts)}")


def test_an_undamaged_copy_gives_everything_and_has_no_findings(trials: Trials, facts: Facts) -> None:
    """The trial itself loses nothing, so that what it finds is of the damage."""
    outcome = trials.run("undamaged", lambda store: None)
    assert outcome.codes == []
    assert outcome.missing(facts) == set()


def test_flipped_bits_are_found_or_harmless(trials: Trials) -> None:
    """One bit of one file: in headers of pages, in meta pages, anywhere; of the file that says what the store is."""
    random_ = random.Random(SEED)
    data = [file for file in trials.files() if file.name == "data.mdb"]
    for number in range(FLIPS):
        kind = number % 7
        file = random_.choice(data)
        pages = trials.size(file) // PAGE
        if kind == 0:
            file = Path("STORE")
            at = random_.randrange(trials.size(file))
        elif kind == 1:
            at = random_.choice((0, PAGE)) + random_.randrange(152)
        elif kind in (2, 3):
            at = random_.randrange(2, pages) * PAGE + random_.randrange(48)
        elif kind == 4:  # the page that the newest commit wrote last, most often
            at = (pages - 1 - random_.randrange(min(4, pages - 2))) * PAGE + random_.randrange(PAGE)
        else:
            at = random_.randrange(pages * PAGE)
        bit = random_.randrange(8)
        trials.run(f"bit {bit} of byte {at} of {file}", lambda store: flip(store / file, at, bit))  # noqa: B023


def test_truncated_files_are_found(trials: Trials) -> None:
    """A file cut at and within pages, and to nothing."""
    random_ = random.Random(SEED)
    for file in trials.files():
        size = trials.size(file)
        lengths = {0, 1, 100, PAGE, 2 * PAGE, size // 2, size - PAGE, size - 1, random_.randrange(size)}
        for size_left in sample(sorted(each for each in lengths if 0 <= each < size), 6):
            trials.run(f"{file} cut to {size_left}", lambda store: os.truncate(store / file, size_left))  # noqa: B023


def test_zeroed_pages_are_found_or_were_free(trials: Trials) -> None:
    """Pages that read as zeros, as after a lost write."""
    for file in trials.files():
        if file.name == "data.mdb":
            for at in range(
                0, trials.size(file), PAGE * max(1, trials.size(file) // PAGE // length("DUELOG_PAGES", 3, 12))
            ):
                trials.run(f"page at {at} of {file}", lambda store: write_at(store / file, at, bytes(PAGE)))  # noqa: B023


def test_missing_files_are_found(trials: Trials) -> None:
    """Each file, and each directory of a partition, is missing once; of the write-ahead log those that are needed."""
    spare = trials.files_of_wal() - {trials.segment}
    assert spare
    for file in trials.files():
        outcome = trials.run(f"{file} missing", lambda store: (store / file).unlink())  # noqa: B023
        assert outcome.detected == (file not in spare), file
    for file in trials.files():
        if file.parts[0] == "partitions":
            parent = file.parent.parent
            outcome = trials.run(f"{parent} missing", lambda store: shutil.rmtree(store / parent))  # noqa: B023
            assert outcome.detected, parent
    assert trials.run("wal missing", lambda store: shutil.rmtree(store / "wal")).detected


def test_flipped_bits_of_a_segment_are_found_or_harmless(trials: Trials, facts: Facts) -> None:
    """Bits of its header, of every group, of older content and of gaps.

    The last group alone can go unseen: broken, it looks as if the power had gone while it was written, and no send
    of it had returned.
    """
    random_ = random.Random(SEED)
    file, places = trials.segment, groups(trials.content(trials.segment))
    assert len(places) == len(facts.in_wal)
    spots = [(at + random_.randrange(GROUP_BYTES), True) for at, _ in places[:-1]]
    spots += [(random_.randrange(at + GROUP_BYTES, limit), True) for at, limit in places[:-1]]
    spots += [(at, True) for at in range(HEADER_BYTES)]
    spots += [(random_.randrange(HEADER_BYTES, places[0][0]), False) for _ in range(4)]
    spots += [(random_.randrange(places[-1][1], trials.size(file)), False) for _ in range(8)]
    spots += [(random_.randrange(limit, at), False) for (_, limit), (at, _) in itertools.pairwise(places) if limit < at]
    for at, counts in sample(spots, 6):
        bit = random_.randrange(8)
        outcome = trials.run(f"bit {bit} of byte {at} of {file}", lambda store: flip(store / file, at, bit))  # noqa: B023
        assert outcome.detected or not counts, at
    first, limit = places[-1]
    for _ in range(6):
        at = random_.randrange(first, limit)
        name = f"bit of byte {at} of the last group"
        trials.run(name, lambda store: flip(store / file, at, 3), excused=facts.in_wal[-1:])  # noqa: B023


def test_what_kills_a_process_is_read_in_a_child_of_check(places: Path, facts: Facts, tmp_path: Path) -> None:
    """`duelog check` itself lives, with the real child process, on a file whose pages are gone."""
    store = copy(places / "whole", tmp_path / "copy")
    file = sorted(store.glob("partitions/*/*/data.mdb"))[1]
    with file.open("r+b") as damaged:
        damaged.seek(2 * PAGE)
        damaged.write(b"\xff" * (file.stat().st_size - 2 * PAGE))
    assert "page" in {found.code for found in store_check.check_store(store, deep=True)}
