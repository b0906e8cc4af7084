"""The public face: its names, and the examples in docstrings."""

import doctest
import gc
import importlib
from pathlib import Path

import pytest

import duelog
import duelog.errors
from duelog import DelayedStore, DuelogError
from tests.packaging.tree import FLOORS, ROOT, dotted, modules

NAMES = [
    "DUPLICATE", "Clock", "DeadLetter", "DelayedDeliveryPolicies", "DelayedStore", "Document", "Documents",
    "DuelogError", "Duplicate", "Failover", "Finding", "FollowUp", "KeyShared", "LogPositions", "ManualClock",
    "Message", "MessageId", "MessageIds", "Occurrence", "Outcome", "Policies", "PublishedAt", "ReceivedMessage",
    "ReceivedMessages", "Schedule", "ScheduledMessage", "StoreConfig", "Subscription", "SubscriptionAdmin",
    "SystemClock", "TaskFunction", "TaskMessage", "TickResult", "Topic", "TopicEvent", "Transaction", "Worker",
]  # fmt: skip
"""The names of `from duelog import ...`. A name that goes is a break, one that comes is a promise."""


def test_the_face_has_these_names_and_no_others() -> None:
    """`__all__` is the list above, and each name is there."""
    assert sorted(duelog.__all__) == sorted([*NAMES, "__version__", "connect"])
    assert [name for name in NAMES if not hasattr(duelog, name)] == []


def test_every_public_name_has_a_docstring() -> None:
    """Classes and their public methods, but for properties whose name says it all."""
    for name in NAMES:
        public = getattr(duelog, name)
        assert public.__doc__, name
        for attribute, member in vars(public).items():
            if callable(member) and not attribute.startswith("_"):
                assert member.__doc__, f"{name}.{attribute}"


def test_every_error_of_the_library_can_be_imported_from_duelog_errors() -> None:
    """All that the library defines and does not keep to itself are there."""
    exported = {getattr(duelog.errors, name) for name in duelog.errors.__all__}
    defined = vars(importlib.import_module("duelog.store.errors"))
    public = {each for name, each in defined.items() if isinstance(each, type) and not name.startswith("_")}
    assert {error for error in public if issubclass(error, DuelogError)} <= exported


EXAMPLES = [
    module for floor in FLOORS for module in modules(ROOT / floor) if ">>>" in module.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", EXAMPLES, ids=dotted)
def test_the_examples_in_docstrings_are_true(module: Path) -> None:
    """Each module with an example is run as a doctest."""
    failed, attempted = doctest.testmod(importlib.import_module(dotted(module)))
    assert attempted
    assert not failed


def test_there_are_examples() -> None:
    """The list above is not empty by mistake."""
    assert len(EXAMPLES) >= 5


def test_listing_topics_leaves_nothing_to_the_garbage_collector(store: DelayedStore) -> None:
    """A list of 100,000 topics took 50 MB that stayed until a full collection."""
    store.create_topics([f"t{number}" for number in range(200)])
    gc.collect()
    gc.disable()
    try:
        assert len([topic.name for topic in store.topics()]) == 200
        assert gc.collect() < 200
    finally:
        gc.enable()
