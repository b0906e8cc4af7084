"""The store, topics, producers and consumers, for asyncio: waiting without a thread, receiving that may be ended."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Self, cast

import duelog
from duelog.connected.connected_store import ConnectedSubscription, ConnectedTopic
from duelog.delivery.consumer_arguments import deadline_of
from duelog.delivery.dispatcher import SubscriptionType
from duelog.sending import producer
from duelog.sending.outbox import PutOutcome
from duelog.store.clock import SystemClock
from duelog.store.duration import Duration
from duelog.store.errors import ClosedError, DuelogError
from duelog.store.message import Dedup

from .threads import InThreads, Same, Threads, close_result, explained_by, in_thread, iterated, listed, made_in_thread

_LONGEST_WAIT_S = 60.0
"""A wall clock that is set forward meanwhile is noticed after it."""


class SubscriptionAdmin(InThreads[duelog.SubscriptionAdmin]):
    """See `duelog.SubscriptionAdmin`."""

    name = Same[str]()
    topic = Same[str]()
    peek = in_thread(duelog.SubscriptionAdmin.peek)
    skip = in_thread(duelog.SubscriptionAdmin.skip)
    expire = in_thread(duelog.SubscriptionAdmin.expire)
    reset = in_thread(duelog.SubscriptionAdmin.reset)
    pause = in_thread(duelog.SubscriptionAdmin.pause)
    resume = in_thread(duelog.SubscriptionAdmin.resume)
    stats = in_thread(duelog.SubscriptionAdmin.stats)
    tasks = in_thread(duelog.SubscriptionAdmin.tasks)


class Subscription(InThreads[duelog.Subscription]):
    """See `duelog.Subscription`. An async context manager, and an async iterator over its messages.

    `async for message in subscription` fetches one message at a time, so that it holds none that it does not work
    at; it ends when the subscription or the store is closed. What it yields is to be acknowledged as always.
    """

    name = Same[str]()
    topic = Same[str]()
    type = Same[SubscriptionType]()
    durable = Same[bool]()
    active = Same[bool]()
    paused = Same[bool]()
    max_in_flight = Same[int]()
    hands_alike = Same[bool]()
    held = Same[int]()

    @explained_by(duelog.Subscription.receive)
    async def receive(self, max_messages: int = 1, timeout: Duration | None = None) -> list[duelog.ReceivedMessage]:
        """Receive messages that are due, at most `max_messages`; waits for the first. Cancelled, it gives them back."""
        subscription, loop = self._inner, asyncio.get_running_loop()
        if isinstance(subscription, ConnectedSubscription):
            receiving = subscription.receive_async(max_messages, timeout)
            try:
                return await asyncio.wrap_future(receiving)
            except asyncio.CancelledError:  # perhaps between the messages' coming and the task's going on
                receiving.add_done_callback(subscription.give_back)
                raise
        clock = subscription.clock
        deadline_ms = deadline_of(clock.now_ms(), timeout)
        woken = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(woken.set)
            except RuntimeError:  # the loop is closed, so nothing waits
                return

        subscription.add_waker(wake)
        try:
            while True:
                woken.clear()
                now_ms = clock.now_ms()
                batch, again_ms = await self._poll(max_messages)
                if batch or not subscription.may_wait or (deadline_ms is not None and now_ms >= deadline_ms):
                    return batch
                until_ms = min((ms for ms in (deadline_ms, again_ms) if ms is not None), default=None)
                await self._wait(woken, until_ms)
        finally:
            subscription.remove_waker(wake)

    async def _poll(self, max_messages: int) -> tuple[list[duelog.ReceivedMessage], int | None]:
        looking = self._threads.look(self._inner.poll, max_messages)
        try:
            return await asyncio.wrap_future(looking)
        except asyncio.CancelledError:
            looking.add_done_callback(self._give_back)
            raise

    def _give_back(self, looking: Future[tuple[list[duelog.ReceivedMessage], int | None]]) -> None:
        """Give back what a cancelled call was handed. In the thread that looked, or the loop's if that is done."""
        if looking.cancelled() or looking.exception() is not None or self._inner.closed:
            return
        batch = looking.result()[0]
        if batch:
            try:
                self._inner.nack(batch, delay=0)
            except DuelogError:  # closed or deleted meanwhile, which gives it back as well
                return

    async def _wait(self, woken: asyncio.Event, until_ms: int | None) -> None:
        """Until the topic changes or the store's clock shows `until_ms`; may come back early."""
        clock = self._inner.clock
        if not isinstance(clock.wrapped, SystemClock) and until_ms is not None:
            # Only a thread can wait for a clock that the program moves. Cancelled, it ends at the next change.
            waiting = self._threads.look(self._inner.wait, until_ms)
            try:
                await asyncio.wrap_future(waiting)
            except asyncio.CancelledError:
                self._inner.wake()
                raise
            return
        wait_s = _LONGEST_WAIT_S
        if until_ms is not None:
            wait_s = min(max(until_ms - clock.now_ms(), 0) / 1000, wait_s)
        try:
            async with asyncio.timeout(wait_s):
                await woken.wait()
        except TimeoutError:
            return

    ack = in_thread(duelog.Subscription.ack)
    ack_cumulative = in_thread(duelog.Subscription.ack_cumulative)
    holds = in_thread(duelog.Subscription.holds)
    nack = in_thread(duelog.Subscription.nack)
    extend = in_thread(duelog.Subscription.extend)
    nack_all = in_thread(duelog.Subscription.nack_all)
    retry_later = in_thread(duelog.Subscription.retry_later)
    dead_letter = in_thread(duelog.Subscription.dead_letter)
    seek = in_thread(duelog.Subscription.seek)
    pause = in_thread(duelog.Subscription.pause)
    resume = in_thread(duelog.Subscription.resume)
    stats = in_thread(duelog.Subscription.stats)

    @explained_by(duelog.Subscription.close)
    async def close(self, *, failed: bool = True) -> None:
        """Leave: messages received and not acknowledged are handed out again. A second call does what is left."""
        if not self._inner.closed:
            await asyncio.shield(self._threads.run(lambda: self._inner.close(failed=failed)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> duelog.ReceivedMessage:
        while not self._inner.closed:
            try:
                batch = await self.receive()
            except ClosedError:
                if not self._inner.closed:  # a read-only store, or a child process
                    raise
                break
            if batch:
                return batch[0]
            if not self._inner.may_wait:
                break
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Producer(InThreads[producer.Producer]):
    """See `duelog.Topic.producer`. After a cancelled send its number may be sent again."""

    name = Same[str]()
    last_sequence_id = Same[int]()
    send = in_thread(producer.Producer.send)
    send_batch = in_thread(producer.Producer.send_batch)


class Topic(InThreads[duelog.Topic]):
    """See `duelog.Topic`. What `send_batch` is given is iterated over in another thread."""

    name = Same[str]()

    @explained_by(duelog.Topic.send)
    async def send(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        allow_past: bool = False,
        ttl: Duration | None = None,
        dedup_key: str | None = None,
        dedup_for: Duration | None = None,
        replace: bool = False,
    ) -> duelog.MessageId:
        """Append one message and return its id once it is as durable as the store's `durability` says.

        Sends that are awaited side by side share commits, and hold no threads.
        """
        dedup = Dedup.checked(dedup_key, dedup_for, replace)
        if isinstance(self._inner, ConnectedTopic):
            sent = self._inner.send_async(
                payload,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                key=key,
                properties=properties,
                allow_past=allow_past,
                ttl=ttl,
                dedup_key=dedup_key,
                dedup_for=dedup_for,
                replace=replace,
            )
            return await asyncio.wrap_future(sent)
        future: asyncio.Future[duelog.MessageId] = asyncio.get_running_loop().create_future()
        sender = self._inner.sender
        encoded = sender.encode_one(payload, deliver_at, deliver_after, key, properties, allow_past, ttl, dedup)
        item = sender.outgoing(encoded, future, _tell, dedup=dedup, wanted=_is_wanted)
        try:
            if not sender.put(item, wait=False):  # no capacity: a thread waits for it
                await self._threads.run(sender.put, item, wait=True)
            return await future
        except asyncio.CancelledError:
            future.cancel()
            raise

    send_batch = in_thread(duelog.Topic.send_batch)
    send_payloads = in_thread(duelog.Topic.send_payloads)

    create = in_thread(duelog.Topic.create)
    find = in_thread(duelog.Topic.find)
    cancel_key = in_thread(duelog.Topic.cancel_key)
    cancel_keys = in_thread(duelog.Topic.cancel_keys)
    count = in_thread(duelog.Topic.count)
    subscribe = made_in_thread(duelog.Topic.subscribe, Subscription)
    reader = made_in_thread(duelog.Topic.reader, Subscription)
    subscription = made_in_thread(duelog.Topic.subscription, SubscriptionAdmin)
    producer = made_in_thread(duelog.Topic.producer, Producer)
    producer_number = in_thread(duelog.Topic.producer_number)
    unsubscribe = in_thread(duelog.Topic.unsubscribe)
    clear_inline = in_thread(duelog.Topic.clear_inline)
    cancel = in_thread(duelog.Topic.cancel)
    cancel_batch = in_thread(duelog.Topic.cancel_batch)
    reschedule = in_thread(duelog.Topic.reschedule)
    reschedule_batch = in_thread(duelog.Topic.reschedule_batch)
    fire_now = in_thread(duelog.Topic.fire_now)
    every = in_thread(duelog.Topic.every)
    schedules = in_thread(duelog.Topic.schedules)
    pause_schedule = in_thread(duelog.Topic.pause_schedule)
    resume_schedule = in_thread(duelog.Topic.resume_schedule)
    remove_schedule = in_thread(duelog.Topic.remove_schedule)
    state = in_thread(duelog.Topic.state)
    get = in_thread(duelog.Topic.get)
    position_of = in_thread(duelog.Topic.position_of)
    positions = in_thread(duelog.Topic.positions)
    ledgers = in_thread(duelog.Topic.ledgers)
    scheduled = iterated(duelog.Topic.scheduled)
    keys = iterated(duelog.Topic.keys)
    exists = in_thread(duelog.Topic.exists)
    subscriptions = in_thread(duelog.Topic.subscriptions)
    stats = in_thread(duelog.Topic.stats)


def _is_wanted(future: asyncio.Future[duelog.MessageId]) -> bool:
    return not future.cancelled()


def _tell(results: list[tuple[asyncio.Future[duelog.MessageId], PutOutcome]]) -> None:
    """Have futures know what became of their messages: one turn of each loop for all of a group."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[duelog.MessageId], PutOutcome]]] = {}
    for result in results:
        loops.setdefault(result[0].get_loop(), []).append(result)
    for loop, own in loops.items():
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(results: list[tuple[asyncio.Future[duelog.MessageId], PutOutcome]]) -> None:
    for future, outcome in results:
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, duelog.MessageId):
            future.set_result(outcome)
        elif isinstance(outcome, Exception):
            future.set_exception(outcome)


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

    @classmethod
    @explained_by(duelog.connect)
    def connect(
        cls,
        place: str | os.PathLike[str],
        *,
        token: str | None = None,
        tls_trust: str | os.PathLike[str] | None = None,
        reconnect: Duration = 30,
        wait: Duration = 0,
        name: str | None = None,
    ) -> _Opening:
        """Connect to the process that has a store open; await the result, or enter it with `async with`."""
        connect = functools.partial(duelog.connect, place, token=token, tls_trust=tls_trust, name=name)
        return _Opening(functools.partial(connect, reconnect=reconnect, wait=wait))

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

    @explained_by(duelog.DelayedStore.transaction)
    def transaction(self) -> duelog.Transaction:
        """Begin to collect operations that are stored together when an `async with` block ends; topics by name."""
        return self._inner.transaction()

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
    hand_over = in_thread(duelog.DelayedStore.hand_over)
    save_snapshots = in_thread(duelog.DelayedStore.save_snapshots)
    save_manifest = in_thread(duelog.DelayedStore.save_manifest)
    flush = in_thread(duelog.DelayedStore.flush)
    listen = in_thread(duelog.DelayedStore.listen)
    check = listed(duelog.DelayedStore.check)
    backup = in_thread(duelog.DelayedStore.backup)
    stats = in_thread(duelog.DelayedStore.stats)
    report_to = in_thread(duelog.DelayedStore.report_to)
    suspended = in_thread(duelog.DelayedStore.suspended)
    partitions = in_thread(duelog.DelayedStore.partitions)
    kept_by = in_thread(duelog.DelayedStore.kept_by)
    snapshots = in_thread(duelog.DelayedStore.snapshots)
    overview = in_thread(duelog.DelayedStore.overview)
    timeline = in_thread(duelog.DelayedStore.timeline)
    timeline_by_topic = in_thread(duelog.DelayedStore.timeline_by_topic)
    topic_rows = in_thread(duelog.DelayedStore.topic_rows)
    calendar = in_thread(duelog.DelayedStore.calendar)
    receiving = in_thread(duelog.DelayedStore.receiving)
    connections = in_thread(duelog.DelayedStore.connections)

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
        return pair[0]._inner, pair[1]
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
