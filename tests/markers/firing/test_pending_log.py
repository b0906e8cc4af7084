"""The states of a partition log in memory: what it does in each, and that one that ended stays so."""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap

from duelog.markers.firing.pending_log import LogState
from duelog.partitions.index.delay_index import DelayIndex
from tests.conftest import START_MS
from tests.markers.firing.logs import new_log

DUES = START_MS + np.arange(10, dtype=np.int64)
ENTRIES = np.arange(10, dtype=np.uint32)
END_MS = START_MS + 1_000


def test_what_comes_while_a_log_loads_waits_for_its_end() -> None:
    """Appends, cancellations and admissions are kept aside; then it fires what is left."""
    log = new_log(DUES, heard=False, loaded=False)
    log.hear(5, DUES[5:])
    log.withdraw(ENTRIES[:2], DUES[:2])
    log.discard(BitMap([6]))
    log.restore(0, DUES[:5])
    assert (log.state, log.next_due_ms(), log.take(END_MS, 100)) == (LogState.LOADING, None, None)
    log.finish_loading()
    assert log.state is LogState.LOADED
    taken = log.take(END_MS, 100)
    assert taken is not None
    assert taken.entries.tolist() == [2, 3, 4, 5, 7, 8, 9]


def test_a_firing_log_gives_nothing_more_until_it_is_confirmed_or_rolled_back() -> None:
    """And neither a copy; appends come in all the while."""
    log = new_log(DUES, heard=False)
    log.hear(0, DUES[:5])
    taken = log.take(END_MS, 2)
    assert taken is not None
    assert (log.state, log.whole, log.take(END_MS, 2), log.cut()) == (LogState.FIRING, False, None, None)
    log.hear(5, DUES[5:])
    log.roll_back(taken)
    assert (log.state, log.frontier, len(log)) == (LogState.LOADED, taken.before, 10)
    again = log.take(END_MS, 2)
    assert again is not None
    assert again.entries.tolist() == taken.entries.tolist()
    log.confirm(again.frontier)
    assert (log.state, len(log)) == (LogState.LOADED, 8)


def test_a_change_that_does_not_come_to_its_end_leaves_a_log_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fires nothing, copies nothing, packs nothing, and neither a confirmation nor a roll back mends it."""
    log = new_log(DUES, heard=False)
    log.hear(0, DUES[:5])
    taken = log.take(END_MS, 2)
    assert taken is not None

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DelayIndex, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.hear(5, DUES[5:])
    for _ in range(2):
        assert (log.state, log.whole, log.loaded) == (LogState.TORN, False, False)
        assert (log.take(END_MS, 2), log.cut(), log.pack()) == (None, None, False)
        log.roll_back(taken)
        log.confirm(taken.frontier)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_closed_log_stays_closed(loaded: bool) -> None:
    """Whatever still comes for it, also the end of its loading: nothing of it fires."""
    log = new_log(DUES, heard=False, loaded=loaded)
    log.hear(0, DUES[:5])
    log.close()
    log.hear(5, DUES[5:])
    log.withdraw(ENTRIES[:1], DUES[:1])
    log.discard(BitMap([1]))
    log.admit(ENTRIES[1:2], DUES[1:2])
    if not loaded:
        log.finish_loading()
    assert (log.state, log.next_due_ms(), log.exact_next_due_ms()) == (LogState.CLOSED, None, None)
    assert (log.take(END_MS, 100), log.cut(), log.pack()) == (None, None, False)
    assert log.whole
