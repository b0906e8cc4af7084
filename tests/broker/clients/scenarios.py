"""Programs with the ordinary Python client: each function is run in a process of its own, against a broker.

    python scenarios.py NAME URL VERSION [MORE]

A scenario that the client's version cannot do raises `Lacking`, and the process ends with 77. Works with pulsar-client
3.1 and later.
"""

import inspect
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pulsar
from pulsar import ConsumerType, InitialPosition

LACKING = 77
WAIT_MS = 30_000
"""How long something may take that has to come; only a failure takes so long."""

QUIET_MS = 300
"""How long nothing has to come."""


class Lacking(Exception):
    """The client's version has not what the scenario needs."""


def named(name: str) -> str:
    """A topic of this version of the client."""
    return f"{name}-{sys.argv[3]}"


_clients: list[Any] = []


def connect(url: str, **options: Any) -> Any:
    """A client that prints warnings only, and is closed at the end."""
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn)
    client = pulsar.Client(url, logger=logger, **{"operation_timeout_seconds": 30, **options})
    _clients.append(client)
    return client


def receive(consumer: Any, count: int, *, ack: bool = True) -> list[Any]:
    """The next messages."""
    found = []
    for _ in range(count):
        message = consumer.receive(WAIT_MS)
        if ack:
            consumer.acknowledge(message)
        found.append(message)
    return found


def texts(messages: list[Any]) -> list[str]:
    """Their payloads."""
    return [message.data().decode() for message in messages]


def nothing(consumer: Any) -> bool:
    """Return True if nothing comes."""
    try:
        message = consumer.receive(QUIET_MS)
    except pulsar.Timeout:
        return True
    print("unexpected:", message.data(), message.message_id(), file=sys.stderr)
    return False


def numbered(count: int, prefix: str = "") -> list[str]:
    """Payloads."""
    return [f"{prefix}{number}" for number in range(count)]


def send(producer: Any, payloads: list[str], **options: Any) -> list[Any]:
    """Send one by one; the receipts."""
    return [producer.send(payload.encode(), **options) for payload in payloads]


def taken(url: str, payloads: list[str], topic: str) -> tuple[Any, Any, list[Any]]:
    """A client, a producer of `topic` that sent the payloads, and the receipts."""
    client = connect(url)
    producer = client.create_producer(topic, batching_enabled=False)
    return client, producer, send(producer, payloads)


def drained(consumer: Any, wait_ms: int = 500) -> Iterator[Any]:
    """Receive and acknowledge until nothing comes any more."""
    while True:
        try:
            message = consumer.receive(wait_ms)
        except pulsar.Timeout:
            return
        consumer.acknowledge(message)
        yield message


def check_refused(
    call: Callable[..., Any], *arguments: Any, error: Any = pulsar.PulsarException, **options: Any
) -> None:
    """Make a call that has to fail."""
    try:
        call(*arguments, **options)
    except error:
        return
    raise SystemExit(f"{call} succeeded")


