"""A client that lives through deaths of its broker: sends, receives, acknowledges, seeks, and writes all of it down.

    python killed_client.py URL NUMBER FILE         sends and receives until it is told otherwise on standard input
    python killed_client.py URL prepare FILE        makes the subscriptions of the audit
    python killed_client.py URL audit FILE COUNT    receives everything that is stored

Each line of FILE is what happened as JSON: kind, topic, text, time in seconds since 1970, and what else there is.
"""

import json
import random
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import pulsar
from pulsar import ConsumerType, InitialPosition

TOPICS = ("plain", "keys", "back")
PAUSE_S = 0.008
"""Between two messages of a client."""


class Client:
    """One client and its record."""

    def __init__(self, url: str, name: str, file: str) -> None:
        self.name = name
        self.random = random.Random(name)
        self.stopping, self.draining, self.ending = threading.Event(), threading.Event(), threading.Event()
        self._file = open(file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (until the end of the process)
        self._lock = threading.Lock()
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Warn, f"{file}.log")
        self.client = pulsar.Client(url, logger=logger, operation_timeout_seconds=20)

    def note(self, kind: str, topic: str, text: str, *more: Any) -> None:
        """Write down what happened."""
        line = json.dumps([kind, topic, text, time.time(), *more])
        with self._lock:
            self._file.write(line + "\n")

    def consumer(self, topic: str, name: str, kind: ConsumerType, **options: Any) -> Any:
        """A consumer from the beginning."""
        return self.client.subscribe(
            topic, name, consumer_type=kind, initial_position=InitialPosition.Earliest,
            negative_ack_redelivery_delay_ms=200, **options,
        )  # fmt: skip

    def producer(self, topic: str) -> Any:
        """A producer whose sends never time out."""
        return self.client.create_producer(
            topic, producer_name=f"p{self.name}", send_timeout_millis=0, batching_enabled=False,
            block_if_queue_full=True,
        )  # fmt: skip

    def produce(self, producers: dict[str, Any]) -> None:
        """Send to topics, at once and delayed, until told to stop; end when all is answered."""
        numbers = dict.fromkeys(producers, 0)
        while not self.stopping.wait(PAUSE_S):
            topic = self.random.choice(list(producers))
            number = numbers[topic]
            numbers[topic] += 1
            key = f"{self.name}-{number % 7}"
            due_ms = 0
            if topic == "plain" and self.random.random() < 0.4:
                due_ms = int(time.time() * 1_000) + self.random.randrange(50, 2_500)
            text = f"{key}:{number}:{due_ms}"
            self.note("sent", topic, text)
            options: dict[str, Any] = {"partition_key": key}
            if due_ms:
                options["deliver_at"] = due_ms
            producers[topic].send_async(text.encode(), self.answered(topic, text), **options)
        for producer in producers.values():
            producer.flush()
        print("flushed", flush=True)

    def answered(self, topic: str, text: str) -> Any:
        """Return a callback that notes the receipt of a message."""

        def done(result: Any, _: Any) -> None:
            self.note("receipt" if result == pulsar.Result.Ok else "failed", topic, text, str(result))

        return done

    def next(self, consumer: Any, topic: str) -> tuple[Any, str] | None:
        """The next message, if one comes soon."""
        try:
            message = consumer.receive(100)
        except pulsar.Timeout:
            return None
        text = message.data().decode()
        found = message.message_id()
        self.note("got", topic, text, message.redelivery_count(), f"{found.ledger_id()}:{found.entry_id()}")
        return message, text

    def consume(self, consumer: Any, topic: str) -> None:
        """Acknowledge most, give some back, keep some; all once it is to drain."""
        drained = False
        while not self.ending.is_set():
            if self.draining.is_set() and not drained:
                drained = True
                consumer.redeliver_unacknowledged_messages()
            found = self.next(consumer, topic)
            if found is None:
                continue
            message, text = found
            fate = 1.0 if drained or message.redelivery_count() else self.random.random()
            if fate < 0.1:
                self.note("kept", topic, text)
            elif fate < 0.15:
                self.note("nacked", topic, text)
                consumer.negative_acknowledge(message)
            else:
                consumer.acknowledge(message)
                self.note("acked", topic, text)

    def go_back(self, consumer: Any, topic: str) -> None:
        """Acknowledge up to a message, and seek to an earlier one now and then."""
        last: deque[Any] = deque(maxlen=40)
        while not self.ending.is_set():
            found = self.next(consumer, topic)
            if found is None:
                continue
            message, text = found
            last.append(message.message_id())
            if self.random.random() < 0.2 or self.draining.is_set():
                consumer.acknowledge_cumulative(message)
                self.note("through", topic, text)
            if self.random.random() < 0.03 and not self.draining.is_set():
                before = time.time()
                with suppress(pulsar.PulsarException):
                    consumer.seek(self.random.choice(last))
                self.note("sought", topic, text, before)


def work(client: Client) -> None:
    """One of the clients that the broker dies under."""
    wanted = {"plain": ConsumerType.Shared, "keys": ConsumerType.KeyShared}
    consumers = {topic: client.consumer(topic, "work", kind, receiver_queue_size=50) for topic, kind in wanted.items()}
    threads = [threading.Thread(target=client.consume, args=(each, topic)) for topic, each in consumers.items()]
    if client.name == "3":  # not the one that sends to it
        back = client.consumer(
            "back", "work", ConsumerType.Exclusive, receiver_queue_size=50, start_message_id_inclusive=True
        )
        threads.append(threading.Thread(target=client.go_back, args=(back, "back")))
    topics = TOPICS if client.name == "0" else TOPICS[:2]
    threads.append(threading.Thread(target=client.produce, args=({each: client.producer(each) for each in topics},)))
    print("ready", flush=True)
    for thread in threads:
        thread.start()
    for event in (client.stopping, client.draining, client.ending):
        sys.stdin.readline()
        event.set()
    for thread in threads:
        thread.join()


def audit(client: Client, count: int) -> None:
    """Receive so many messages of all topics, and whatever comes after them."""
    left = count
    for topic in TOPICS:
        consumer = client.consumer(topic, "audit", ConsumerType.Exclusive)
        quiet = 0
        while quiet < (100 if left > 0 and topic == TOPICS[-1] else 5):
            found = client.next(consumer, topic)
            quiet = quiet + 1 if found is None else 0
            left -= found is not None


def main(url: str, name: str, file: str, *more: str) -> None:
    """Run a client."""
    client = Client(url, name, file)
    if name == "prepare":
        for topic in TOPICS:
            client.consumer(topic, "audit", ConsumerType.Exclusive)
            client.consumer(topic, "work", ConsumerType.Shared if topic == "plain" else ConsumerType.Exclusive)
    elif name == "audit":
        audit(client, int(more[0]))
    else:
        work(client)
    client.client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
