"""Receiving in tests that compare payloads.

One call gives what is there when a slice of firing has ended, on a slow machine not all that is due.
"""

from collections.abc import Iterator

from duelog import DelayedStore, ReceivedMessage, Subscription


def each_received(consumer: Subscription, most: int = 1_000) -> Iterator[ReceivedMessage]:
    """Receive until there is nothing, or so many have come."""
    while most > 0 and (messages := consumer.receive(most)):
        yield from messages
        most -= len(messages)


def payloads(consumer: Subscription, most: int = 1_000) -> list[bytes]:
    """Receive and acknowledge."""
    messages = list(each_received(consumer, most))
    consumer.ack(messages)
    return [message.payload for message in messages]


def received(consumer: Subscription, most: int = 1_000) -> list[bytes]:
    """Receive without acknowledging."""
    return [message.payload for message in each_received(consumer, most)]


def payloads_of(store: DelayedStore, *topics: str) -> list[bytes]:
    """Payloads that subscription `s` of each topic receives now, acknowledged durably."""
    found = []
    for topic in topics or ("t",):
        with store.topic(topic).subscribe("s", type="shared") as consumer:
            messages = list(each_received(consumer))
            consumer.ack(messages, durable=True)
            found += [message.payload for message in messages]
    return found