def run_threads(*works: Callable[[], object]) -> None:
    """Run them side by side, and wait for all."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def blocked_by_a_quota(client: Any) -> None:
    """Two messages may be pending; the third is refused until one is due, what is due at once is taken."""
    consumer = client.subscribe("quota", "s", consumer_type=ConsumerType.Shared)
    producer = client.create_producer("quota", batching_enabled=False)
    for number in (1, 2):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=4 + number))
    full = pulsar.ProducerBlockedQuotaExceededException
    check_refused(producer.send, b"3", deliver_after=timedelta(seconds=1), error=full)
    other = client.create_producer("quota", batching_enabled=False)
    other.send(b"now")
    assert texts(receive(consumer, 2)) == ["now", "1"]
    deadline = time.monotonic() + WAIT_MS / 1000
    while True:
        try:
            producer.send(b"4", deliver_after=timedelta(seconds=1))
            break
        except full:
            assert time.monotonic() < deadline, "the producer stays blocked"
            time.sleep(0.2)
    assert sorted(texts(receive(consumer, 2))) == ["2", "4"]


def produce_and_consume(client: Any) -> None:
    """In order, as sent, with the ids of the receipts."""
    consumer = client.subscribe(named("basic"), "s/with slash", properties={"who": "me"})
    producer = client.create_producer(named("basic"), properties={"who": "me"}, batching_enabled=False)
    ids = []
    for number in range(50):
        ids.append(
            producer.send(
                b"%d" % number,
                properties={"n": str(number)},
                partition_key=f"k{number}",
                event_timestamp=1_000 + number,
            )
        )
    found = receive(consumer, 50)
    assert texts(found) == numbered(50)
    assert [message.properties() for message in found] == [{"n": text} for text in numbered(50)]
    assert [message.partition_key() for message in found] == numbered(50, "k")
    assert [message.event_timestamp() for message in found] == [1_000 + number for number in range(50)]
    places = [(each.ledger_id(), each.entry_id()) for each in ids]
    assert [(m.message_id().ledger_id(), m.message_id().entry_id()) for m in found] == places
    assert {message.redelivery_count() for message in found} == {0}
    assert nothing(consumer)


def empty_and_large(client: Any) -> None:
    """No byte, a megabyte, compressed, in chunks."""
    consumer = client.subscribe(named("sizes"), "s")
    large = bytes(range(256)) * 4_000
    payloads = [b"", large]
    producer = client.create_producer(named("sizes"), batching_enabled=False)
    for payload in payloads:
        producer.send(payload)
    producer = client.create_producer(named("sizes"), compression_type=pulsar.CompressionType.LZ4)
    producer.send(large)
    producer = client.create_producer(named("sizes"), chunking_enabled=True, batching_enabled=False)
    producer.send(large * 7)
    assert [message.data() for message in receive(consumer, 4)] == [*payloads, large, large * 7]


def chunks_among_consumers(client: Any) -> None:
    """Each message in chunks comes whole, to one of several consumers, by a key or without."""
    for kind in (ConsumerType.Shared, ConsumerType.KeyShared):
        topic = named(f"chunks-{kind}")
        consumers = [client.subscribe(topic, "s", consumer_type=kind) for _ in range(3)]
        producers = [client.create_producer(topic, chunking_enabled=True, batching_enabled=False) for _ in range(2)]
        payloads = [bytes([number]) * 6_000_000 for number in range(8)]
        for number, payload in enumerate(payloads):
            producers[number % 2].send_async(payload, None)
        for producer in producers:
            producer.flush()
        found = [message.data() for consumer in consumers for message in drained(consumer, 1_500)]
        assert sorted(found) == payloads, [len(each) for each in found]


def subscription_goes_on(client: Any) -> None:
    """Messages acknowledged before a close do not come again; the others do."""
    consumer = client.subscribe(named("goes-on"), "s")
    send(client.create_producer(named("goes-on")), numbered(10))
    receive(consumer, 4)
    receive(consumer, 3, ack=False)
    consumer.close()
    consumer = client.subscribe(named("goes-on"), "s")
    assert texts(receive(consumer, 6)) == numbered(10)[4:]
    consumer.close()
    consumer = client.subscribe(named("goes-on"), "s")
    assert nothing(consumer)
    consumer.unsubscribe()
    late = client.subscribe(named("goes-on"), "s", initial_position=InitialPosition.Earliest)
    assert texts(receive(late, 10, ack=False)) == numbered(10)


def cumulative(client: Any) -> None:
    """An acknowledgement of one is one of all before it."""
    consumer = client.subscribe(named("cumulative"), "s")
    send(client.create_producer(named("cumulative")), numbered(10))
    consumer.acknowledge_cumulative(receive(consumer, 10, ack=False)[6])
    consumer.close()
    assert texts(receive(client.subscribe(named("cumulative"), "s"), 3)) == ["7", "8", "9"]


def delays(client: Any) -> None:
    """Never early, by due time, for every type of subscription and for readers."""
    kinds = (ConsumerType.Exclusive, ConsumerType.Shared, ConsumerType.Failover, ConsumerType.KeyShared)
    consumers = [client.subscribe(named("delays"), str(kind), consumer_type=kind) for kind in kinds]
    reader = client.create_reader(named("delays"), pulsar.MessageId.earliest)
    producer = client.create_producer(named("delays"))
    start = time.time()
    for after_ms in (900, 300, 600):
        due_ms = int(start * 1_000) + after_ms
        producer.send(b"%d" % due_ms, deliver_at=due_ms)
    producer.send(b"0")
    ahead = time.time() * 1_000 < int(start * 1_000) + 300
    producer.send(b"%d" % int(time.time() * 1_000 + 1_200), deliver_after=timedelta(seconds=1.2))
    found: dict[Any, list[int]] = {each: [] for each in (*consumers, reader)}
    early = []

    def collect(source: Any) -> None:
        for _ in range(5):
            message = source.read_next(WAIT_MS) if source is reader else source.receive(WAIT_MS)
            due_ms = int(message.data())
            if time.time() * 1_000 < due_ms - 1:
                early.append(due_ms)
            found[source].append(due_ms)

    run_threads(*(partial(collect, each) for each in found))
    assert not early
    assert [len(each) for each in found.values()] == [5] * 5
    for each in found.values():
        assert not ahead or each[0] == 0, found  # on a machine at work, one is due before this is sent
        each.remove(0)
        assert each == sorted(each), found


def batches(client: Any) -> None:
    """Hundreds in a few entries, in order, each acknowledged by itself."""
    consumer = client.subscribe(named("batches"), "s", consumer_type=ConsumerType.Shared)
    producer = client.create_producer(named("batches"), batching_enabled=True, batching_max_publish_delay_ms=20)
    for text in numbered(500):
        producer.send_async(text.encode(), None)
    producer.flush()
    found = receive(consumer, 500)
    assert texts(found) == numbered(500)
    assert len({(m.message_id().ledger_id(), m.message_id().entry_id()) for m in found}) < 500
    assert nothing(consumer)


def batch_index(client: Any) -> None:
    """Messages of a batch that were acknowledged do not come again: not after a refusal, nor to the next consumer."""

    def subscribe() -> Any:
        return client.subscribe(
            named("index"), "s", consumer_type=ConsumerType.Shared, batch_index_ack_enabled=True,
            negative_ack_redelivery_delay_ms=100,
        )  # fmt: skip

    try:
        consumer = subscribe()
    except TypeError:
        raise Lacking("batch_index_ack_enabled") from None
    producer = client.create_producer(named("index"), batching_enabled=True, batching_max_publish_delay_ms=200)
    for text in numbered(10):
        producer.send_async(text.encode(), None)
    producer.flush()
    found = receive(consumer, 10, ack=False)
    for message in found[:6]:
        consumer.acknowledge(message)
    time.sleep(0.3)
    for message in found[6:]:
        consumer.negative_acknowledge(message)
    again = receive(consumer, 4, ack=False)
    assert sorted(texts(again)) == ["6", "7", "8", "9"]
    consumer.acknowledge(next(each for each in again if each.data() == b"7"))
    time.sleep(0.3)
    consumer.close()
    consumer = subscribe()
    assert sorted(texts(receive(consumer, 3))) == ["6", "8", "9"]
    assert nothing(consumer)


def exclusive(url: str) -> None:
    """The second consumer is refused, until the first one is gone."""
    client, other = connect(url), connect(url)
    first = client.subscribe(named("exclusive"), "s")
    check_refused(other.subscribe, named("exclusive"), "s", error=pulsar.ConsumerBusy)
    first.close()
    other.subscribe(named("exclusive"), "s").close()


def shared(client: Any) -> None:
    """Each message goes to one consumer, and both get some."""
    consumers = [
        client.subscribe(named("shared"), "s", consumer_type=ConsumerType.Shared, receiver_queue_size=10)
        for _ in range(2)
    ]
    producer = client.create_producer(named("shared"), batching_enabled=False)
    for text in numbered(100):
        producer.send_async(text.encode(), None)
    producer.flush()
    found: list[list[str]] = [[], []]

    def collect(number: int) -> None:
        found[number] += [message.data().decode() for message in drained(consumers[number], 1_000)]

    run_threads(partial(collect, 0), partial(collect, 1))
    assert sorted(found[0] + found[1]) == sorted(numbered(100))
    assert all(found), [len(each) for each in found]


def failover(url: str) -> None:
    """One of two consumers gets everything; the other goes on when it is gone."""
    clients = [connect(url), connect(url)]
    consumers = [
        client.subscribe(named("failover"), "s", consumer_type=ConsumerType.Failover, consumer_name=name)
        for client, name in zip(clients, "ab", strict=True)
    ]
    producer = clients[1].create_producer(named("failover"))
    send(producer, numbered(10))
    assert texts(receive(consumers[0], 5)) == numbered(5)
    assert nothing(consumers[1])
    clients[0].close()
    assert texts(receive(consumers[1], 5)) == numbered(10)[5:]


def key_shared(client: Any) -> None:
    """All of a key goes to one consumer, in order."""
    consumers = [client.subscribe(named("keys"), "s", consumer_type=ConsumerType.KeyShared) for _ in range(3)]
    producer = client.create_producer(named("keys"), batching_enabled=False)
    for number in range(200):
        producer.send_async(b"%d" % number, None, partition_key=f"key-{number % 20}")
    producer.flush()
    owners: dict[str, set[int]] = defaultdict(set)
    order: dict[str, list[int]] = defaultdict(list)
    count = 0
    for place, consumer in enumerate(consumers):
        for message in drained(consumer):
            owners[message.partition_key()].add(place)
            order[message.partition_key()].append(int(message.data()))
            count += 1
    assert count == 200
    assert {len(each) for each in owners.values()} == {1}
    assert all(each == sorted(each) for each in order.values())
    assert len({place for each in owners.values() for place in each}) > 1


def sticky(client: Any) -> None:
    """Consumers that name their ranges; overlapping ones are refused."""
    if not hasattr(pulsar, "ConsumerKeySharedPolicy"):
        raise Lacking("ConsumerKeySharedPolicy")
    kind = pulsar.KeySharedMode.Sticky

    def subscribe(start: int, end: int) -> Any:
        policy = pulsar.ConsumerKeySharedPolicy(kind, False, [(start, end)])
        return client.subscribe(named("sticky"), "s", consumer_type=ConsumerType.KeyShared, key_shared_policy=policy)

    low, high = subscribe(0, 32_767), subscribe(32_768, 65_535)
    check_refused(subscribe, 100, 200)
    producer = client.create_producer(named("sticky"), batching_enabled=False)
    for number in range(100):
        producer.send(b"m", partition_key=f"key-{number}")
    keys = [{message.partition_key() for message in drained(consumer)} for consumer in (low, high)]
    assert len(keys[0]) + len(keys[1]) == 100
    assert keys[0]
    assert keys[1]


def nack(client: Any) -> None:
    """Messages that are given back come again, counted; the rest do not."""
    consumer = client.subscribe(
        named("nack"), "s", consumer_type=ConsumerType.Shared, negative_ack_redelivery_delay_ms=100
    )
    send(client.create_producer(named("nack"), batching_enabled=False), numbered(5))
    for message in receive(consumer, 5, ack=False):
        if message.data() == b"3":
            consumer.negative_acknowledge(message)
        else:
            consumer.acknowledge(message)
    (again,) = receive(consumer, 1, ack=False)
    assert (again.data(), again.redelivery_count()) == (b"3", 1)
    consumer.negative_acknowledge(again)
    (again,) = receive(consumer, 1)
    assert (again.data(), again.redelivery_count()) == (b"3", 2)
    assert nothing(consumer)


def redelivery(client: Any) -> None:
    """All that is not acknowledged, in order, at the client's request."""
    consumer = client.subscribe(named("redelivery"), "s")
    send(client.create_producer(named("redelivery")), numbered(10))
    for message in receive(consumer, 10, ack=False)[:4]:
        consumer.acknowledge(message)
    time.sleep(0.3)
    consumer.redeliver_unacknowledged_messages()
    assert texts(receive(consumer, 6)) == numbered(10)[4:]


