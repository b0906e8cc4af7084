"""Whatever is done to a store, each subscription receives the same with compaction at any point and without."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from duelog.cleanup import adoption, compaction_plan, log_claims
from duelog.cleanup.log_claims import LogClaims
from tests.cleanup.side_by_side import HOUR_MS, SideBySide, Step
from tests.proof import length, wrong_engines

topics = st.sampled_from("ab")
names = st.sampled_from(("one", "two", "three"))
delays = st.integers(0, 5 * HOUR_MS)


def step(name: str, *strategies: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    """Steps that call a method of SideBySide with drawn arguments."""
    return st.tuples(*strategies).map(lambda values: Call(name, values))


class Call:
    """A step that can be read in a failed example."""

    def __init__(self, name: str, values: tuple[object, ...]) -> None:
        self.name = name
        self.values = values

    def __call__(self, stores: SideBySide) -> object:
        return getattr(stores, self.name)(*self.values)

    def __repr__(self) -> str:
        return f"{self.name}{self.values}"


STEPS = st.one_of(
    step("send", topics, st.integers(1, 9), delays),
    step("send", topics, st.integers(1, 9), st.integers(0, HOUR_MS)),
    step("withdraw", st.integers(0, 50), st.none() | delays),
    step("forward", st.sampled_from((1, HOUR_MS // 3, HOUR_MS, HOUR_MS, 3 * HOUR_MS))),
    step("receive", topics, names, st.integers(0, 3)),
    step("receive", topics, names, st.integers(1, 3)),
    step("subscribe", topics, names, st.booleans()),
    step("unsubscribe", topics, names),
    step("seek", topics, names, st.integers(0, 8)),
    step("delete_topic", topics),
    step("flush"),
    step("reopen"),
    step("stage", st.integers(0, 5)),
    step("stage", st.integers(0, 5)),
    step("hand_over"),
    step("compact", st.integers(0, 5)),
    step("compact", st.integers(0, 5)),
    step("tick"),
    step("crash", st.sampled_from(("compact.published", "compact.adopted", "commit.before", "commit.after"))),
)  # fmt: skip

BEGINNING: list[Step] = [
    Call("subscribe", ("a", "one", False)),
    Call("send", ("a", 8, HOUR_MS // 2)),
    Call("send", ("b", 4, HOUR_MS // 2)),
    Call("forward", (2 * HOUR_MS,)),
]
"""Something to compact."""


def run(steps: list[Step]) -> int:
    """Do them to new stores; how many generations were adopted."""
    with tempfile.TemporaryDirectory(prefix="duelog-side-", dir=memory()) as path:
        stores = SideBySide(Path(path))
        for each in [*BEGINNING, *steps]:
            each(stores)
        for topic in "ab":
            for name in ("one", "two", "three"):
                stores.receive(topic, name, 2)
        stores.close()
        return stores.adopted


@functools.cache
def memory() -> str | None:
    """Where an fsync costs nothing, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.mark.series
@settings(max_examples=length("DUELOG_SIDES", 12, 50), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, min_size=10, max_size=50))
def test_each_subscription_receives_the_same(steps: list[Step]) -> None:
    """With seeks, new subscriptions, cancellations, crashes and reopening between plan and adoption."""
    run(steps)


def by_anybody(cursors: object, ledger_id: int, tail: int) -> BitMap:
    """Acknowledged by one of them."""
    each = [claims_by_all([cursor], ledger_id, tail) for cursor in cursors]  # type: ignore[attr-defined]
    return BitMap.union(BitMap(), *each)


claims_by_all = log_claims.acknowledged_by_all


def too_little(log: LogClaims, tail: int, conditional: BitMap | None) -> BitMap:
    """Unacknowledged messages are needed; those with a marker and no subscription are not."""
    return log.marked - log.acknowledged if log.subscriptions else BitMap()


def by_all(cursors: object, ledger_id: int, tail: int) -> BitMap:
    """The claims as they should be."""
    return claims_by_all(cursors, ledger_id, tail)  # type: ignore[arg-type]


def nothing_needed(log: LogClaims, tail: int, conditional: BitMap | None) -> BitMap:
    """All goes."""
    return BitMap()


MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "acknowledged by one is enough": (log_claims, "acknowledged_by_all", by_anybody),
    "no subscription, so it is not needed": (compaction_plan, "needed", too_little),
    "nothing is needed": (compaction_plan, "needed", nothing_needed),
    "seeks are not looked at": (log_claims, "acknowledged_by_all", by_all),
}


@pytest.mark.parametrize("mutant", wrong_engines(MUTANTS, "acknowledged by one is enough"))
def test_a_wrong_compaction_is_found_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where compaction drops too much, or adopts what it may not."""
    owner, name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, wrong)
    # Adoption looks at what compaction relies on a second time; here it does not.
    monkeypatch.setattr(adoption, "_taken_back", lambda raw, topic_id, relied_on: None)
    monkeypatch.setattr("duelog.upkeep.reclaiming.Adopting._gone_back", lambda self, relied_on: None)
    told: list[Step] = [
        Call("subscribe", ("a", "two", False)),
        Call("receive", ("a", "one", 2)),
        Call("flush", ()),
        Call("stage", (0,)),
        Call("seek", ("a", "one", 0)),
        Call("hand_over", ()),
        Call("tick", ()),
    ]
    if mutant == "seeks are not looked at":
        told.insert(2, Call("receive", ("a", "two", 1)))
    with pytest.raises(AssertionError, match=r"dropped|receives"):
        run(told)
