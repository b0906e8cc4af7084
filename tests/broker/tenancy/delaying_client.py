"""A program with the ordinary Python client and requests over HTTP: delay policies of namespaces and topics.

python delaying_client.py URL ADMIN
"""

import json
import sys
import time
import urllib.request
from datetime import timedelta
from typing import Any

import pulsar

NAMESPACE = "/admin/v2/namespaces/public/default"
TOPIC = "/admin/v2/persistent/public/default/"

FIXED_MS = 1_000
HOUR = timedelta(hours=1)
WITHIN_S = 60
"""How long a message without a delay may take."""


def main(url: str, admin: str) -> None:
    """Each step says what is in force."""
    client = pulsar.Client(url, operation_timeout_seconds=WITHIN_S)

    def ask(method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(admin + path, data, method=method), timeout=WITHIN_S
        ) as answer:
            found = answer.read()
        return json.loads(found) if found else None

    def lateness_ms(topic: str, delay: timedelta | None) -> float:
        """From send to receipt of one message."""
        consumer = client.subscribe(topic, "s", pulsar.ConsumerType.Shared)
        producer = client.create_producer(topic, batching_enabled=False)
        begun = time.monotonic()
        producer.send(b"x", deliver_after=delay)
        consumer.acknowledge(consumer.receive(WITHIN_S * 1_000))
        taken_ms = (time.monotonic() - begun) * 1_000
        producer.close()
        consumer.close()
        return taken_ms

    def delay_all(fixed_ms: int) -> None:
        """Give the namespace a fixed delay."""
        body = {"active": True, "tickTime": 1, "fixedDeliveryDelayInMillis": fixed_ms}
        ask("POST", f"{NAMESPACE}/delayedDelivery", body)

    delay_all(FIXED_MS)
    assert lateness_ms("fixed", HOUR) >= FIXED_MS - 1, "the fixed delay of the namespace counts for every message"
    assert lateness_ms("fixed", None) >= FIXED_MS - 1, "the fixed delay counts for a message without one"

    delay_all(3_600_000)
    ask("POST", f"{TOPIC}fixed/delayedDelivery", {"fixedDeliveryDelayInMillis": 0, "maxDeliveryDelayInMillis": 60_000})
    assert lateness_ms("fixed", None) < WITHIN_S * 1_000, "the topic's 0 turns off what the namespace asks for"
    assert ask("GET", f"{TOPIC}fixed/delayedDelivery") == {
        "active": True, "tickTime": 1, "maxDeliveryDelayInMillis": 60_000, "fixedDeliveryDelayInMillis": 0}  # fmt: skip
    producer = client.create_producer("fixed", batching_enabled=False)
    try:
        producer.send(b"too late", deliver_after=HOUR)
    except pulsar.PulsarException:
        pass
    else:
        raise AssertionError("the maximum refuses a longer delay")
    producer.send(b"soon enough", deliver_after=timedelta(seconds=50))
    producer.close()

    delay_all(FIXED_MS)
    ask("DELETE", f"{TOPIC}fixed/delayedDelivery")
    assert ask("GET", f"{TOPIC}fixed/delayedDelivery") is None
    applied = ask("GET", f"{TOPIC}fixed/delayedDelivery?applied=true")
    assert applied["fixedDeliveryDelayInMillis"] == FIXED_MS, applied
    assert lateness_ms("fixed", None) >= FIXED_MS - 1, "the namespace counts again"

    delay_all(3_600_000)
    ask("POST", f"{TOPIC}fixed/delayedDelivery", {"active": False})
    assert lateness_ms("fixed", HOUR) < WITHIN_S * 1_000, "no delay counts where delays are not active"
    ask("DELETE", f"{NAMESPACE}/delayedDelivery")

    parted = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 2}
    ask("POST", f"{NAMESPACE}/autoTopicCreation", parted)
    client.create_producer("parted").close()
    ask("POST", f"{TOPIC}parted/delayedDelivery", {"fixedDeliveryDelayInMillis": FIXED_MS})
    assert lateness_ms("parted", HOUR) >= FIXED_MS - 1, "a partition goes by its topic's policies"
    assert ask("GET", f"{TOPIC}parted-partition-1/delayedDelivery")["fixedDeliveryDelayInMillis"] == FIXED_MS
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