def acknowledgement_timeout(client: Any) -> None:
    """A message that a client holds for too long comes again."""
    consumer = client.subscribe(
        named("ack-timeout"), "s", consumer_type=ConsumerType.Shared, unacked_messages_timeout_ms=10_000
    )
    client.create_producer(named("ack-timeout")).send(b"m")
    receive(consumer, 1, ack=False)
    message = consumer.receive(25_000)
    consumer.acknowledge(message)
    assert message.redelivery_count() == 1


def dead_letter(client: Any) -> None:
    """After its redeliveries a message is in the dead-letter topic."""
    if not hasattr(pulsar, "ConsumerDeadLetterPolicy"):
        raise Lacking("ConsumerDeadLetterPolicy")
    policy = pulsar.ConsumerDeadLetterPolicy(
        max_redeliver_count=2, dead_letter_topic=named("dead"), initial_subscription_name="keep"
    )
    consumer = client.subscribe(
        named("alive"),
        "s",
        consumer_type=ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=100,
        dead_letter_policy=policy,
    )
    send(client.create_producer(named("alive")), ["bad"])
    for count in range(3):
        (message,) = receive(consumer, 1, ack=False)
        assert message.redelivery_count() == count
        consumer.negative_acknowledge(message)
    assert nothing(consumer)
    time.sleep(0.5)
    dead = client.subscribe(named("dead"), "keep")
    assert texts(receive(dead, 1)) == ["bad"]


