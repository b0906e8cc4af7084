"""Scenarios of clients that have to prove who they are, and of a broker that goes away; scenarios.py runs them."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pulsar
from pulsar import ConsumerType

from tests.broker.clients.talking import connect, named, receive

# -- who may what ------------------------------------------------------------------------------


def authenticated(url: str, token: str) -> None:
    """A token that may do everything."""
    client = connect(url, authentication=pulsar.AuthenticationToken(token))
    consumer = client.subscribe(named("secret"), "s")
    client.create_producer(named("secret")).send(b"m")
    receive(consumer, 1)
    client.close()


def password(url: str, user: str, secret: str) -> None:
    """A user and a password."""
    client = connect(url, authentication=pulsar.AuthenticationBasic(user, secret))
    client.create_producer(named("secret")).send(b"m")
    client.close()


def not_authenticated(url: str, token: str) -> None:
    """A wrong token, and none."""
    for options in ({"authentication": pulsar.AuthenticationToken(token)}, {}):
        client = connect(url, operation_timeout_seconds=2, **options)
        try:
            client.create_producer(named("secret"))
        except (pulsar.AuthenticationError, pulsar.ConnectError, pulsar.Timeout):  # by version; all try again first
            client.close()
        else:
            raise SystemExit("let in")


def not_authorized(url: str, token: str) -> None:
    """A role without a right opens nothing and learns nothing."""
    client = connect(url, authentication=pulsar.AuthenticationToken(token))
    calls: list[Callable[[], Any]] = [
        lambda: client.create_producer(named("secret")),
        lambda: client.subscribe(named("secret"), "s"),
        lambda: client.get_topic_partitions(named("secret")),
        lambda: client.get_topic_partitions(named("not-there")),
    ]
    for call in calls:
        try:
            call()
        except pulsar.AuthorizationError:
            continue
        raise SystemExit("allowed")
    client.close()


def one_right(url: str, token: str, allowed: str) -> None:
    """A role that may produce, or consume, and not the other; what it may not do makes no topic either."""
    client = connect(url, authentication=pulsar.AuthenticationToken(token))
    calls: dict[str, Callable[[], Any]] = {
        "produce": lambda: client.create_producer(named("granted")).send(b"m"),
        "consume": lambda: client.subscribe(named("granted"), "s"),
    }
    assert client.get_topic_partitions(named("granted"))
    calls.pop(allowed)()
    for refused in calls.values():
        try:
            refused()
        except pulsar.AuthorizationError:
            continue
        raise SystemExit("allowed")
    client.close()


def refreshed(url: str, *tokens: str) -> None:
    """A connection outlives its token, if the client has a new one when it is asked for it."""
    left = list(tokens)

    def next_token() -> str:
        return left.pop(0) if len(left) > 1 else left[0]

    client = connect(url, authentication=pulsar.AuthenticationToken(next_token))
    consumer = client.subscribe(named("secret"), "s")
    producer = client.create_producer(named("secret"))
    end = time.monotonic() + 5
    while time.monotonic() < end:
        producer.send(b"m")
        receive(consumer, 1)
        time.sleep(0.1)
    assert len(left) == 1, left
    client.close()


def secured(url: str, certificate: str) -> None:
    """Over TLS, with the broker's certificate checked."""
    client = connect(url, tls_trust_certs_file_path=certificate, tls_validate_hostname=True)
    consumer = client.subscribe(named("tls"), "s")
    client.create_producer(named("tls")).send(b"m")
    receive(consumer, 1)
    client.close()


def not_trusted(url: str, certificate: str) -> None:
    """A certificate that the client does not trust ends it."""
    client = connect(url, tls_trust_certs_file_path=certificate)
    try:
        client.create_producer(named("tls"))
    except pulsar.PulsarException:
        client.close()
    else:
        raise SystemExit("another certificate was trusted")


# -- a broker that goes away -------------------------------------------------------------------


def streaming(url: str) -> None:
    """Send and receive while the broker is killed and started again; every receipt is delivered.

    Prints `streaming` once messages flow, and ends some time after it was told to on standard input.

    With callbacks, pulsar-client 3.1 takes Python's lock while it holds its own; flush() of that producer and
    acknowledge() on that connection take them the other way round, and both hang.
    """
    client, sending = connect(url), connect(url)
    consumer = client.subscribe(named("stream"), "s", consumer_type=ConsumerType.Shared)
    producer = sending.create_producer(named("stream"), send_timeout_millis=30_000, block_if_queue_full=True)
    receipts: set[str] = set()
    failed: list[Any] = []
    received: dict[str, int] = defaultdict(int)
    stop = threading.Event()
    flowing = threading.Event()

    def done(text: str) -> Any:
        def called(result: Any, _: Any) -> None:
            if result == pulsar.Result.Ok:
                receipts.add(text)
            else:
                failed.append(result)

        return called

    def produce() -> None:
        number = 0
        while not stop.is_set():
            producer.send_async(b"%d" % number, done(str(number)))
            number += 1
            time.sleep(0.001)
        while len(receipts) + len(failed) < number:
            time.sleep(0.01)

    def consume() -> None:
        quiet = 0
        while quiet < 3:
            try:
                message = consumer.receive(1_000)
            except pulsar.Timeout:
                quiet += stop.is_set()
                continue
            received[message.data().decode()] += 1
            consumer.acknowledge(message)
            if len(received) > 200:
                flowing.set()

    threads = [threading.Thread(target=work) for work in (produce, consume)]
    for thread in threads:
        thread.start()
    assert flowing.wait(20)
    print("streaming", flush=True)
    sys.stdin.readline()
    before = len(received)
    end = time.monotonic() + 20
    while len(received) < before + 200 and time.monotonic() < end:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert receipts <= received.keys(), sorted(receipts - received.keys())[:10]
    assert len(received) > before
    client.close()
    sending.close()
