"""StoreConfig: documented defaults, and a refusal that names the field for every bad value."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args

import pytest

from duelog.store.config import Durability, StoreConfig
from duelog.store.errors import InvalidArgument

DEFAULTS = {
    "partition_ms": 86_400_000,
    "durability": "commit",
    "inline_delay_ms": 0,
    "max_message_bytes": 5 * 1024 * 1024,
    "cluster": "standalone",
    "background": None,
    "max_clock_jump_ms": 30 * 24 * 3600 * 1000,
    "retention_ms": 0,
    "retention_bytes": 0,
    "ttl_ms": None,
    "ack_timeout_ms": None,
    "nack_backoff_ms": 1_000,
    "nack_backoff_max_ms": 60_000,
    "max_redeliveries": None,
    "dead_letter_topic": None,
    "max_in_flight_bytes": 64 * 1024 * 1024,
    "journal_from": 2,
    "journal_bytes": 8 * 1024 * 1024,
    "bucket_ms": 60_000,
    "preload_ms": 60_000,
    "fire_batch": 5_000,
    "ack_flush_ms": 100,
    "tracker_idle_ms": 60_000,
    "tracker_prune_interval_ms": 1_000,
    "tracker_prune_ratio": 0.5,
    "ledger_max_entries": 50_000,
    "ledger_max_bytes": 64 * 1024 * 1024,
    "ledger_max_age_ms": 4 * 3600 * 1000,
    "snapshot_every_entries": 1_000_000,
    "snapshot_part_bytes": 1024 * 1024,
    "max_open_partitions": 64,
    "map_bytes": 16 * 1024**3,
    "run_entries": 192,
    "run_bytes": 256 * 1024,
}

# field: (lowest, highest); None as highest means as high as int64 goes
RANGES: dict[str, tuple[int, int]] = {
    "partition_ms": (1, 2**32 - 1),
    "inline_delay_ms": (0, 2**63 - 1),
    "retention_ms": (0, 2**63 - 1),
    "retention_bytes": (0, 2**63 - 1),
    "ttl_ms": (1, 2**63 - 1),
    "ack_timeout_ms": (1, 2**63 - 1),
    "max_redeliveries": (0, 2**32 - 1),
    "max_message_bytes": (1, 2**30),
    "max_clock_jump_ms": (1, 2**63 - 1),
    "max_in_flight_bytes": (1, 2**63 - 1),
    "bucket_ms": (1, 2**32 - 1),
    "preload_ms": (0, 2**63 - 1),
    "tracker_prune_interval_ms": (0, 86_400_000),
    "fire_batch": (1, 1_000_000),
    "ack_flush_ms": (0, 3_600_000),
    "ledger_max_entries": (1, 2**32 - 1),
    "ledger_max_bytes": (1, 2**63 - 1),
    "ledger_max_age_ms": (1, 2**63 - 1),
    "snapshot_every_entries": (1, 2**32 - 1),
    "snapshot_part_bytes": (1024, 2**30),
    "max_open_partitions": (1, 65_536),
    "map_bytes": (2**20, 2**46),
    "run_entries": (1, 65_535),
    "run_bytes": (1024, 2**30),
}

OPTIONAL = {"ttl_ms", "ack_timeout_ms", "max_redeliveries", "dead_letter_topic", "background", "max_clock_jump_ms"}


def make(**settings: Any) -> StoreConfig:
    """A configuration from settings by name, of any type."""
    return StoreConfig(**settings)


def test_defaults_are_the_documented_ones() -> None:
    """The fields, their order and their defaults are those that stand above."""
    assert dataclasses.asdict(StoreConfig()) == DEFAULTS
    assert [field.name for field in dataclasses.fields(StoreConfig)] == list(DEFAULTS)


def test_every_field_is_explained() -> None:
    """The docstring has a paragraph for each field, in the order of the fields, and for nothing else."""
    assert StoreConfig.__doc__ is not None
    assert re.findall(r"^    ([a-z_]+): ", StoreConfig.__doc__, re.MULTILINE) == list(DEFAULTS)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "1", None])
def test_a_ratio_lies_between_0_and_1(value: object) -> None:
    """Ends included; whole numbers are taken."""
    assert [make(tracker_prune_ratio=taken).tracker_prune_ratio for taken in (0, 0.5, 1.0)] == [0, 0.5, 1.0]
    with pytest.raises(InvalidArgument) as caught:
        make(tracker_prune_ratio=value)
    assert caught.value.field == "tracker_prune_ratio"


def test_a_config_cannot_be_changed() -> None:
    """What was checked stays as it was checked."""
    config = StoreConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.fire_batch = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        StoreConfig(1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", list(RANGES))
def test_range_ends_are_taken_and_what_is_beyond_refused(name: str) -> None:
    """Each number's range is as documented, ends included."""
    lowest, highest = RANGES[name]
    assert getattr(make(**{name: lowest}), name) == lowest
    assert getattr(make(**{name: highest}), name) == highest
    for value in (lowest - 1, highest + 1, -(10**30)):
        with pytest.raises(InvalidArgument) as caught:
            make(**{name: value})
        assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize("name", list(RANGES))
@pytest.mark.parametrize("value", [True, 1.0, "1", b"1", [1]])
def test_a_number_is_an_int_and_no_bool(name: str, value: object) -> None:
    """Nothing is converted silently."""
    with pytest.raises(InvalidArgument) as caught:
        make(**{name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_none_is_taken_where_it_has_a_meaning_only(name: str) -> None:
    """None is a setting of the optional fields and refused by the others."""
    if name in OPTIONAL:
        assert getattr(make(**{name: None}), name) is None
    else:
        with pytest.raises(InvalidArgument) as caught:
            make(**{name: None})
        assert (caught.value.field, caught.value.value) == (name, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("durability", "fsync"),
        ("durability", "Commit"),
        ("durability", True),
        ("durability", ["commit"]),
        ("cluster", ""),
        ("cluster", "a\nb"),
        ("cluster", 5),
        ("background", 1),
        ("background", "yes"),
        ("dead_letter_topic", ""),
        ("dead_letter_topic", "a/b"),
        ("dead_letter_topic", "x" * 500),
        ("dead_letter_topic", 7),
    ],
)
def test_other_bad_values_are_refused_by_name(name: str, value: object) -> None:
    """Choices, labels and topic names are checked too."""
    with pytest.raises(InvalidArgument) as caught:
        make(**{name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


def test_every_choice_is_taken() -> None:
    """Each durability, each background and both forms of a topic name make a configuration."""
    for durability in get_args(Durability):
        assert make(durability=durability).durability == durability
    for background in (True, False, None):
        assert make(background=background).background is background
    for topic in ("dead", "persistent://shop/mail/dead"):
        assert make(dead_letter_topic=topic).dead_letter_topic == topic