def dead_letter_of_one_consumer(client: Any) -> None:
    """Of an Exclusive subscription nothing becomes a dead letter: a message comes again each time it is given back."""
    if not hasattr(pulsar, "ConsumerDeadLetterPolicy"):
        raise Lacking("ConsumerDeadLetterPolicy")
    consumer = client.subscribe(
        named("one"), "s", negative_ack_redelivery_delay_ms=100,
        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(max_redeliver_count=1),
    )  # fmt: skip
    send(client.create_producer(named("one")), ["bad"])
    for _ in range(5):
        (message,) = receive(consumer, 1, ack=False)
        consumer.negative_acknowledge(message)


def seek(url: str) -> None:
    """To an id, to a time, to both ends."""
    client, producer, ids = taken(url, numbered(10), named("seek"))
    consumer = client.subscribe(named("seek"), "s", initial_position=InitialPosition.Earliest)
    assert texts(receive(consumer, 10)) == numbered(10)
    consumer.seek(ids[4])
    assert texts(receive(consumer, 5)) == numbered(10)[5:]
    consumer.seek(pulsar.MessageId.earliest)
    found = receive(consumer, 10)
    assert texts(found) == numbered(10)
    time.sleep(0.05)
    between = int(time.time() * 1_000)
    time.sleep(0.05)
    send(producer, ["later"])
    consumer.seek(between)
    assert texts(receive(consumer, 1)) == ["later"]
    consumer.seek(0)
    assert texts(receive(consumer, 11)) == [*numbered(10), "later"]
    consumer.seek(pulsar.MessageId.latest)
    assert nothing(consumer)
    send(producer, ["last"])
    assert texts(receive(consumer, 1)) == ["last"]


