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
    "control": None,
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
    "wal_bytes": 128 * 1024 * 1024,
    "relaxed_ms": 20,
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
    "wal_bytes": (16 * 1024, 2**30),
    "relaxed_ms": (0, 60_000),
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

OPTIONAL = {"ttl_ms", "ack_timeout_ms", "max_redeliveries", "dead_letter_topic", "background", "control",
            "max_clock_jump_ms"}  # fmt: skip


GOOD: list[tuple[str, object]] = [
    *((name, end) for name, ends in RANGES.items() for end in ends),
    *((name, None) for name in sorted(OPTIONAL)),
    *(("tracker_prune_ratio", value) for value in (0, 0.5, 1.0)),
    *(("durability", value) for value in get_args(Durability)),
    *((name, value) for name in ("background", "control") for value in (True, False)),
    *(("dead_letter_topic", value) for value in ("dead", "persistent://shop/mail/dead")),
]

BAD: list[tuple[str, object]] = [
    *((name, value) for name, (lowest, highest) in RANGES.items() for value in (lowest - 1, highest + 1, -(10**30))),
    *((name, value) for name in RANGES for value in (True, 1.0, "1", b"1", [1])),
    *((name, None) for name in DEFAULTS if name not in OPTIONAL),
    *(("tracker_prune_ratio", value) for value in (-0.1, 1.1, float("nan"), True, "1")),
    *(("durability", value) for value in ("fsync", "Commit", True, ["commit"])),
    *(("cluster", value) for value in ("", "a\nb", 5)),
    *((name, value) for name in ("background", "control") for value in (1, "yes")),
    *(("dead_letter_topic", value) for value in ("", "a/b", "x" * 500, 7)),
]


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


def test_a_config_cannot_be_changed() -> None:
    """The values stay as they were checked."""
    config = StoreConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.fire_batch = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        StoreConfig(1)  # type: ignore[call-arg]


def test_what_is_documented_is_taken() -> None:
    """The ends of each range, None where it has a meaning, every choice, both forms of a topic's name."""
    for name, value in GOOD:
        assert getattr(make(**{name: value}), name) == value


def test_other_values_are_refused_by_name() -> None:
    """A value beyond its range, of another type (nothing is converted silently), or that is no choice or name."""
    for name, value in BAD:
        with pytest.raises(InvalidArgument) as caught:
            make(**{name: value})
        assert caught.value.field == name
        assert caught.value.value is value
