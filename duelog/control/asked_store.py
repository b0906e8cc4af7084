"""What the operations use of a DelayedStore, which is made of them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from duelog.store.clock import Clock
from duelog.store.config import StoreConfig
from duelog.store.duration import Duration
from duelog.store.policy.policies import EffectivePolicies, Policies, PolicyValue

from ..background.maintenance import TickResult
from ..stats import PartitionStats, StoreStats
from ..topic import Topic
from ..topics.dead_letters import DeadLetter, Letters


class Store(Protocol):
    """An open store."""

    topic_deleter: Callable[[str, bool], object] | None

    @property
    def clock(self) -> Clock: ...
    @property
    def config(self) -> StoreConfig: ...
    def topic(self, name: str) -> Topic: ...
    def topics(self, namespace: str | None = None) -> Iterator[Topic]: ...
    def delete_topic(self, name: str) -> None: ...
    def stats(self) -> StoreStats: ...
    def partitions(self) -> list[PartitionStats]: ...
    def tick(self) -> TickResult: ...
    def flush(self) -> None: ...
    def save_snapshots(self) -> int: ...
    def policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> Policies | None: ...
    def all_policies(self) -> dict[str, Policies]: ...
    def effective_policies(self, topic: str, subscription: str | None = None) -> EffectivePolicies: ...
    def update_policies(
        self,
        /,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        **values: PolicyValue | None,
    ) -> Policies: ...
    def dead_letters(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        reason: str | None = None,
        key: str | None = None,
        older_than: Duration | None = None,
    ) -> Iterator[DeadLetter]: ...
    def requeue_dead_letters(self, letters: Letters, *, delay: Duration = 0) -> int: ...
    def purge_dead_letters(self, letters: Letters) -> int: ...
    def remove_policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool: ...
