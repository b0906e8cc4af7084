"""The child process of torture.py: threads that use one store, and what happens to them."""

import faulthandler
import itertools
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from duelog import DelayedStore, Message, MessageId, StoreConfig, Subscription
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import DuelogError, StoreFailed
from duelog.store.wal import write_batch

TOPICS: dict[str, SubscriptionType] = {"a": "exclusive", "b": "shared", "c": "key_shared", "d": "failover"}
PARTITION_MS = 3_000
_STUCK_S = 60


def copy_of(directory: Path) -> str:
    """Where the copy of the store is."""
    return (directory / "copy").as_uri()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Child:
    """One process on the store in `directory`."""

    def __init__(self, directory: Path, seed: int, seconds: float) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.life = f"{os.getpid():x}.{seed:x}"
        self.until = time.monotonic() + seconds
        self.numbers = itertools.count()
        self.session = 0
        self.log_file = os.open(directory / "log", os.O_WRONLY | os.O_APPEND)
        self.store: DelayedStore
        self.stopping = threading.Event()
        self.may_interrupt = False
        signal.signal(signal.SIGINT, self._interrupted)

    def _interrupted(self, *_: object) -> None:
        if self.may_interrupt:
            raise KeyboardInterrupt

    def log(self, *event: object) -> None:
        """One line, whole: what a process has written a kill does not take."""
        os.write(self.log_file, (json.dumps(event) + "\n").encode())

    def name(self) -> str:
        return f"{self.life}.{next(self.numbers)}"

    def guarded(self, work: Callable[[random.Random], None], seed: int) -> Callable[[], None]:
        """A thread's work, again and again until the session ends, whatever it raises."""

        def run() -> None:
            rng = random.Random(seed)
            while not self.stopping.is_set():
                self.once(work, rng)

        return run

    def once(self, work: Callable[[random.Random], None], rng: random.Random) -> None:
        main = threading.current_thread() is threading.main_thread()
        try:
            try:
                self.may_interrupt |= main
                work(rng)
            finally:
                self.may_interrupt &= not main
        except KeyboardInterrupt:
            self.may_interrupt = False
            self.log("interrupts")
        except StoreFailed as error:
            if not self.stopping.is_set():
                self.log("failed stores", str(error))
            self.stopping.set()  # to be opened again
        except DuelogError as error:
            self.log("refused " + type(error).__name__)
            time.sleep(0.02)
        except Exception:
            self.log("raw", traceback.format_exc()[-1500:])
            time.sleep(0.1)

    def asked(self, rng: random.Random) -> Message:
        """A message with a name, due in the next seconds; said in the log before it is sent."""
        name = self.name()
        due_ms = _now_ms() + rng.choice((rng.randrange(1, 10), rng.randrange(300), rng.randrange(5_000)))
        self.log("try", name, due_ms)
        return Message(name.encode(), deliver_at=due_ms, key=f"k{rng.randrange(20)}")

    def send(self, rng: random.Random) -> None:
        message = self.asked(rng)
        self.store.topic(rng.choice("abcd")).send(message.payload, deliver_at=message.deliver_at, key=message.key)
        self.log("stored", [bytes(message.payload).decode()])
        time.sleep(rng.random() * 0.01)

    def send_batch(self, rng: random.Random) -> None:
        messages = [self.asked(rng) for _ in range(rng.randrange(1, 60))]
        self.store.topic(rng.choice("abcd")).send_batch(messages)
        self.log("stored", [bytes(message.payload).decode() for message in messages])
        time.sleep(rng.random() * 0.2)

    def send_numbered(self, rng: random.Random) -> None:
        """A batch; where it fails, sent again in other groups until each number is known to be stored."""
        messages = [self.asked(rng) for _ in range(rng.randrange(1, 12))]
        producer = self.store.topic(rng.choice("abcd")).producer(self.name())
        waiting = list(enumerate(messages))
        while waiting and not self.stopping.is_set():
            count = rng.randrange(1, len(waiting) + 1)
            part, first = [message for _, message in waiting[:count]], waiting[0][0]
            try:
                producer.send_batch(part, first_sequence_id=first)
            except (DuelogError, KeyboardInterrupt):
                if len(waiting) > 1 and rng.random() < 0.5:  # singly, from the first on
                    try:
                        producer.send(waiting[0][1], sequence_id=waiting[0][0])
                    except (DuelogError, KeyboardInterrupt):
                        continue
                    self.log("stored", [bytes(waiting.pop(0)[1].payload).decode()])
                continue
            del waiting[:count]
            self.log("stored", [bytes(message.payload).decode() for message in part])
        time.sleep(rng.random() * 0.2)

    def far(self, rng: random.Random, topic: str, most_ms: int) -> tuple[str, MessageId]:
        name = self.name()
        due_ms = _now_ms() + most_ms
        self.log("try", name, due_ms)
        message_id = self.store.topic(topic).send(name.encode(), deliver_at=due_ms)
        self.log("stored", [name])
        return name, message_id

    def move(self, rng: random.Random) -> None:
        topic = rng.choice("abcd")
        name, message_id = self.far(rng, topic, rng.choice((600_000, 9_000)))
        for first in rng.choice(((True,), (True,), (True, False))):
            due_ms = _now_ms() + rng.randrange(1, 6)
            self.log("move", name, due_ms)
            moved = self.store.topic(topic).reschedule(message_id, deliver_at=due_ms)
            if first or moved is not None:  # the second may be too late
                self.log("moved", name, due_ms, moved is not None)
            if moved is None:
                return
            message_id = moved
        time.sleep(rng.random() * 0.01)

    def replace(self, rng: random.Random) -> None:
        """A message that takes the place of the one before under its key, in a transaction, and is cancelled by it."""
        topic, key, before = rng.choice("abcd"), self.name(), ""
        for _ in range(rng.randrange(1, 4)):
            name, due_ms = self.name(), _now_ms() + rng.choice((400, 2_000, 60_000))
            self.log("try", name, due_ms)
            if before:
                self.log("cancel", before)  # it may have fired already
            with self.store.transaction() as transaction:
                transaction.send(topic, name.encode(), deliver_at=due_ms, dedup_key=key, replace=True)
                transaction.put_document(f"of/{key}", name.encode())
            self.log("stored", [name])
            before = name
            time.sleep(rng.random() * 0.02)
        self.log("cancel", before)
        self.log("cancelled", before, self.store.topic(topic).cancel_key(key) is True)

    def cancel(self, rng: random.Random) -> None:
        topic = rng.choice("abcd")
        name, message_id = self.far(rng, topic, rng.randrange(1, 2_000))
        time.sleep(rng.random() * 0.05)
        self.log("cancel", name)
        self.log("cancelled", name, self.store.topic(topic).cancel(message_id))

    def consume(self, topic: str) -> Callable[[random.Random], None]:
        def work(rng: random.Random) -> None:
            with self.store.topic(topic).subscribe("s", type=TOPICS[topic]) as consumer:
                for _ in range(rng.randrange(1, 200)):
                    if self.stopping.is_set():
                        break
                    self.take(consumer, rng, 0.1)

        return work

    def take(self, consumer: Subscription, rng: random.Random, timeout: float) -> int:
        messages = consumer.receive(rng.choice((1, 10, 1000)), timeout=timeout)
        now_ms = _now_ms()
        for message in messages:
            place = f"{consumer.topic} {message.position}"
            times = message.redelivery_count
            self.log(
                "got", f"{self.life}.{self.session}", message.payload.decode(), place, message.due_ms, now_ms, times
            )
        if messages and rng.random() < 0.05:
            consumer.nack(messages[: len(messages) // 2 + 1], delay=rng.random() * 0.1)
            messages = messages[len(messages) // 2 + 1 :]
        consumer.ack(messages, durable=rng.random() < 0.05)
        return len(messages)

    def run_short(self, rng: random.Random) -> None:
        """No file descriptor is left for a moment."""
        self.stopping.wait(rng.uniform(2, 8))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + rng.randrange(12), hard))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            self.log("shortages")
        self.stopping.wait(rng.uniform(0.05, 0.6))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)

    def interrupt(self, rng: random.Random) -> None:
        """SIGINT, as Ctrl-C: it strikes the main thread wherever that is."""
        self.stopping.wait(rng.uniform(0.02, 0.5))
        if not self.stopping.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    def open(self) -> None:
        rng = self.rng
        config = StoreConfig(
            partition_ms=PARTITION_MS,
            preload_ms=rng.choice((0, 500, 2_000)),
            bucket_ms=rng.choice((50, 1_000)),
            snapshot_every_entries=rng.choice((50, 1_000_000)),
            ledger_max_entries=rng.choice((100, 2_000)),
            ledger_max_age_ms=2_000,
            max_open_partitions=rng.choice((1, 3, 64)),
            fire_batch=rng.choice((10, 5_000)),
            ack_flush_ms=rng.choice((0, 20, 100)),
            durability=rng.choice(("commit", "commit", "relaxed", "replicated")),
            wal_bytes=rng.choice((16 << 10, 1 << 20, 64 << 20)),
            inline_delay_ms=rng.choice((0, 0, 5)),
            replica=copy_of(self.directory),
            replicated_timeout_ms=2_000,
            ship_ms=rng.choice((10, 1_000)),
            ship_bytes=rng.choice((64 << 10, 1 << 20)),
            run_entries=rng.choice((8, 192)),
        )
        self.session += 1
        self.store = DelayedStore.open(self.directory / "store", config)
        for topic in TOPICS:
            if not self.store.topic(topic).exists() or "s" not in self.store.topic(topic).subscriptions():
                self.store.topic(topic).subscribe("s").close()

    def close(self) -> None:
        faulthandler.dump_traceback_later(_STUCK_S, exit=True)
        self.store.close()
        faulthandler.cancel_dump_traceback_later()

    def live(self) -> None:
        """Sessions of some seconds each, in one process, the main thread doing whatever the others do."""
        while time.monotonic() < self.until:
            self.open()
            self.stopping.clear()
            work: list[Callable[[random.Random], None]] = [self.send, self.send, self.send_batch, self.send_numbered]
            work += [self.move, self.move, self.cancel, self.replace]
            work += [self.consume(topic) for topic in "aabbcd"]
            threads = [threading.Thread(target=self.guarded(each, self.rng.randrange(1 << 30))) for each in work]
            threads.append(threading.Thread(target=self.guarded(self.run_short, self.rng.randrange(1 << 30))))
            threads.append(threading.Thread(target=self.guarded(self.interrupt, self.rng.randrange(1 << 30))))
            for thread in threads:
                thread.start()
            end = min(self.until, time.monotonic() + self.rng.uniform(4, 20))
            mine = [*work[1:3], *work[5:8], self.consume("c"), self.consume("b"), self.tick]
            while time.monotonic() < end and not self.stopping.is_set():
                self.once(self.rng.choice(mine), self.rng)
            self.stopping.set()
            faulthandler.dump_traceback_later(_STUCK_S, exit=True)
            for thread in threads:
                thread.join()
            self.close()

    def tick(self, rng: random.Random) -> None:
        for _ in range(20):
            self.store.tick()

    def drain(self) -> None:
        """Receive all that is left and due within half a minute, and have the store checked."""
        self.open()
        end_ms = _now_ms() + 30_000
        for topic, kind in TOPICS.items():
            with self.store.topic(topic).subscribe("s", type=kind) as consumer:
                quiet = 0
                while quiet < 20:
                    due = consumer.receive(1_000, timeout=0.5)
                    now_ms = _now_ms()
                    for message in due:
                        name, place = message.payload.decode(), f"{consumer.topic} {message.position}"
                        self.log("got", "drain", name, place, message.due_ms, now_ms, message.redelivery_count)
                    consumer.ack(due)
                    pending = list(self.store.topic(topic).scheduled(end=end_ms, limit=1))
                    quiet = 0 if due or pending else quiet + 1
        self.log("drained", end_ms)
        for finding in self.store.check(deep=True):
            self.log("found", finding.code, finding.message)
        self.close()


def main(directory: Path, seed: int, seconds: float) -> int:
    """Live for so many seconds; 0: drain the store."""
    write_batch.LARGE_BYTES = 400  # bodies of runs lie in files of their own
    child = Child(directory, seed, seconds)
    faulthandler.enable()
    try:
        if seconds:
            child.live()
        else:
            child.drain()
    except BaseException:
        child.log("raw", traceback.format_exc()[-1500:])
        sys.stderr.write(traceback.format_exc())
        return 3
    return 0