def reader(url: str) -> None:
    """From the beginning, from the end, from an id and including it."""
    client, producer, ids = taken(url, numbered(10), named("reader"))

    def rest(found: Any) -> list[str]:
        read = []
        while found.has_message_available():
            read.append(found.read_next(WAIT_MS).data().decode())
        return read

    assert rest(client.create_reader(named("reader"), pulsar.MessageId.earliest)) == numbered(10)
    assert rest(client.create_reader(named("reader"), ids[4])) == numbered(10)[5:]
    if "start_message_id_inclusive" in inspect.signature(client.create_reader).parameters:
        assert rest(client.create_reader(named("reader"), ids[4], start_message_id_inclusive=True)) == numbered(10)[4:]
    latest = client.create_reader(named("reader"), pulsar.MessageId.latest)
    assert rest(latest) == []
    send(producer, ["new"])
    assert latest.read_next(WAIT_MS).data() == b"new"
    latest.seek(ids[8])
    assert rest(latest) == ["9", "new"]
    empty = client.create_reader(named("reader-of-nothing"), pulsar.MessageId.earliest)
    assert not empty.has_message_available()


def table_view(client: Any) -> None:
    """The last value of each key, also of keys that come later."""
    if not hasattr(pulsar.Client, "create_table_view"):
        raise Lacking("create_table_view")
    producer = client.create_producer(named("table"), batching_enabled=False)
    for number in range(20):
        producer.send(b"%d" % number, partition_key=f"k{number % 5}")
    view = client.create_table_view(named("table"))
    assert {key: view.get(key) for key in ("k0", "k4", "none")} == {"k0": b"15", "k4": b"19", "none": None}
    producer.send(b"new", partition_key="k0")
    end = time.monotonic() + WAIT_MS / 1000
    while view.get("k0") != b"new" and time.monotonic() < end:
        time.sleep(0.01)
    assert view.get("k0") == b"new"
    assert len(view) == 5


def partitioned(client: Any) -> None:
    """A topic that is three: a key stays in its partition, a consumer gets all."""
    assert len(client.get_topic_partitions(named("parted"))) == 3
    consumer = client.subscribe(named("parted"), "s")
    producer = client.create_producer(named("parted"), batching_enabled=False)
    for number in range(60):
        producer.send(b"%d" % number, partition_key=f"k{number % 7}")
    found = receive(consumer, 60)
    assert sorted(map(int, texts(found))) == list(range(60))
    places = defaultdict(set)
    for message in found:
        places[message.partition_key()].add(message.message_id().partition())
        assert message.topic_name().endswith(f"-partition-{message.message_id().partition()}")
    assert {len(each) for each in places.values()} == {1}
    assert len({place for each in places.values() for place in each}) > 1


