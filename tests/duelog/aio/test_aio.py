"""The face for asyncio: same results, no blocked event loop, nothing lost by cancelling."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, cast

import pytest

import duelog
from duelog import ManualClock, Message, ReceivedMessage, StoreConfig, aio
from duelog.connected.connected_store import ConnectedSubscription
from duelog.errors import ClosedError, InvalidMessage
from duelog.sending.producer import Producer
from tests.conftest import START_MS

P = ParamSpec("P")

LIMIT_S = 60
"""How long anything may take before a test is taken for hung."""


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine; one that hangs fails."""

    @functools.wraps(test)
    def run(*arguments: P.args, **fixtures: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), LIMIT_S))

    return run


class Gate:
    """Stands before a call: it says when a thread has come to it, and holds the thread until it is opened."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)
        return self._call(*args, **kwargs)

    async def wait_until_reached(self) -> None:
        """Let the loop go on until a thread stands at the gate."""
        await asyncio.to_thread(self.reached.wait, LIMIT_S)


def findings(path: Path) -> list[duelog.Finding]:
    """The findings of check in a closed store."""
    with duelog.DelayedStore.open(path, clock=ManualClock(START_MS)) as store:
        return list(store.check(deep=True))


@in_a_loop
async def test_a_message_goes_through_the_whole_face(tmp_path: Path, clock: ManualClock) -> None:
    """Send, look, reschedule, cancel, receive, acknowledge: as in the other face."""
    async with aio.DelayedStore.open(tmp_path / "s", clock=clock) as store:
        topic = store.topic("t")
        first = await topic.send(b"a", deliver_after=5)
        second, third = await topic.send_batch([Message(b"b", deliver_after=6), Message(b"c", deliver_after=7)])
        assert [message.payload async for message in topic.scheduled()] == [b"a", b"b", b"c"]
        assert await topic.cancel(second)
        assert await topic.state(second) == "cancelled"
        assert await topic.reschedule(third, deliver_after=1) is not None
        async with await topic.subscribe("sub") as subscription:
            assert await subscription.receive(9) == []
            clock.advance(5_000)
            batch = await subscription.receive(9)
            assert [message.payload for message in batch] == [b"c", b"a"]
            assert batch[1].message_id == first
            assert await subscription.ack(batch, durable=True) == 2
            assert (await subscription.stats()).backlog == 0
        assert [topic.name async for topic in store.topics()] == ["persistent://public/default/t"]
        assert await store.check() == []
    assert store.closed


@in_a_loop
async def test_the_loop_goes_on_while_a_commit_hangs(tmp_path: Path, clock: ManualClock) -> None:
    """The loop itself opens the gate at which the commit stands: blocked, it never would."""
    async with aio.DelayedStore.open(tmp_path / "s", clock=clock) as store:
        topic = store.topic("t")
        await topic.send(b"before")
        writer = store.sync._engine.writer()
        gate = Gate(writer.write)
        writer.write = gate  # type: ignore[method-assign]
        sending = [asyncio.create_task(topic.send(b"x")) for _ in range(50)]
        batch = asyncio.create_task(topic.send_batch([Message(b"y")]))
        await gate.wait_until_reached()
        assert not any(task.done() for task in sending)
        gate.opened.set()
        assert len(set(await asyncio.gather(*sending))) == 50
        await batch
        del writer.write
    assert findings(tmp_path / "s") == []


@in_a_loop
async def test_a_waiting_receiver_is_woken_and_holds_no_thread(tmp_path: Path) -> None:
    """A hundred wait, more than there are threads, and each gets its message."""
    async with aio.DelayedStore.open(tmp_path / "s", StoreConfig(durability="none")) as store:
        topic = store.topic("t")
        consumers = [await topic.subscribe("sub", type="shared") for _ in range(100)]
        waiting = [asyncio.create_task(consumer.receive()) for consumer in consumers]
        while any(not task._fut_waiter for task in waiting):  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        await topic.send_batch([Message(str(n).encode(), deliver_after=0.01) for n in range(100)])
        got = await asyncio.gather(*waiting)
        assert sorted(int(batch[0].payload) for batch in got) == list(range(100))


@in_a_loop
async def test_what_a_cancelled_receive_was_handed_is_received_by_the_next(tmp_path: Path, clock: ManualClock) -> None:
    """The receive is cancelled while a thread takes messages for it: they come again at once, to another consumer."""
    async with aio.DelayedStore.open(tmp_path / "s", clock=clock) as store:
        topic = store.topic("t")
        await topic.send_batch([Message(b"a"), Message(b"b")])
        first, other = [await topic.subscribe("sub", type="shared") for _ in range(2)]
        gate = Gate(first._inner.poll)
        first._inner.poll = gate  # type: ignore[method-assign]
        receiving = asyncio.create_task(first.receive(2))
        await gate.wait_until_reached()
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        gate.opened.set()
        batch: list[duelog.ReceivedMessage] = []
        while len(batch) < 2:
            batch += await other.receive(2)
        assert sorted(message.payload for message in batch) == [b"a", b"b"]
        assert await other.ack(batch) == 2
    assert findings(tmp_path / "s") == []


@in_a_loop
async def test_a_receive_cancelled_after_it_was_handed_messages_gives_them_back(
    tmp_path: Path, clock: ManualClock
) -> None:
    """The thread is done, the task has not gone on yet: the messages are not lost between the two."""
    async with aio.DelayedStore.open(tmp_path / "s", clock=clock) as store:
        topic = store.topic("t")
        await topic.send(b"a")
        subscription = await topic.subscribe("sub")
        for turns in range(12):  # the task is cancelled after so many turns of the loop, each time at another step
            receiving = asyncio.create_task(subscription.receive())
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            try:
                batch = await receiving
            except asyncio.CancelledError:
                continue
            await subscription.nack(batch, delay=0)
        batch = []
        while not batch:
            batch = await subscription.receive()
        assert batch[0].payload == b"a"
        await subscription.ack(batch)
    assert findings(tmp_path / "s") == []


@in_a_loop
async def test_what_came_by_a_connection_as_its_receive_was_cancelled_is_received_by_the_next(tmp_path: Path) -> None:
    """The message is there, the task has not gone on yet: it stayed with the consumer, and nobody had it."""
    with duelog.DelayedStore.open(tmp_path / "s") as store:
        async with aio.DelayedStore.connect(tmp_path / "s") as connected:
            subscription = await connected.topic("t").subscribe("sub")
            inner, futures = cast(ConnectedSubscription, subscription._inner), list[Future[list[ReceivedMessage]]]()
            receive = inner.receive_async

            def kept(*arguments: Any) -> Future[list[ReceivedMessage]]:
                futures.append(receive(*arguments))
                return futures[-1]

            inner.receive_async = kept  # type: ignore[method-assign,assignment]
            receiving = asyncio.create_task(subscription.receive())
            while not futures:
                await asyncio.sleep(0)
            store.topic("t").send(b"x")
            assert futures[0].result(LIMIT_S)  # the loop stands meanwhile
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            (message,) = await subscription.receive()
            assert message.payload == b"x"


@in_a_loop
async def test_a_cancelled_waiter_leaves_no_waker_behind(tmp_path: Path) -> None:
    """A receive that waited in vain costs nothing afterwards."""
    async with aio.DelayedStore.open(tmp_path / "s") as store:
        subscription = await store.topic("t").subscribe("sub")
        waiting = [asyncio.create_task(subscription.receive(timeout=None)) for _ in range(5)]
        await asyncio.sleep(0)
        state = subscription._inner._topic
        assert len(state.wakers) == 5
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert state.wakers == frozenset()


@in_a_loop
async def test_closing_ends_iteration_and_fails_a_waiting_receive(tmp_path: Path) -> None:
    """An `async for` over a subscription ends with the store; a receive says why."""
    store = await aio.DelayedStore.open(tmp_path / "s")
    topic = store.topic("t")
    listening = await topic.subscribe("a")
    waiting = asyncio.create_task((await topic.subscribe("b")).receive())
    got: list[bytes] = []
    second = asyncio.Event()

    async def listen() -> None:
        async for message in listening:
            got.append(message.payload)
            await listening.ack(message)
            if len(got) == 2:
                second.set()

    task = asyncio.create_task(listen())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await topic.send(b"1")
    await topic.send(b"2", deliver_after=0.02)
    await second.wait()
    blocked = asyncio.create_task((await topic.subscribe("c", initial_position="latest")).receive())
    await asyncio.sleep(0)
    await store.close()
    await task
    assert got == [b"1", b"2"]
    with pytest.raises(ClosedError):
        await blocked


@in_a_loop
async def test_a_message_that_cannot_be_taken_is_refused_by_send(tmp_path: Path, clock: ManualClock) -> None:
    """Errors are those of the other face."""
    async with aio.DelayedStore.open(tmp_path / "s", clock=clock) as store:
        with pytest.raises(InvalidMessage):
            await store.topic("t").send("text")  # type: ignore[arg-type]
        assert not await store.topic("t").exists()


@pytest.mark.parametrize("name", ["DelayedStore", "Topic", "Subscription", "SubscriptionAdmin"])
def test_both_faces_have_the_same_methods_and_arguments(name: str) -> None:
    """Whatever is public in one is in the other, but for what only threads need."""
    only_for_threads = {
        "send_async",
        "put",
        "write",
        "encode",
        "poll",
        "poll_columns",
        "receive_unless",
        "wait",
        "wake",
        "add_waker",
        "remove_waker",
        "report_task",
    }
    only_for_threads |= {
        "clock",
        "may_wait",
        "polls_at_once",
        "path",
        "config",
        "accept_clock",
        "closed",
        "jobs",
        "sender",
    }
    sync_class, async_class = getattr(duelog, name), getattr(aio, name)
    for method in [method for method in dir(sync_class) if not method.startswith("_")]:
        if method in only_for_threads:
            continue
        assert hasattr(async_class, method), method
        sync_method, async_method = getattr(sync_class, method), getattr(async_class, method)
        if callable(sync_method):
            assert list(inspect.signature(sync_method).parameters) == list(inspect.signature(async_method).parameters)


@pytest.mark.parametrize("name", aio.__all__)
def test_every_method_of_the_asyncio_face_explains_its_arguments_and_errors(name: str) -> None:
    """Its docstring has the whole of the face's explanation, and does not send the reader there."""
    face, own = Producer if name == "Producer" else getattr(duelog, name), getattr(aio, name)
    for method in [method for method in vars(own) if not method.startswith("_") and callable(getattr(own, method))]:
        summary, _, explanation = (inspect.getdoc(getattr(own, method)) or "").partition("\n\n")
        assert summary, method
        assert not summary.startswith("As "), method
        explained = getattr(duelog if method == "connect" else face, method)
        assert (inspect.getdoc(explained) or "").partition("\n\n")[2] in explanation, method
