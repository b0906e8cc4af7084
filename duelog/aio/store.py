"""The open store, for asyncio."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, Self, cast

import duelog

from .threads import InThreads, Same, Threads, close_result, explained_by, in_thread, iterated, listed
from .topic import Topic, plain_topic


class Documents(InThreads[duelog.Documents]):
    """See `duelog.Documents`."""

    get = in_thread(duelog.Documents.get)
    put = in_thread(duelog.Documents.put)
    delete = in_thread(duelog.Documents.delete)
    items = iterated(duelog.Documents.items)


class DelayedStore(InThreads[duelog.DelayedStore]):
    """See `duelog.DelayedStore`. An async context manager; made by `DelayedStore.open`."""

    closed = Same[bool]()

    def __init__(self, inner: duelog.DelayedStore | None = None, threads: Threads | None = None, **_: object) -> None:
        """Use DelayedStore.open; raises TypeError, which says so."""
        if not isinstance(inner, duelog.DelayedStore) or not isinstance(threads, Threads):
            given = "path" if inner is None else repr(inner)
            raise TypeError(f"a store is opened by `async with DelayedStore.open({given}) as store`")
        super().__init__(inner, threads)

    @classmethod
    @explained_by(duelog.DelayedStore.open)
    def open(
        cls,
        path: str | os.PathLike[str],
        config: duelog.StoreConfig | None = None,
        *,
        clock: duelog.Clock | None = None,
        read_only: bool = False,
    ) -> _Opening:
        """Open the store in directory `path`, or make one; await the result, or enter it with `async with`."""
        return _Opening(functools.partial(duelog.DelayedStore.open, path, config, clock=clock, read_only=read_only))

    @property
    def sync(self) -> duelog.DelayedStore:
        """The store itself, for other threads."""
        return self._inner

    @explained_by(duelog.DelayedStore.topic)
    def topic(self, name: str) -> Topic:
        """The topic of a name, which need not exist. Raises InvalidArgument."""
        return Topic(self._inner.topic(name), self._threads)

    @explained_by(duelog.DelayedStore.topics)
    async def topics(self, namespace: str | None = None, pattern: str | None = None) -> AsyncIterator[Topic]:
        """Iterate over topics that exist, in order of full name, with `async for`."""
        async for topic in self._threads.iterate(lambda: self._inner.topics(namespace, pattern)):
            yield Topic(topic, self._threads)

    @explained_by(duelog.DelayedStore.send_batch)
    async def send_batch(
        self, messages: Iterable[tuple[str | Topic, duelog.Message]], *, allow_past: bool = False
    ) -> list[duelog.MessageId]:
        """Append messages to several topics as one atomic group. `messages` is iterated over in another thread."""
        pairs = map(_plain, messages) if isinstance(messages, Iterable) else messages
        return await self._threads.run(self._inner.send_batch, pairs, allow_past=allow_past)

    @explained_by(duelog.DelayedStore.on_topics)
    async def on_topics(self, callback: Callable[[list[duelog.TopicEvent]], object]) -> Callable[[], None]:
        """Have `callback` called with the topics that are created and deleted from now on, by the running loop."""
        loop = asyncio.get_running_loop()

        def hear(events: list[duelog.TopicEvent]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(callback, events)

        return self._inner.on_topics(hear)

    @property
    def documents(self) -> Documents:
        """Small durable records of the program's own, changed by compare-and-set; in the store's checks and copies."""
        return Documents(self._inner.documents, self._threads)

    create_topics = in_thread(duelog.DelayedStore.create_topics)
    delete_topic = in_thread(duelog.DelayedStore.delete_topic)
    set_policies = in_thread(duelog.DelayedStore.set_policies)
    update_policies = in_thread(duelog.DelayedStore.update_policies)
    policies = in_thread(duelog.DelayedStore.policies)
    all_policies = in_thread(duelog.DelayedStore.all_policies)
    remove_policies = in_thread(duelog.DelayedStore.remove_policies)
    effective_policies = in_thread(duelog.DelayedStore.effective_policies)
    dead_letters = listed(duelog.DelayedStore.dead_letters)
    requeue_dead_letters = in_thread(duelog.DelayedStore.requeue_dead_letters)
    purge_dead_letters = in_thread(duelog.DelayedStore.purge_dead_letters)
    tick = in_thread(duelog.DelayedStore.tick)
    save_snapshots = in_thread(duelog.DelayedStore.save_snapshots)
    flush = in_thread(duelog.DelayedStore.flush)
    check = listed(duelog.DelayedStore.check)
    backup = in_thread(duelog.DelayedStore.backup)
    stats = in_thread(duelog.DelayedStore.stats)
    report_to = in_thread(duelog.DelayedStore.report_to)
    suspended = in_thread(duelog.DelayedStore.suspended)
    partitions = in_thread(duelog.DelayedStore.partitions)
    kept_by = in_thread(duelog.DelayedStore.kept_by)

    @explained_by(duelog.DelayedStore.close)
    async def close(self) -> None:
        """Persist acknowledgements and close. Waiting receivers get ClosedError. A second call does nothing."""
        if not self._inner.closed:
            # Shielded, so that after a cancelled close the store is closing, and not half open.
            await asyncio.shield(self._threads.run(self._inner.close))
            self._threads.close()

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