class EagerConfiguration(pulsar._pulsar.ConsumerConfiguration):  # type: ignore[misc]
    """Looks for new topics each second. The client takes the argument for it, and waits for a minute all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern_auto_discovery_period(1)


def pattern(client: Any) -> None:
    """Topics that a pattern means, also those that come later."""
    producers = [client.create_producer(named(f"public/default/pat-{name}")) for name in "ab"]
    client.create_producer(named("public/default/other")).send(b"not this")
    pulsar._pulsar.ConsumerConfiguration = EagerConfiguration
    consumer = client.subscribe(
        re.compile(named("persistent://public/default/pat-.*")), "s",
        initial_position=InitialPosition.Earliest,
    )  # fmt: skip
    for producer in producers:
        producer.send(b"m")
    assert {message.topic_name() for message in receive(consumer, 2)} == {producer.topic() for producer in producers}
    client.create_producer(named("public/default/pat-c")).send(b"m")
    assert receive(consumer, 1)[0].topic_name().endswith(named("pat-c"))
    several = client.subscribe([named("pat-a"), named("pat-b")], "several", initial_position=InitialPosition.Earliest)
    assert len(receive(several, 2)) == 2


def schema(client: Any) -> None:
    """Records come as they were sent; another type of schema is refused."""
    from pulsar.schema import Integer, JsonSchema, Record, String, StringSchema  # noqa: PLC0415

    class Example(Record):  # type: ignore[misc]
        a = String()
        b = Integer()

    class Other(Record):  # type: ignore[misc]
        a = Integer()

    consumer = client.subscribe(named("schema"), "s", schema=JsonSchema(Example))
    producer = client.create_producer(named("schema"), schema=JsonSchema(Example))
    producer.send(Example(a="x", b=7))
    message = consumer.receive(WAIT_MS)
    assert (message.value().a, message.value().b) == ("x", 7)
    client.create_producer(named("schema"), schema=JsonSchema(Example)).close()
    for wrong in (JsonSchema(Other), StringSchema()):
        check_refused(client.create_producer, named("schema"), schema=wrong, error=pulsar.IncompatibleSchema)
    check_refused(client.subscribe, named("schema"), "wrong", schema=StringSchema(), error=pulsar.IncompatibleSchema)


def access_modes(client: Any) -> None:
    """An exclusive producer keeps others out until it is gone."""
    if not hasattr(pulsar, "ProducerAccessMode"):
        raise Lacking("ProducerAccessMode")
    mode = pulsar.ProducerAccessMode
    first = client.create_producer(named("access"), access_mode=mode.Exclusive)
    for wanted in (mode.Exclusive, mode.Shared):
        check_refused(client.create_producer, named("access"), access_mode=wanted)
    other = client.create_producer(named("access"), access_mode=mode.ExclusiveWithFencing)
    other.send(b"m")
    check_refused(first.send, b"m")


def names_that_break_rules(url: str) -> None:
    """Each has its answer, and the connection goes on. The client tries an invalid name again until its timeout."""
    client = connect(url, operation_timeout_seconds=2)
    for topic in ("non-persistent://public/default/t", "public/unknown/t", "t" * 600):
        check_refused(client.create_producer, topic)
        check_refused(client.subscribe, topic, "s")
    client.create_producer(named("good")).send(b"m")


def unknown_listener(url: str) -> None:
    """A listener that the broker has not is told at once; early versions try again all the same."""
    client = connect(url, listener_name="elsewhere", operation_timeout_seconds=3)
    try:
        client.create_producer(named("listener"))
    except pulsar.ConnectError:
        pass
    except pulsar.Timeout:
        assert pulsar.__version__ < "3.4"
    else:
        raise SystemExit("found")


def authenticated(url: str, token: str) -> None:
    """A token that may do everything."""
    client = connect(url, authentication=pulsar.AuthenticationToken(token))
    consumer = client.subscribe(named("secret"), "s")
    client.create_producer(named("secret")).send(b"m")
    receive(consumer, 1)


def password(url: str, user: str, secret: str) -> None:
    """A user and a password."""
    client = connect(url, authentication=pulsar.AuthenticationBasic(user, secret))
    client.create_producer(named("secret")).send(b"m")


def not_authenticated(url: str, token: str) -> None:
    """A wrong token, and none."""
    for options in ({"authentication": pulsar.AuthenticationToken(token)}, {}):
        client = connect(url, operation_timeout_seconds=2, **options)
        errors = (pulsar.AuthenticationError, pulsar.ConnectError, pulsar.Timeout)  # by version; all try again first
        check_refused(client.create_producer, named("secret"), error=errors)
        client.close()


def not_authorized(url: str, token: str) -> None:
    """A role without a right opens nothing and learns nothing."""
    client = connect(url, authentication=pulsar.AuthenticationToken(token))
    check_refused(client.create_producer, named("secret"), error=pulsar.AuthorizationError)
    check_refused(client.subscribe, named("secret"), "s", error=pulsar.AuthorizationError)
    check_refused(client.get_topic_partitions, named("secret"), error=pulsar.AuthorizationError)
    check_refused(client.get_topic_partitions, named("not-there"), error=pulsar.AuthorizationError)


def one_right(url: str, token: str, allowed: str) -> None:
    """A role that may produce, or consume, and not the other; what it may not do makes no topic either."""
    client = connect(url, authentication=pulsar.AuthenticationToken(token))
    calls: dict[str, Callable[[], Any]] = {
        "produce": lambda: client.create_producer(named("granted")).send(b"m"),
        "consume": lambda: client.subscribe(named("granted"), "s"),
    }
    assert client.get_topic_partitions(named("granted"))
    calls.pop(allowed)()
    for call in calls.values():
        check_refused(call, error=pulsar.AuthorizationError)


def refreshed(url: str, secret: str) -> None:
    """A connection outlives its token, if the client has a new one when it is asked for it."""
    import jwt  # noqa: PLC0415

    left = [4, 3_600]

    def next_token() -> str:
        expires = int(time.time()) + (left.pop(0) if len(left) > 1 else left[0])
        return jwt.encode({"sub": "root", "exp": expires}, secret, "HS256")

    client = connect(url, authentication=pulsar.AuthenticationToken(next_token))
    consumer = client.subscribe(named("refreshed"), "s")
    producer = client.create_producer(named("refreshed"))
    end = time.monotonic() + 5.2  # it expires within four seconds, and would be let go half a second later
    while time.monotonic() < end:
        producer.send(b"m")
        receive(consumer, 1)
        time.sleep(0.1)
    assert len(left) == 1, left


def secured(url: str, certificate: str) -> None:
    """Over TLS, with the broker's certificate checked."""
    client = connect(url, tls_trust_certs_file_path=certificate, tls_validate_hostname=True)
    consumer = client.subscribe(named("tls"), "s")
    client.create_producer(named("tls")).send(b"m")
    receive(consumer, 1)


