"""Threads that read a partition again and again while generation after generation takes over."""

from __future__ import annotations

import threading

from duelog import ManualClock, StoreConfig
from tests.cleanup.compacting import DAY_MS, close_day, finish, send_day
from tests.conftest import OpenStore

GENERATIONS = 12
READERS = 3
COUNT = 40


def test_readers_never_miss_a_message_while_generations_take_over(open_store: OpenStore, clock: ManualClock) -> None:
    """Each pass over the log finds all that was not dropped; nothing is quarantined, nothing is left open."""
    config = StoreConfig(run_entries=4, ledger_max_age_ms=100 * DAY_MS, max_open_partitions=1)
    store = open_store(config=config)
    topic = store.topic("a")
    for number in range(READERS):
        topic.subscribe(f"reader {number}").close()
    ids = send_day(store, "a", COUNT)
    close_day(store, clock)
    for number in range(READERS):  # all have acknowledged the first half
        with topic.subscribe(f"reader {number}") as subscription:
            subscription.ack(subscription.receive(COUNT)[: COUNT // 2], durable=True)
    done = threading.Event()
    passes = [0] * READERS
    wrong: list[object] = []

    def read(number: int) -> None:
        try:
            while not done.is_set():
                with topic.subscribe(f"reader {number}") as subscription:
                    found = []
                    while batch := subscription.receive(7):
                        found += [message.payload for message in batch]
                    if found != [b"%d" % at for at in range(COUNT // 2, COUNT)]:
                        wrong.append(found)
                if topic.get(ids[-1]) is None:
                    wrong.append("get")
                passes[number] += 1
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    for _ in range(GENERATIONS):
        finish(store)
        store.tick()
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(passes) > 0
    partition = next(iter(store._engine.storage.partitions))
    assert (partition.generation, partition._parked) == (GENERATIONS + 1, [])
    assert len(list(partition.path.parent.iterdir())) == 1
    assert store.stats().set_aside == 0
