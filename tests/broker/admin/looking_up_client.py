"""A program whose client asks over HTTP where topics are, with the ordinary Python client.

python looking_up_client.py HTTP_URL
"""

from __future__ import annotations

import re
import sys

import pulsar
from pulsar import ConsumerType, InitialPosition


def main(url: str) -> None:
    """Topics, partitions, patterns and schemas, by requests over HTTP; messages as ever."""
    client = pulsar.Client(url, operation_timeout_seconds=20)
    consumer = client.subscribe("looked-up", "s", ConsumerType.Shared)
    producer = client.create_producer("looked-up", schema=pulsar.schema.StringSchema())
    producer.send("hello")
    assert consumer.receive(10_000).data() == b"hello"
    assert client.get_topic_partitions("looked-up") == ["persistent://public/default/looked-up"]
    pattern = re.compile("persistent://public/default/looked.*")
    other = client.subscribe(pattern, "s2", initial_position=InitialPosition.Earliest)
    assert other.receive(10_000).data() == b"hello"
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
