"""The environments of one open store, and the facts that everything over them goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from duelog.store.config import StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.listener import Listeners

from .partition_set import PartitionSet


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The main environment and the time partitions of the store in `path`.

    read_only: another process may be writing. listeners: those of `main` and of `partitions`.
    """

    path: Path
    store_id: bytes
    config: StoreConfig
    read_only: bool
    main: Environment
    partitions: PartitionSet
    listeners: Listeners
