"""Parts that the connected kill test kills: the server, clients that send, receivers with a worker. Facts go to stdout.

This module is their fork server (see fork_server). Texts are payloads, and unique; each fact is told before the next
call of the store:

    ["pid", n]              the first fact of a process
    ["up"]                  it is connected, or serves
    ["nobody"]              it found no server, and ends
    ["sending", texts]      about to be stored, all of them or none
    ["sent", texts]         they are
    ["cancelling", text]    about to be cancelled: from now on it may be gone
    ["cancelled", text]     it was, and is never delivered
    ["late", text]          it was too late to cancel it
    ["got", topic, text, id, attempts, connection, early_ms]    it came by that connection, or by a later one
    ["acked", text, connection]    acknowledged durably: the answer came by that connection, or by one before
    ["trouble", text]       what must never be
"""

import functools
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import duelog
from duelog import DelayedStore, FollowUp, Message, ReceivedMessage, StoreConfig, Worker
from duelog.connected.connected_store import ConnectedStore
from duelog.errors import Disconnected
from duelog.operations import wire_address
from tests.disaster.fork_server import serve
from tests.disaster.working import say

CONFIG = StoreConfig(map_bytes=1 << 26, wal_bytes=1 << 18, ack_flush_ms=1)
SUBSCRIPTION = "s"
BEAT, BEAT_S = "beat", 1
HELD = "held"
"""A topic of which one part holds what it gets."""
RETRIES = 2
"""Retries of poisoned tasks; of others as many as there are kills."""
PATIENCE_S = 60


def run(request: dict[str, Any]) -> None:
    """Be a part until it is killed.

    place: the path of the store, which the server opens; or the address where others connect. listen: host and port
    where the server listens, too. silent_s: how long the other end of a connection may be out of reach.
    """
    say("pid", os.getpid())
    wire_address.SILENT_S = request.get("silent_s", wire_address.SILENT_S)
    if request["part"] == "server":
        with DelayedStore.open(request["place"], CONFIG) as opened:
            if "listen" in request:
                opened.listen(*request["listen"], admit=lambda *_: lambda *_: None)
            say("up")
            signal.pause()
    try:
        with duelog.connect(request["place"], reconnect=PATIENCE_S) as store:
            say("up")
            {"client": send, "receiver": receive, "holder": hold}[request["part"]](store, request["name"])
    except Disconnected as error:
        if error.in_doubt is not None or error.stored:
            raise
        say("nobody")


_connections = itertools.count()


def connection_of(store: DelayedStore) -> str:
    """The connection that was made last: a name that no other has."""
    assert isinstance(store, ConnectedStore)
    facts = store._connection.facts  # of its greeting
    return f"{os.getpid()}/{facts.setdefault('number', next(_connections))}"


def tasks_of(store: DelayedStore) -> tuple[Worker, Any, Any]:
    """A worker; a task that has a second one follow it, and one that fails until it is a dead letter."""
    worker = Worker(store, name=SUBSCRIPTION)

    def begin(topic: str) -> Any:
        return lambda message: got(topic, message, connection_of(store))

    @worker.task("last", retries=None, on_start=begin("last"))
    def last(text: str) -> None: ...

    @worker.task("first", retries=None, on_start=begin("first"))
    def first(text: str) -> FollowUp:
        return last.message(text=text)

    @worker.task("poison", retries=RETRIES, backoff=0.01, on_start=begin("poison"))
    async def poison(text: str) -> None:
        raise ValueError(text)

    return worker, first, poison


def send(store: DelayedStore, name: str) -> None:
    """Send in every way: numbered by the connection, by keys, in transactions, as tasks, at a schedule; cancel some."""
    topic, (_, first, poison) = store.topic("t"), tasks_of(store)
    topic.every(BEAT, interval=BEAT_S, payload=BEAT.encode(), misfires="all")

    def together(texts: list[str]) -> None:
        with store.transaction() as transaction:
            for text in texts:
                transaction.send(topic, text.encode(), deliver_after=0.05)

    ways: list[tuple[int, Callable[[list[str]], object]]] = [
        (1, lambda texts: topic.send(texts[0].encode())),
        (1, lambda texts: topic.send(texts[0].encode(), deliver_after=0.03, dedup_key=texts[0])),
        (1, lambda texts: topic.send_async(texts[0].encode()).result(PATIENCE_S)),
        (2, lambda texts: topic.send_batch([Message(text.encode(), deliver_after=0.02) for text in texts])),
        (2, lambda texts: topic.send_batch([Message(text.encode(), dedup_key=text) for text in texts])),
        (2, lambda texts: topic.send_payloads([text.encode() for text in texts])),
        (2, together),
        (1, lambda texts: first.send(text=texts[0], deliver_after=0.02, dedup_key=texts[0])),
        (1, lambda texts: poison.send(text=texts[0])),
    ]
    for number in itertools.count():
        for at, (count, way) in enumerate(ways):
            texts = [f"{name}:{number}:{at}:{each}" for each in range(count)]
            say("sending", texts)
            once(functools.partial(way, texts))
            say("sent", texts)
        for delay in (0.01, 0.05):  # the key's message is cancelled, or another takes its place
            text, other = f"{name}:{number}:key:{delay}", f"{name}:{number}:other:{delay}"
            put = functools.partial(topic.send, deliver_after=delay, dedup_key=text, replace=True)
            say("cancelling", text)
            once(functools.partial(put, text.encode()))
            if number % 2:
                say("cancelled" if topic.cancel_key(text) else "late", text)
            else:
                say("sending", [other])
                once(functools.partial(put, other.encode()))
                say("sent", [other])


def once(call: Callable[[], object]) -> None:
    """Do what is stored once; its result may be lost."""
    try:
        call()
    except Disconnected as error:
        if not error.stored:
            raise


def receive(store: DelayedStore, name: str) -> None:
    """Run a worker, and beside it receive one by one, with durable acknowledgements."""
    worker, _, _ = tasks_of(store)
    with worker, store.topic("t").subscribe(SUBSCRIPTION, type="shared") as consumer:
        while True:
            connection = connection_of(store)
            for message in consumer.receive():
                got("t", message, connection)
                consumer.ack(message, durable=True)
                say("acked", text_of(message), connection_of(store))


def hold(store: DelayedStore, name: str) -> None:
    """Receive, and acknowledge nothing."""
    with store.topic(HELD).subscribe(SUBSCRIPTION, type="shared") as consumer:
        for message in consumer:
            got(HELD, message, connection_of(store))


def text_of(message: ReceivedMessage) -> str:
    """The text of a message, of a task's arguments, or of one occurrence of the schedule."""
    text = message.payload.decode()
    if text == BEAT:
        assert message.occurrence is not None
        return f"{BEAT}@{message.occurrence.nominal_ms}"
    return str(json.loads(text)["text"]) if text.startswith("{") else text


def got(topic: str, message: ReceivedMessage, connection: str) -> None:
    """Tell that a message was handed out."""
    early_ms = 0 if message.due_ms is None else message.due_ms - time.time_ns() // 1_000_000
    attempts = message.redelivery_count + message.retries
    say("got", topic, text_of(message), str(message.message_id), attempts, connection, early_ms)


if __name__ == "__main__":
    threading.excepthook = lambda raised: say("trouble", repr(raised))
    serve(run)