def not_trusted(url: str, certificate: str) -> None:
    """A certificate that the client does not trust ends it."""
    client = connect(url, tls_trust_certs_file_path=certificate)
    check_refused(client.create_producer, named("tls"))


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
        end = float("inf")
        while producing.is_alive() or not (receipts <= received.keys() or time.monotonic() > end):
            if not producing.is_alive():
                end = min(end, time.monotonic() + WAIT_MS / 1000)
            try:
                message = consumer.receive(QUIET_MS)
            except pulsar.Timeout:
                continue
            received[message.data().decode()] += 1
            consumer.acknowledge(message)
            if len(received) > 200:
                flowing.set()

    producing, consuming = threading.Thread(target=produce), threading.Thread(target=consume)
    producing.start()
    consuming.start()
    assert flowing.wait(WAIT_MS / 1000)
    print("streaming", flush=True)
    sys.stdin.readline()
    before = len(received)
    end = time.monotonic() + WAIT_MS / 1000
    while len(received) < before + 200 and time.monotonic() < end:
        time.sleep(0.05)
    stop.set()
    producing.join()
    consuming.join()
    assert not failed, failed
    assert receipts <= received.keys(), sorted(receipts - received.keys())[:10]
    assert len(received) > before


def main(name: str, url: str, _version: str, *more: str) -> None:
    """Run a scenario, with a client where it asks for one, else with the address."""
    scenario = globals()[name]
    try:
        scenario(connect(url) if "client" in inspect.signature(scenario).parameters else url, *more)
        for client in _clients:
            with suppress(pulsar.AlreadyClosed):  # by the scenario, or a producer of it was fenced
                client.close()
    except Lacking as error:
        print(f"pulsar-client {pulsar.__version__} has no {error}")
        raise SystemExit(LACKING) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
