"""The open store, for asyncio."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, cast

import duelog
from duelog.markers.firing.suspensions import Suspension

from .threads import InThreads, Threads, close_result, in_thread
from .topic import Topic, plain_topic


class Documents(InThreads[duelog.Documents]):
    """See `duelog.Documents`."""

    get = in_thread(duelog.Documents.get)
    put = in_thread(duelog.Documents.put)
    delete = in_thread(duelog.Documents.delete)

    def items(self, prefix: str = "") -> AsyncIterator[tuple[str, duelog.Document]]:
        """As `duelog.Documents.items`, iterated over with `async for`."""
        return self._threads.iterate(lambda: self._inner.items(prefix))


class DelayedStore(InThreads[duelog.DelayedStore]):
    """See `duelog.DelayedStore`. An async context manager; made by `DelayedStore.open`."""

    def __init__(self, inner: duelog.DelayedStore | None = None, threads: Threads | None = None, **_: object) -> None:
        """Use DelayedStore.open; raises TypeError, which says so."""
        if not isinstance(inner, duelog.DelayedStore) or not isinstance(threads, Threads):
            given = "path" if inner is None else repr(inner)
            raise TypeError(f"a store is opened by `async with DelayedStore.open({given}) as store`")
        super().__init__(inner, threads)

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
        return self._inner

    def topic(self, name: str) -> Topic:
        """As `duelog.DelayedStore.topic`."""
        return Topic(self._inner.topic(name), self._threads)

    async def topics(self, namespace: str | None = None, pattern: str | None = None) -> AsyncIterator[Topic]:
        """As `duelog.DelayedStore.topics`."""
        async for topic in self._threads.iterate(lambda: self._inner.topics(namespace, pattern)):
            yield Topic(topic, self._threads)

    async def send_batch(
        self, messages: Iterable[tuple[str | Topic, duelog.Message]], *, allow_past: bool = False
    ) -> list[duelog.MessageId]:
        """As `duelog.DelayedStore.send_batch`. What it is given is iterated over in another thread."""
        pairs = map(_plain, messages) if isinstance(messages, Iterable) else messages
        return await self._threads.run(self._inner.send_batch, pairs, allow_past=allow_past)

    async def on_topics(self, callback: Callable[[list[duelog.TopicEvent]], object]) -> Callable[[], None]:
        """As `duelog.DelayedStore.on_topics`; `callback` is called by the running loop."""
        loop = asyncio.get_running_loop()

        def hear(events: list[duelog.TopicEvent]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(callback, events)

        return self._inner.on_topics(hear)

    @property
    def documents(self) -> Documents:
        """As `duelog.DelayedStore.documents`."""
        return Documents(self._inner.documents, self._threads)

    create_topics = in_thread(duelog.DelayedStore.create_topics)
    delete_topic = in_thread(duelog.DelayedStore.delete_topic)
    set_policies = in_thread(duelog.DelayedStore.set_policies)
    update_policies = in_thread(duelog.DelayedStore.update_policies)
    policies = in_thread(duelog.DelayedStore.policies)
    all_policies = in_thread(duelog.DelayedStore.all_policies)
    remove_policies = in_thread(duelog.DelayedStore.remove_policies)
    effective_policies = in_thread(duelog.DelayedStore.effective_policies)

    async def dead_letters(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        reason: str | None = None,
        key: str | None = None,
        older_than: float | timedelta | None = None,
    ) -> list[duelog.DeadLetter]:
        """As `duelog.DelayedStore.dead_letters`, all at once."""
        found = self._inner.dead_letters
        return await self._threads.run(
            lambda: list(found(topic, subscription, reason=reason, key=key, older_than=older_than))
        )

    requeue_dead_letters = in_thread(duelog.DelayedStore.requeue_dead_letters)
    purge_dead_letters = in_thread(duelog.DelayedStore.purge_dead_letters)
    tick = in_thread(duelog.DelayedStore.tick)
    save_snapshots = in_thread(duelog.DelayedStore.save_snapshots)
    flush = in_thread(duelog.DelayedStore.flush)

    async def check(
        self, *, deep: bool = False, progress: Callable[[int, int], object] | None = None
    ) -> list[duelog.Finding]:
        """As `duelog.DelayedStore.check`, all findings at once: one thread looks, and calls `progress`, to the end."""
        return await self._threads.run(lambda: list(self._inner.check(deep=deep, progress=progress)))

    backup = in_thread(duelog.DelayedStore.backup)
    stats = in_thread(duelog.DelayedStore.stats)
    report_to = in_thread(duelog.DelayedStore.report_to)

    async def suspended(self) -> list[Suspension]:
        """As `duelog.DelayedStore.suspended`."""
        return self._inner.suspended()

    partitions = in_thread(duelog.DelayedStore.partitions)
    kept_by = in_thread(duelog.DelayedStore.kept_by)

    async def close(self) -> None:
        """As `duelog.DelayedStore.close`; waiting receivers get ClosedError."""
        if not self._inner.closed:
            # Shielded, so that after a cancelled close the store is closing, and not half open.
            await asyncio.shield(self._threads.run(self._inner.close))
            self._threads.close()

    @property
    def closed(self) -> bool:
        return self._inner.closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _plain(pair: tuple[str | Topic, duelog.Message]) -> tuple[str | duelog.Topic, duelog.Message]:
    """A pair with a topic of `duelog` in place of one for asyncio; what is no pair is refused by the store."""
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], Topic):
        return plain_topic(pair[0]), pair[1]
    return cast("tuple[str | duelog.Topic, duelog.Message]", pair)


class _Opening:
    """A store that is to be opened: `await` it, or enter it."""

    def __init__(self, open_: Callable[[], duelog.DelayedStore]) -> None:
        self._open = open_
        self._store: DelayedStore | None = None

    async def _make(self) -> DelayedStore:
        threads = Threads()
        opening = threads.look(self._open)
        try:
            inner = await asyncio.wrap_future(opening)
            return DelayedStore(inner, threads)
        except asyncio.CancelledError:
            opening.add_done_callback(close_result)
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
