"""Closing a store always ends, takes every step, and can be done again where it was interrupted."""

import threading
from contextlib import suppress
from typing import Any

import lmdb
import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, SystemClock
from duelog.engine import Shutdown
from duelog.markers.firing.firing import Firing
from duelog.partitions.partition import Partition
from duelog.store.env.environment import Environment
from duelog.store.env.reader_gate import ReaderGate
from duelog.store.errors import ClosedError, DuelogError
from tests.conftest import OpenStore, Plant
from tests.store.commits import until


def test_each_step_is_taken_whatever_the_others_raise() -> None:
    """One that does not come to its end is begun anew, some times; the first error is raised at the end."""
    taken: list[str] = []
    raises: dict[str, list[BaseException]] = {
        "one": [KeyboardInterrupt()],
        "two": [OSError("two")],
        "three": [KeyboardInterrupt()] * 9,
    }

    def step(name: str) -> Any:
        def take() -> None:
            taken.append(name)
            if raises.get(name):
                raise raises[name].pop(0)

        return take

    shutdown = Shutdown([step(name) for name in ("one", "two", "three", "four")])
    with pytest.raises(KeyboardInterrupt):
        shutdown.run()
    assert taken == ["one", "one", "two", "two", "three", "three", "three", "four"]
    shutdown.run()
    assert len(taken) == 8


def test_a_first_step_that_refuses_leaves_the_others_to_another_time() -> None:
    """Like closing in a callback of `send_async`."""
    taken: list[int] = []
    errors: list[Exception] = [DuelogError("not here")]

    def refuse() -> None:
        if errors:
            raise errors.pop()

    shutdown = Shutdown([refuse, lambda: taken.append(1)])
    with pytest.raises(DuelogError):
        shutdown.run()
    assert not taken
    shutdown.run()
    assert taken == [1]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(Partition, "detach"), (Environment, "close"), (Environment, "write")])
def test_a_store_whose_closing_was_interrupted_can_be_opened_again(
    open_store: OpenStore, store: DelayedStore, plant: Plant, owner: type, name: str, after: bool
) -> None:
    """No environment is left open in this process, and the lock is given back."""
    with store.topic("t").subscribe("s") as subscription:
        store.topic("t").send(b"x")
        store.topic("t").send(b"later", deliver_after=60)
        subscription.ack(subscription.receive())
    plant(owner, name, KeyboardInterrupt(), after=after)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    store.close()
    with open_store().topic("t").subscribe("s") as subscription:
        assert subscription.receive() == []


def test_a_store_closes_while_an_interrupt_of_a_read_is_being_handled(open_store: OpenStore) -> None:
    """The traceback keeps the read alive, which is of the thread that closes: it does not wait for itself."""
    store = open_store(clock_=SystemClock())
    block = store._engine.storage.main.read()
    block.__enter__()  # as if an interrupt had come as the block was left
    store.close()
    assert store.closed
    with suppress(lmdb.Error):
        block.__exit__(None, None, None)


def test_an_interrupt_between_being_let_in_and_the_block_leaves_no_thread_inside() -> None:
    """Neither a reader, once the interrupt has been handled, nor an exclusive thread keeps others out."""
    gate = ReaderGate()
    reader, alone = gate.reading(), gate.alone()
    reader.__enter__()
    del reader
    assert not gate.held
    alone.__enter__()
    del alone
    inside = threading.Event()

    def look() -> None:
        with gate.alone(), gate.alone_at_once() as free:
            assert free
            inside.set()

    thread = threading.Thread(target=look)
    thread.start()
    assert inside.wait(30)
    thread.join()


def test_own_reads_do_not_keep_a_thread_from_being_alone() -> None:
    """An interrupt's own objects may be there as long as it is handled; others wait."""
    gate = ReaderGate()
    left = gate.reading()
    left.__enter__()
    with gate.alone():
        pass
    entered = threading.Event()

    def be_alone() -> None:
        with gate.alone():
            entered.set()

    thread = threading.Thread(target=be_alone)
    thread.start()
    assert not entered.wait(0.05)
    left.__exit__(None, None, None)
    assert entered.wait(30)
    thread.join()


def test_a_manual_store_is_closed_in_a_handler_of_an_interrupt(
    open_store: OpenStore, clock: ManualClock, plant: Plant
) -> None:
    """Like `with DelayedStore.open(...)` when Ctrl-C comes inside the block."""
    store: DelayedStore = open_store()
    store.topic("t").send(b"x", deliver_after=1)
    plant(Firing, "_fire", KeyboardInterrupt(), after=False)
    clock.advance(2_000)
    with pytest.raises(KeyboardInterrupt), store:
        store.tick()
    assert store.closed


def test_a_store_that_was_closed_beside_a_read_can_be_opened_again(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition whose opening has begun is awaited and closed: left open, it could not be used in this process."""
    store = open_store(config=StoreConfig(max_open_partitions=1))
    store.topic("t").send_batch([Message(b"x", deliver_after=hours * 3_600) for hours in (30, 60)])
    store.close()
    store = open_store(config=StoreConfig(max_open_partitions=1))
    partitions, ended = store._engine.storage.partitions, threading.Event()
    make = partitions._open._make

    def close() -> None:
        store.close()
        ended.set()

    closing = threading.Thread(target=close)

    def make_while_closing(partition: Partition) -> Environment:
        environment = make(partition)
        closing.start()
        until(lambda: partitions._open.closed)
        ended.wait(0.05)  # it is over, where it does not wait for the partition
        return environment

    monkeypatch.setattr(partitions._open, "_make", make_while_closing)
    with pytest.raises(ClosedError):
        store.topic("t").count()
    closing.join()
    assert open_store().topic("t").count() == 2


def test_a_read_beside_which_the_store_is_closed_says_closed_and_not_damaged(store: DelayedStore) -> None:
    """Its partition is not to be repaired."""
    store.topic("t").send_payloads([b"x"] * 1_001, deliver_after=60)
    scheduled = store.topic("t").scheduled()
    next(scheduled)
    store.close()
    with pytest.raises(ClosedError):
        list(scheduled)
