"""`duelog repair`: what cannot be read is discarded and reported, the rest is delivered, and nothing is made up."""

import json
import random
from collections import Counter
from pathlib import Path

import lmdb
import pytest

from duelog import DelayedStore
from duelog.tools.repair.repair_store import repair_store
from duelog.tools.store_check import check_store
from tests.disaster.damage import CONFIG, Facts, Outcome, build, copy, use
from tests.disaster.running import forked
from tests.proof import length
from tests.store.wal.segments import flip

SEED = 7
TRIALS = length("DUELOG_REPAIR_TRIALS", 15, 40)
PAGE = 4096


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stores of this module are."""
    return tmp_path_factory.mktemp("repair")


@pytest.fixture(scope="module")
def facts(place: Path) -> Facts:
    """A store to damage copies of."""
    return build(place / "whole")


def after(store: Path, report: Path) -> Outcome:
    """The outcome of using a store."""
    fields, died = forked(lambda: use(store), report)
    assert not died
    assert isinstance(fields, dict)
    return Outcome([], fields["delivered"], fields["error"], [])


def once_in(file: Path, facts: Facts) -> list[str]:
    """Ids of what is expected and whose payload is in the file once, in a record: a free page may hold anything."""
    content = file.read_bytes()
    with lmdb.open(str(file.parent), readonly=True, lock=False, max_dbs=0) as environment, environment.begin() as raw:
        records = b"".join(value for _, value in raw.cursor())
    payloads = {each: facts.payloads[each].encode() for each in sorted(facts.owed)}
    return [each for each, payload in payloads.items() if content.count(payload) == records.count(payload) == 1]


def test_a_whole_store_is_left_alone(place: Path, facts: Facts, tmp_path: Path) -> None:
    """Nothing is written, no file of given-up things is made."""
    store = copy(place / "whole", tmp_path / "copy")
    report = repair_store(store, tmp_path / "given-up")
    assert (report.actions, report.given_up, report.left) == ([], 0, [])
    assert not (tmp_path / "given-up").exists()


def test_a_damaged_payload_is_discarded_and_the_others_are_delivered(place: Path, facts: Facts, tmp_path: Path) -> None:
    """One body of a pending message: its bytes are in the file, all the others come out, and check finds nothing."""
    store = copy(place / "whole", tmp_path / "copy")
    file = sorted(store.glob("partitions/*/*/data.mdb"))[-2]
    content = file.read_bytes()
    victim = max(once_in(file, facts), key=lambda each: len(facts.payloads[each]))
    at = content.index(facts.payloads[victim].encode())
    flip(file, at + 3, 4)
    assert {found.code for found in check_store(store, deep=True)} == {"corrupt-entry"}
    assert repair_store(store, tmp_path / "given-up").left == []
    (line,) = [json.loads(line) for line in (tmp_path / "given-up").read_text().splitlines()]
    assert f"{line['ledger']}:{line['entry']}" == victim
    assert repair_store(store, tmp_path / "given-up").actions == []
    outcome = after(store, tmp_path / "report")
    assert outcome.error == ""
    assert outcome.wrong(facts) == []
    assert outcome.missing(facts) == {victim}
    assert check_store(store, deep=True) == []


def test_what_was_quarantined_is_released(place: Path, facts: Facts, tmp_path: Path) -> None:
    """A message that met damage after it had fired holds its ledger and partition until it is discarded."""
    store = copy(place / "whole", tmp_path / "copy")
    file = sorted(store.glob("partitions/*/*/data.mdb"))[-1]
    content = file.read_bytes()
    victim = once_in(file, facts)[0]
    flip(file, content.index(facts.payloads[victim].encode()), 4)
    assert after(store, tmp_path / "report").missing(facts) == {victim}
    assert "set-aside" in {found.code for found in check_store(store)}
    assert repair_store(store, tmp_path / "given-up").left == []
    assert check_store(store, deep=True) == []
    with DelayedStore.open(store, CONFIG) as opened:
        opened.tick()
        opened.tick()
        assert opened.partitions() == []


def test_a_missing_partition_is_discarded(place: Path, facts: Facts, tmp_path: Path) -> None:
    """The store opens again, delivers what the other partitions hold, and gives no id out twice."""
    store = copy(place / "whole", tmp_path / "copy")
    file = sorted(store.glob("partitions/*/*/data.mdb"))[1]
    file.unlink()
    assert repair_store(store, tmp_path / "given-up").left == []
    outcome = after(store, tmp_path / "report")
    assert outcome.error == ""
    assert outcome.wrong(facts) == []
    assert 0 < len(outcome.missing(facts)) < len(facts.owed)
    assert check_store(store, deep=True) == []


@pytest.mark.series
def test_random_damage_is_repaired_or_said_to_be_left(place: Path, facts: Facts, tmp_path: Path) -> None:
    """After a repair that left nothing, the store opens, delivers no wrong payload, and a check finds nothing."""
    random_ = random.Random(SEED)
    counts: Counter[str] = Counter()
    for number in range(TRIALS):
        store = copy(place / "whole", tmp_path / "copy")
        file = random_.choice(sorted(store.glob("**/data.mdb")))
        for _ in range(3):
            flip(file, random_.randrange(2 * PAGE, file.stat().st_size), 4)
        if not check_store(store, deep=True):
            continue
        given_up = tmp_path / f"given-up-{number}"

        def work(store: Path = store, given_up: Path = given_up) -> list[str]:
            return [f"{found.code}: {found.message}" for found in repair_store(store, given_up).left]

        left, died = forked(work, tmp_path / "report")
        assert not died
        counts["damaged"] += 1
        if left:
            counts["left"] += 1
            print(number, file.parent, left)
            continue
        outcome = after(store, tmp_path / "report")
        assert outcome.wrong(facts) == [], number
        assert outcome.error == "", number
        assert check_store(store, deep=True) == [], number
        assert not outcome.missing(facts) or given_up.exists(), number
        counts["lost messages"] += bool(outcome.missing(facts))
    print(f"repair, seed {SEED}: {dict(counts)}")
    assert counts["left"] * 4 < counts["damaged"]
