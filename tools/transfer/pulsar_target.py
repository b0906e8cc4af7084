"""Another broker by its binary protocol, through the package pulsar-client: the target of a drain."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...store.errors import DuelogError, InvalidArgument
from .client_message import ClientMessage
from .draining import DrainProducer

_URL = re.compile(r"pulsar(\+ssl)?://[^\s/]+/?")
_SEND_TIMEOUT_MS = 60_000


class TargetFailed(DuelogError):
    """An error of the other broker, or of the way to it."""


class PulsarTarget:
    """A connection to a Pulsar cluster, or to another `duelog serve`."""

    def __init__(self, url: str, *, token: str | None = None, trust: Path | None = None) -> None:
        """trust: certificates in PEM, for pulsar+ssl. Raises InvalidArgument, also where pulsar-client is missing."""
        if _URL.fullmatch(url) is None:
            raise InvalidArgument("--to", url, "expected pulsar://host:port or pulsar+ssl://host:port")
        try:
            import pulsar
        except ImportError as error:
            raise InvalidArgument("--to", url, "needs pulsar-client; pip install 'duelog[drain]'") from error
        options: dict[str, Any] = {} if token is None else {"authentication": pulsar.AuthenticationToken(token)}
        if trust is not None:
            options["tls_trust_certs_file_path"] = str(trust)
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)  # its own is standard output
        self._pulsar = pulsar
        self._url = url
        with self._failures("connection"):
            self._client = pulsar.Client(url, logger=logger, tls_validate_hostname=True, **options)

    def subscribe(self, topic: str, subscription: str) -> None:
        """Make it, or find it there, from the newest message on."""
        pulsar = self._pulsar
        with self._failures(f"subscription {subscription} of {topic}"), suppress(pulsar.ConsumerBusy):
            self._client.subscribe(topic, subscription, pulsar.ConsumerType.Shared).close()

    def open(self, topic: str, producer: str) -> DrainProducer:
        """A producer that sends one by one."""
        with self._failures(topic):
            opened = self._client.create_producer(
                topic,
                producer_name=producer,
                send_timeout_millis=_SEND_TIMEOUT_MS,
                batching_enabled=False,
            )
        return _Producer(self, opened)

    def close(self) -> None:
        with suppress(Exception):  # what was sent is confirmed
            self._client.close()

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._pulsar.PulsarException, ValueError) as error:
            text = re.sub(r"^Pulsar error: ", "", str(error)) or type(error).__name__
            raise TargetFailed(f"{self._url}: {what}: {text}") from error


class _Producer:
    def __init__(self, target: PulsarTarget, producer: Any) -> None:
        self._failures = target._failures
        self._producer = producer
        self.last_number = int(producer.last_sequence_id())

    def send(self, message: ClientMessage, due_ms: int, number: int) -> None:
        """A number that is stored already is confirmed, and not stored again, where the broker deduplicates."""
        with self._failures("refused"):
            self._producer.send(
                message.content,
                properties=message.properties,
                partition_key=message.key,
                ordering_key=message.ordering_key,
                event_timestamp=message.event_time or None,
                sequence_id=number,
                deliver_at=due_ms,
            )

    def close(self) -> None:
        with suppress(Exception):  # what was sent is confirmed
            self._producer.close()
