"""A program: sends delayed messages, prints their ids, and prints what comes after each line that it reads."""

import json
import sys
import time
from datetime import timedelta
from typing import Any

import pulsar

AFTER = {"a": 3_000, "b": 4_000, "c": 5_000, "d": 6_000}
"""Seconds, so that none is due before a slow test has changed it."""


def main(url: str) -> None:
    """Talk to the broker."""
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(url, logger=logger, operation_timeout_seconds=60)
    consumer = client.subscribe("t", "s", pulsar.ConsumerType.Shared)
    producer = client.create_producer("t")
    ids = {}
    for name, seconds in AFTER.items():
        sent: Any = producer.send(name.encode(), deliver_after=timedelta(seconds=seconds), properties={"n": name})
        ids[name] = f"{sent.ledger_id()}:{sent.entry_id()}"
    print(json.dumps(ids), flush=True)
    sys.stdin.readline()
    received(consumer, 2)
    sys.stdin.readline()  # meanwhile the topic was unloaded
    producer.send(b"e")
    received(consumer, 1)
    sys.stdin.readline()  # meanwhile the subscription went back to its beginning
    received(consumer, 3)
    client.close()


def received(consumer: Any, count: int) -> None:
    """Print so many messages, and what comes behind them by mistake."""
    found = []
    for wait_ms in (*[60_000] * count, 300):
        try:
            message = consumer.receive(wait_ms)
        except pulsar.Timeout:
            break
        found.append({"payload": message.data().decode(), "atMs": time.time_ns() // 1_000_000})
        consumer.acknowledge(message)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
