"""A queue of keys by time, against a dict that is searched."""

from hypothesis import given
from hypothesis import strategies as st

from duelog.store.timer_queue import TimerQueue

KEY = st.integers(0, 4)
TIME = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), KEY, TIME),
        st.tuples(st.just("replace"), KEY, TIME),
        st.tuples(st.just("discard"), KEY, st.none()),
        st.tuples(st.just("pop_due"), st.none(), TIME),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_key_comes_up_once_at_the_last_time_it_was_given(steps: list[tuple[str, int, int]]) -> None:
    """The first of keys with one time is the one that got it first; pushing never makes a key later."""
    queue: TimerQueue[int] = TimerQueue()
    twin: dict[int, tuple[int, int]] = {}  # key -> time, number of the step that gave it
    for number, (step, key, at_ms) in enumerate(steps):
        if step == "push":
            earlier = key not in twin or at_ms < twin[key][0]
            assert queue.push(key, at_ms) == earlier
            if earlier:
                twin[key] = at_ms, number
        elif step == "replace":
            queue.replace(key, at_ms)
            twin[key] = at_ms, number
        elif step == "discard":
            queue.discard(key)
            twin.pop(key, None)
        elif step == "clear":
            queue.clear()
            twin.clear()
        else:
            first = min(twin, key=twin.__getitem__, default=None)
            due = first if first is not None and twin[first][0] <= at_ms else None
            assert queue.pop_due(at_ms) == due
            if due is not None:
                del twin[due]
        queue._check()
        assert len(queue) == len(twin)
        assert [queue.due_ms(key) for key in range(5)] == [twin.get(key, (None, 0))[0] for key in range(5)]
        found = queue.next()
        if twin:
            first = min(twin, key=twin.__getitem__)
            assert found == (twin[first][0], first)
        else:
            assert found is None


def test_a_key_that_is_moved_without_end_takes_no_space() -> None:
    """Entries that were replaced go, also those that never come to the top of the heap."""
    queue: TimerQueue[str] = TimerQueue()
    queue.replace("first", 0)
    for at_ms in range(1, 10_000):
        queue.replace("moved", at_ms)
        queue._check()
        assert len(queue._heap) < 100
    assert (queue.pop_due(10_000), queue.pop_due(10_000), queue.pop_due(10_000)) == ("first", "moved", None)
