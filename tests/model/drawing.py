"""Strategies of the model test: settings, due times, and what a run is about."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from duelog.delivery.dispatcher import SubscriptionType

T = TypeVar("T")
Spec = tuple[Any, ...]
START_MS = 1_790_000_000_000
FAR_MS = 10_000_000_000

TOPICS = st.sampled_from(("t0", "t1", "t2"))
NAMES = st.sampled_from(("a", "a", "b"))
PICK = st.integers(0, 1_000)
PICKS = st.lists(PICK, min_size=1, max_size=5)
DUES = st.one_of(
    st.tuples(st.sampled_from(("none", "now", "again"))),
    st.tuples(st.just("after"), st.integers(1, 5) | st.integers(1, 300)),
    st.tuples(st.just("partition"), st.integers(0, 6), st.integers(-1, 1)),
    st.tuples(st.just("before"), st.integers(1, 500) | st.just(700_000_000_000)),
    st.tuples(st.just("far"), st.integers(0, 3)),
    st.tuples(st.just("near"), st.integers(-1, 40)),
)
"""A due time, chosen by the store's time and its partitions: see `_due_ms`."""

INLINE = st.sampled_from((0, 0, 0, 5, 60, 400))
CONFIGS = st.fixed_dictionaries(
    {
        "partition_ms": st.sampled_from((10, 37, 100, 1_000)),
        "bucket_ms": st.sampled_from((1, 7, 50, 60_000)),
        "preload_ms": st.sampled_from((0, 5, 1_000)),
        "fire_batch": st.sampled_from((1, 2, 3, 4, 5_000)),
        "ledger_max_entries": st.integers(1, 5),
        "ledger_max_age_ms": st.sampled_from((20, 300, 14_400_000)),
        "retention_ms": st.sampled_from((0, 0, 30, 1_000)),
        "retention_bytes": st.sampled_from((0, 0, 0, 150, 2_000)),
        "ack_flush_ms": st.sampled_from((0, 3, 100)),
        "run_entries": st.integers(1, 3),
        "max_open_partitions": st.integers(1, 3),
        "snapshot_every_entries": st.sampled_from((1, 5, 1_000_000)),
        "durability": st.sampled_from(("none", "relaxed", "commit", "commit")),
        "inline_delay_ms": INLINE,
        "tracker_idle_ms": st.sampled_from((0, 100, 60_000)),
        "ttl_ms": st.sampled_from((None, None, None, 40, 3_000)),
        "ack_timeout_ms": st.sampled_from((None, None, 1, 50)),
        "nack_backoff_ms": st.sampled_from((0, 10, 1_000)),
        "nack_backoff_max_ms": st.sampled_from((1_000, 3_000)),
        "max_redeliveries": st.sampled_from((None, None, 0, 1, 2)),
    }
)
SLICES = st.sampled_from((0.0, 1e9))
"""A tick is cut by the time that it takes; here it is cut wherever it can be, or nowhere."""

LEADS = st.sampled_from((0, 0, 4, 40, 40))
"""How long before its time what is due may be written, ms."""

ALL, STORING, HANDING_OUT, INLINE_DELAYS, TAKING_BACK = "all", "storing", "handing out", "inline", "taking back"
THEMES = (ALL, STORING, HANDING_OUT, INLINE_DELAYS, TAKING_BACK)
"""The theme of a run: all rules together seldom come to the point of any of them."""

KINDS: st.SearchStrategy[SubscriptionType] = st.sampled_from(("shared", "key_shared", "failover", "exclusive"))

Call = tuple[str, int, int]
TakingCall = tuple[str, list[int], int]
HANDING = (
    *("send", "send", "send", "forward", "receive", "receive", "receive", "ack", "nack", "back off", "retry"),
    *("bounce", "bounce", "move", "seek", "leave", "join", "pause", "resume", "reopen", "cumulative", "latest"),
    *("hold", "letters", "letters", "take letters", "back", "back"),
)
HANDING_CALLS = st.lists(
    st.tuples(st.sampled_from(HANDING), PICK, st.sampled_from((0, 0, 1, 5, 30, 300, 1_000))), min_size=10, max_size=25
)
"""Action of consumers, a number, ms: see `_hand_out`. Hypothesis draws short lists much more often than long ones."""

TAKING = (
    *("send", "send", "cancel", "move", "move", "now", "ask", "forward", "tick", "every", "follow", "policy"),
    *("number", "break", "near", "reopen", "key", "key", "key"),
)
TAKING_CALLS = st.lists(
    st.tuples(st.sampled_from(TAKING), st.lists(PICK, min_size=1, max_size=3), st.sampled_from((1, 2, 5, 5, 30, 300))),
    min_size=5,
    max_size=25,
)
"""A change of messages that wait, numbers, ms: see `_take_back`."""


RUNS = st.fixed_dictionaries(
    {
        "theme": PICK,
        "config": CONFIGS,
        "offset_ms": st.integers(0, 2_000),
        "slice_s": SLICES,
        "load_slice_s": SLICES,
        "kind": KINDS,
        "consumers": st.integers(1, 3),
        "handing": HANDING_CALLS,
        "taking": TAKING_CALLS,
        "lead_ms": LEADS,
    }
)
"""The settings that a run begins with."""


def received_something(machine: Any) -> bool:
    """True if there is a consumer that was ever given a message."""
    return any(consumer.received for consumer in machine.consumers)


def only(*themes: str) -> Callable[[Any], Any]:
    """A rule for runs about these, and about everything."""
    return precondition(lambda self: self.theme in (ALL, *themes))


def pick(choices: Sequence[T], number: int) -> T:
    """One of `choices`, by a number that hypothesis can shrink."""
    return choices[number % len(choices)]
