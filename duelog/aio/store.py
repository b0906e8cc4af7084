"""The open store, for asyncio."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from concurrent.futures import Future
from types import EllipsisType
from typing import Any, Self

import duelog
from duelog.backup import BackupResult
from duelog.markers.firing.suspensions import Suspension
from duelog.stats import PartitionStats, StoreStats
from duelog.store.policy.policies import EffectivePolicies, PolicyValue

from .threads import Threads
from .topic import Topic


class DelayedStore:
    """See `duelog.DelayedStore`. An async context manager."""

    def __init__(self, store: duelog.DelayedStore, threads: Threads) -> None:
        """Use DelayedStore.open."""
        self._store = store
        self._threads = threads

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: duelog.StoreConfig | None = None,
        *,
        clock: duelog.Clock | None = None,
        read_only: bool = False,
    ) -> _Opening:
        """To be awaited, or entered with `async with`."""
        return _Opening(functools.partial(duelog.DelayedStore.open, path, config, clock=clock, read_only=read_only))

    @property
    def sync(self) -> duelog.DelayedStore:
        """The store itself, for other threads."""
        return self._store

    def topic(self, name: str) -> Topic:
        """As `duelog.DelayedStore.topic`."""
        return Topic(self._store.topic(name), self._threads)

    async def topics(self, namespace: str | None = None, pattern: str | None = None) -> AsyncIterator[Topic]:
        """As `duelog.DelayedStore.topics`."""
        async for topic in self._threads.iterate(lambda: self._store.topics(namespace, pattern)):
            yield Topic(topic, self._threads)

    async def delete_topic(self, name: str) -> None:
        """As `duelog.DelayedStore.delete_topic`."""
        await self._threads.run(self._store.delete_topic, name)

    async def set_policies(
        self,
        policies: duelog.DelayedDeliveryPolicies,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        expected: duelog.DelayedDeliveryPolicies | EllipsisType | None = ...,
    ) -> None:
        """As `duelog.DelayedStore.set_policies`."""
        await self._threads.run(
            self._store.set_policies,
            policies,
            namespace=namespace,
            topic=topic,
            subscription=subscription,
            expected=expected,
        )

    async def update_policies(
        self,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        **values: PolicyValue | None,
    ) -> duelog.Policies:
        """As `duelog.DelayedStore.update_policies`."""
        given: dict[str, Any] = {"namespace": namespace, "topic": topic, "subscription": subscription, **values}
        return await self._threads.run(self._store.update_policies, **given)

    async def policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> duelog.Policies | None:
        """As `duelog.DelayedStore.policies`."""
        return await self._threads.run(
            self._store.policies, namespace=namespace, topic=topic, subscription=subscription
        )

    async def all_policies(self) -> dict[str, duelog.Policies]:
        """As `duelog.DelayedStore.all_policies`."""
        return await self._threads.run(self._store.all_policies)

    async def remove_policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool:
        """As `duelog.DelayedStore.remove_policies`."""
        return await self._threads.run(
            self._store.remove_policies, namespace=namespace, topic=topic, subscription=subscription
        )

    async def effective_policies(self, topic: str, subscription: str | None = None) -> EffectivePolicies:
        """As `duelog.DelayedStore.effective_policies`."""
        return await self._threads.run(self._store.effective_policies, topic, subscription)

    async def dead_letters(self, topic: str | None = None, subscription: str | None = None) -> list[duelog.DeadLetter]:
        """As `duelog.DelayedStore.dead_letters`, all at once."""
        return await self._threads.run(lambda: list(self._store.dead_letters(topic, subscription)))

    async def requeue_dead_letters(self, letters: duelog.DeadLetter | Iterable[duelog.DeadLetter]) -> int:
        """As `duelog.DelayedStore.requeue_dead_letters`."""
        return await self._threads.run(self._store.requeue_dead_letters, letters)

    async def purge_dead_letters(self, letters: duelog.DeadLetter | Iterable[duelog.DeadLetter]) -> int:
        """As `duelog.DelayedStore.purge_dead_letters`."""
        return await self._threads.run(self._store.purge_dead_letters, letters)

    async def tick(self) -> duelog.TickResult:
        """As `duelog.DelayedStore.tick`."""
        return await self._threads.run(self._store.tick)

    async def flush(self) -> None:
        """As `duelog.DelayedStore.flush`."""
        await self._threads.run(self._store.flush)

    async def check(self, *, deep: bool = False) -> list[duelog.Finding]:
        """As `duelog.DelayedStore.check`, all findings at once: one thread looks, from beginning to end."""
        return await self._threads.run(lambda: list(self._store.check(deep=deep)))

    async def backup(self, dest: str | os.PathLike[str]) -> BackupResult:
        """As `duelog.DelayedStore.backup`."""
        return await self._threads.run(lambda: self._store.backup(dest))

    async def stats(self) -> StoreStats:
        """As `duelog.DelayedStore.stats`."""
        return await self._threads.run(self._store.stats)

    async def suspended(self) -> list[Suspension]:
        """As `duelog.DelayedStore.suspended`."""
        return self._store.suspended()

    async def partitions(self) -> list[PartitionStats]:
        """As `duelog.DelayedStore.partitions`."""
        return await self._threads.run(self._store.partitions)

    async def close(self) -> None:
        """As `duelog.DelayedStore.close`; waiting receivers get ClosedError."""
        if not self._store.closed:
            # Shielded, so that after a cancelled close the store is closing, and not half open.
            await asyncio.shield(self._threads.run(self._store.close))
            self._threads.close()

    @property
    def closed(self) -> bool:
        return self._store.closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<aio {self._store!r}>"


class _Opening:
    """A store that is to be opened: `await` it, or enter it."""

    def __init__(self, open_: Callable[[], duelog.DelayedStore]) -> None:
        self._open = open_
        self._store: DelayedStore | None = None

    async def _make(self) -> DelayedStore:
        threads = Threads()
        opening = threads.look(self._open)
        try:
            return DelayedStore(await asyncio.wrap_future(opening), threads)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        except BaseException:
            threads.close()
            raise

    def __await__(self) -> Generator[Any, None, DelayedStore]:
        return self._make().__await__()

    async def __aenter__(self) -> DelayedStore:
        self._store = await self._make()
        return self._store

    async def __aexit__(self, *_: object) -> None:
        if self._store is not None:
            await self._store.close()


def _close_opened(opening: Future[duelog.DelayedStore]) -> None:
    """Close a store whose opening was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
