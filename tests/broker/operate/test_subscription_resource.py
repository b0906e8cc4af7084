"""Subscriptions over REST: paths and bodies as pulsar-admin sends them, and each refusal."""

import zlib
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock
from duelog.broker.admin.http_request import HttpError
from duelog.broker.operate.client_message import CODECS, MOST_BYTES, StoredMetadata, opened, reply_of
from duelog.broker.protocol import commands, entry, fields
from duelog.broker.protocol.commands import KeyValue
from duelog.broker.protocol.entry import MessageMetadata
from duelog.store.message import ScheduledMessage
from duelog.store.position import MessageId
from tests.broker.admin.rest import Rest, Rows, administered
from tests.broker.protocol.blobs import join_blob
from tests.conftest import START_MS

TOPICS = "/admin/v2/persistent/public/default"
SUBSCRIPTION = f"{TOPICS}/t/subscription/s"
LATEST = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1, "partitionIndex": -1}
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


def shown(position: MessageId, **more: Any) -> dict[str, Any]:
    """A message id as Pulsar's clients write it."""
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id, "partitionIndex": -1, **more}


def backlog(store: DelayedStore, name: str = "s", topic: str = "t") -> int:
    """The path of a subscription."""
    return store.topic(topic).subscription(name).stats().backlog


async def test_a_subscription_is_created_where_the_body_says(rest: Rest) -> None:
    """At the end, at the beginning, at a message, at the receipt of a delayed one that has fired; twice is 409."""
    ids = rest.store.topic("t").send_payloads([b"a", b"b", b"c"])
    more = shown(ids[1], isExcluded=False, batchIndex=-1)
    for name, body, left in (("a", ..., 0), ("b", None, 0), ("c", LATEST, 0), ("d", EARLIEST, 3), ("h", "latest", 0),
                             ("e", shown(ids[1]), 2), ("f%2Fg", more, 2), ("i", "earliest", 3)):  # fmt: skip
        path = f"{TOPICS}/t/subscription/{name}?replicated=false"
        assert (await rest.ask("PUT", path, body)).status == 204
        assert (await rest.ask("PUT", path, body)).status == 409
        assert backlog(rest.store, name) == left
    assert (await rest.ask("GET", f"{TOPICS}/t/subscriptions")).value == [*"abcde", "f/g", "h", "i"]
    assert (await rest.ask("DELETE", f"{TOPICS}/t/subscription/f%2Fg")).status == 204
    assert (await rest.ask("DELETE", f"{TOPICS}/t/subscription/f%2Fg")).status == 404


REFUSED: Rows = (
    ("PUT", "new", {"ledgerId": "x", "entryId": 1}, 412, "ledgerId='x'"),
    ("PUT", "new", {"ledgerId": 99_999, "entryId": 1}, 412, "no such ledger"),
    ("PUT", "new", [], 412, "object"),
    ("PUT", "new?replicated=true", ..., 412, "replicated=true"),
    ("POST", "s/skip/-1", ..., 412, "numMessages=-1"),
    ("POST", "s/skip/x", ..., 412, "numMessages='x'"),
    ("POST", "s/expireMessages/0", ..., 412, "expireTimeInSeconds=0"),
    ("POST", "s/resetcursor/-5", ..., 412, "timestamp=-5"),
    ("POST", "s/resetcursor", {"ledgerId": 1}, 412, "entryId=None"),
    ("POST", "s/resetcursor", "newest", 412, "'newest'"),
    ("GET", "s/position/0", ..., 412, "messagePosition=0"),
    ("GET", "s/position/4", ..., 404, "no message 4"),
    ("GET", "none/position/1", ..., 404, "no subscription 'none'"),
    ("POST", "none/skip_all", ..., 404, "no subscription 'none'"),
    ("DELETE", "none", ..., 404, "no subscription 'none'"),
)


async def test_what_cannot_be_done_says_why(rest: Rest) -> None:
    """The field and the value; nothing changes."""
    topic = rest.store.topic("t")
    topic.subscribe("s").close()
    topic.send_payloads([b"a", b"b", b"c"])
    await rest.refuses(REFUSED, f"{TOPICS}/t/subscription/")
    assert (topic.subscriptions(), backlog(rest.store)) == (["s"], 3)


async def test_skipping_expiring_and_going_back(rest: Rest) -> None:
    """Each step by the backlog that it leaves; what is not due stays."""
    topic = rest.store.topic("t")
    topic.subscribe("s").close()
    first_ms = rest.store.clock.now_ms()
    ids = topic.send_payloads([b"%d" % number for number in range(10)])
    topic.send(b"late", deliver_after=3_600)
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/skip/4")).status == 204
    assert backlog(rest.store) == 6
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/expireMessages/3600")).status == 204
    assert backlog(rest.store) == 6
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/skip_all")).status == 204
    assert backlog(rest.store) == 0
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/resetcursor/{first_ms}")).status == 204
    assert backlog(rest.store) == 10
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/resetcursor", shown(ids[3]))).status == 204
    assert backlog(rest.store) == 7
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/resetcursor", shown(ids[3], isExcluded=True))).status == 204
    assert backlog(rest.store) == 6
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/skip/1000")).status == 204
    assert backlog(rest.store) == 0
    assert [each.payload for each in topic.scheduled()] == [b"late"]
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/resetcursor", EARLIEST)).status == 204
    assert backlog(rest.store) == 10
    assert (await rest.ask("POST", f"{TOPICS}/t/all_subscription/expireMessages/1")).status == 204


@pytest.mark.parametrize("name", ["excluded", "isExcluded"])
async def test_reset_cursor_with_exclude_reset_position_goes_to_the_message_behind(rest: Rest, name: str) -> None:
    """Java says `excluded`; of a batch's inner message the entry comes again."""
    topic = rest.store.topic("t")
    batch = entry.pack(entry.Header(entry.BATCH, 0, 3, 1_000), join_blob(b"", b"x"))
    ids = topic.send_payloads([b"a", batch, b"c"])
    topic.subscribe("s", type="shared", initial_position="latest").close()

    for body, left in (
        (shown(ids[0], **{name: True}), 2), (shown(ids[0], **{name: False}), 3), (shown(ids[2], **{name: True}), 0),
        (shown(ids[1], **{name: True}), 1), (shown(ids[1], batchIndex=1, **{name: True}), 2),
        (shown(ids[1], batchIndex=2, **{name: True}), 1), (shown(ids[2], batchIndex=0, **{name: True}), 0),
    ):  # fmt: skip
        assert (await rest.ask("POST", f"{SUBSCRIPTION}/resetcursor", body)).status == 204
        assert backlog(rest.store) == left, body


@pytest.mark.parametrize("name", ["excluded", "isExcluded"])
async def test_reset_cursor_behind_a_delayed_message_goes_by_its_receipt(tmp_path: Path, name: str) -> None:
    """The place behind it is that in the main log, not that in its day."""
    clock = ManualClock(START_MS)

    async with administered(tmp_path / "store", clock=clock) as (_, rest, store):
        topic = store.topic("t")
        receipts = [topic.send(b"later", deliver_after=3600), topic.send(b"late", deliver_after=3500)]
        topic.subscribe("s", type="shared").close()
        clock.advance(3_601_000)
        store.tick()
        assert backlog(store) == 2
        body = shown(receipts[0], **{name: True})
        assert (await rest.ask("POST", f"{SUBSCRIPTION}/resetcursor", body)).status == 204
        assert backlog(store) == 0


async def test_topics_expire_messages_up_to_a_position(rest: Rest) -> None:
    """`expire-messages -p`: what was acknowledged stays so, what is delayed comes; inside a batch its entry stays."""
    topic = rest.store.topic("t")
    batch = entry.pack(entry.Header(entry.BATCH, 0, 3, 1_000), join_blob(b"", b"x"))
    with topic.subscribe("s", type="shared") as consumer:
        ids = topic.send_payloads([*([b"m"] * 150), batch, b"c", b"d"])
        topic.send(b"late", deliver_after=3600)
        received = consumer.receive(200)
        consumer.ack(received[-1], durable=True)
    path = f"{SUBSCRIPTION}/expireMessages"

    for body, left in (
        ("earliest", 152), (shown(ids[0]), 151), (shown(ids[1], excluded=True), 151), (shown(ids[149]), 2),
        (shown(ids[150], batchIndex=1), 2), (shown(ids[150], excluded=True, batchIndex=2), 2), (shown(ids[3]), 2),
        (shown(ids[150], batchIndex=2), 1), ("latest", 0),
    ):  # fmt: skip
        assert (await rest.ask("POST", path, body)).status == 204
        assert backlog(rest.store) == left, body
    assert [each.payload for each in topic.scheduled()] == [b"late"]
    assert (await rest.ask("POST", path, ...)).status == 412
    delayed = topic.scheduled()
    late = next(iter(delayed)).message_id
    answered = await rest.ask("POST", path, shown(late))
    assert (answered.status, "not due" in answered.reason) == (412, True)


NAMESPACES = "/admin/v2/namespaces/public/n"
WHOLES = (NAMESPACES, f"{NAMESPACES}/0x00000000_0xffffffff")


@pytest.mark.parametrize("path", WHOLES)
async def test_namespaces_clear_backlog_and_unsubscribe_concern_every_topic(rest: Rest, path: str) -> None:
    """By the name of a subscription or all of them; other namespaces keep theirs; consumers keep a subscription."""
    assert (await rest.ask("PUT", NAMESPACES)).status == 204
    topics = ["persistent://public/n/a", "persistent://public/n/b", "persistent://public/default/t"]

    def backlogs() -> list[dict[str, int]]:
        return [{each.name: each.backlog for each in rest.store.topic(name).stats().subscriptions} for name in topics]

    for topic in topics:
        for name in ("s", "u%2Fv"):
            rest.store.topic(topic).subscribe(name, type="shared").close()
        rest.store.topic(topic).send_payloads([b"1", b"2"])
        rest.store.topic(topic).send(b"late", deliver_after=3600)
    two, none = {"s": 2, "u%2Fv": 2}, {"s": 0, "u%2Fv": 0}
    assert (await rest.ask("POST", f"{path}/clearBacklog/u%2Fv")).status == 204
    assert backlogs() == [{"s": 2, "u%2Fv": 0}, {"s": 2, "u%2Fv": 0}, two]
    assert (await rest.ask("POST", f"{path}/clearBacklog", "")).status == 204
    assert backlogs() == [none, none, two]
    client = await rest.client()
    kind = commands.SubscriptionType.SHARED
    assert await client.ask(commands.Subscribe(topics[1], "s", kind, 1, 1)) == commands.Success(1)
    assert (await rest.ask("POST", f"{path}/unsubscribe/s")).status == 412
    assert backlogs() == [none, none, two]
    assert (await rest.ask("POST", f"{path}/unsubscribe/u%2Fv")).status == 204
    assert (await rest.ask("POST", f"{path}/unsubscribe/u%2Fv")).status == 204
    assert backlogs() == [{"s": 0}, {"s": 0}, two]
    assert rest.store.topic(topics[0]).stats().pending == 1
    for what in ("clearBacklog", "clearBacklog/s", "unsubscribe/s"):
        refused = await rest.ask("POST", f"{NAMESPACES}/0x00000000_0x80000000/{what}")
        assert (refused.status, "0x80000000" in refused.reason) == (412, True)
        assert (await rest.ask("POST", f"/admin/v2/namespaces/public/no/{what}")).status == 404


async def test_a_partitioned_topic_is_meant_as_a_whole(rest: Rest) -> None:
    """All partitions are skipped and moved; what needs one message is 405 and says which topic to ask for."""
    await rest.ask("PUT", f"{TOPICS}/p/partitions", 2)
    path = f"{TOPICS}/p/subscription/s"
    assert (await rest.ask("PUT", path, EARLIEST)).status == 204
    names = ["p-partition-0", "p-partition-1"]
    for name in names:
        rest.store.topic(name).send_payloads([b"a", b"b"])
    assert (await rest.ask("POST", f"{path}/skip_all")).status == 204
    assert [backlog(rest.store, topic=name) for name in names] == [0, 0]
    assert (await rest.ask("POST", f"{path}/resetcursor/1000")).status == 204
    assert [backlog(rest.store, topic=name) for name in names] == [2, 2]
    for method, what in (("GET", "position/1"), ("POST", "skip/1")):
        refused = await rest.ask(method, f"{path}/{what}")
        assert (refused.status, "p-partition-0" in refused.reason) == (405, True)
    assert (await rest.ask("DELETE", path)).status == 204
    assert (await rest.ask("GET", f"{TOPICS}/p/subscriptions")).value == []


async def test_consumers_are_closed_when_their_subscription_moves(rest: Rest) -> None:
    """They subscribe anew and get what it was moved to; without `force` they keep it from being deleted."""
    topic = rest.store.topic("t")
    topic.subscribe("s").close()
    topic.send(entry.pack(entry.Header(0, 0, 1, 1_000), join_blob(b"", b"x")))
    client = await rest.client()
    kind = commands.SubscriptionType.EXCLUSIVE
    assert await client.ask(commands.Subscribe("t", "s", kind, 1, 1)) == commands.Success(1)
    client.say(commands.Flow(1, 10))
    got = await client.hear_a(commands.Message)
    client.say(commands.Ack(1, commands.AckType.INDIVIDUAL, [got.message_id], request_id=2))
    assert isinstance(await client.hear(), commands.AckResponse)
    assert (await rest.ask("DELETE", SUBSCRIPTION)).status == 412
    assert (await rest.ask("POST", f"{SUBSCRIPTION}/resetcursor", EARLIEST)).status == 204
    assert await client.hear() == commands.CloseConsumer(1, 2**64 - 1)
    assert await client.ask(commands.Subscribe("t", "s", kind, 2, 3)) == commands.Success(3)
    client.say(commands.Flow(2, 10))
    assert (await client.hear_a(commands.Message)).message_id == got.message_id
    assert (await rest.ask("DELETE", f"{SUBSCRIPTION}?force=true")).status == 204
    assert isinstance(await client.hear(), commands.CloseConsumer)
    assert topic.subscriptions() == []


async def test_a_message_is_looked_at_with_its_metadata_in_headers(rest: Rest) -> None:
    """A batch comes in one piece with its number of messages; a program's message has what the store knows."""
    topic = rest.store.topic("t")
    topic.subscribe("s").close()
    metadata = MessageMetadata("me", 7, 1_500, num_messages_in_batch=2)
    blob = join_blob(fields.ENCODERS[MessageMetadata](metadata), b"both of them")
    topic.send(entry.pack(entry.header_for(metadata, 2, is_batch=True), blob))
    topic.send(b"plain", properties={"shop": "7"})
    found = await rest.ask("GET", f"{SUBSCRIPTION}/position/1")
    assert (found.status, found.value) == (200, b"both of them")
    assert found.headers["X-Pulsar-num-batch-message"] == "2"
    assert found.headers["X-Pulsar-batch-size"] == "12"
    assert found.headers["X-Pulsar-publish-time"] == "1970-01-01T00:00:01.500Z"
    assert (found.headers["X-Pulsar-producer-name"], found.headers["X-Pulsar-sequence-id"]) == ("me", "7")
    assert found.headers["X-Pulsar-Is-Encrypted"] == "false"
    ledger, number = found.headers["X-Pulsar-Message-ID"].split(":")
    assert (await rest.ask("GET", f"{TOPICS}/t/ledger/{ledger}/entry/{number}")).value == found.value
    found = await rest.ask("GET", f"{SUBSCRIPTION}/position/2")
    assert (found.value, found.headers["X-Pulsar-PROPERTY-shop"]) == (b"plain", "7")
    assert "X-Pulsar-num-batch-message" not in found.headers
    assert backlog(rest.store) == 2


def stored(metadata: StoredMetadata, payload: bytes) -> ScheduledMessage:
    """A message as the store gives it."""
    encoded = fields.ENCODERS[StoredMetadata](metadata)
    packed = entry.pack(entry.Header(0, 0, 1, 1_000), join_blob(encoded, payload))
    return ScheduledMessage(MessageId(1, 2), packed, None, {}, 1_000, 1_000, "t")


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_compressed_payload_is_shown_as_it_was(codec: str) -> None:
    """Whatever the producer compressed by."""
    pyarrow = pytest.importorskip("pyarrow")
    payload = b"again and " * 50
    names = {"LZ4": "lz4_raw", "ZSTD": "zstd", "SNAPPY": "snappy"}
    compressed = zlib.compress(payload) if codec == "ZLIB" else pyarrow.compress(payload, names[codec], asbytes=True)
    metadata = StoredMetadata("p", compression=CODECS.index(codec), uncompressed_size=len(payload))
    found = reply_of(stored(metadata, compressed), MessageId(1, 2))
    assert (found.body, found.headers["X-Pulsar-compression"]) == (payload, codec)
    damaged = stored(metadata, b"nonsense")
    with pytest.raises(Exception, match=codec):
        reply_of(damaged, MessageId(1, 2))


@pytest.mark.parametrize(("said", "shown"), [(0, b""), (MOST_BYTES + 1, None)], ids=["none", "too-large"])
def test_a_payload_that_lies_about_its_size_is_not_decompressed_without_bound(said: int, shown: bytes | None) -> None:
    """To zlib a size of 0 is no limit: a client's few bytes became as many as they hold."""
    metadata = StoredMetadata("p", compression=CODECS.index("ZLIB"), uncompressed_size=said)
    bomb = stored(metadata, zlib.compress(bytes(1 << 20)))
    if shown is None:
        with pytest.raises(HttpError, match=f"uncompressed_size={said}"):
            reply_of(bomb, MessageId(1, 2))
    else:
        assert reply_of(bomb, MessageId(1, 2)).body == shown


def test_every_field_that_clients_read_is_in_a_header() -> None:
    """Names and forms as the admin client of Java reads them."""
    metadata = StoredMetadata(
        "p", 3, 1_000, [KeyValue("a/b", "x\ny")], "west", "key", event_time=2_000, schema_version=b"\0\1",
        key_is_base64=True, ordering_key=b"o", deliver_at_time=3_000, highest_sequence_id=4, null_value=True,
        uuid="u", num_chunks=3, total_chunk_size=99, chunk_id=1, null_partition_key=True,
        encryption_keys=[b"e"], encryption_algo="RSA", encryption_param=b"z", compression=1, uncompressed_size=5,
    )  # fmt: skip
    assert opened(stored(metadata, b"")) == (metadata, b"")
    assert reply_of(stored(metadata, b"secret"), MessageId(1, 2)).headers == {
        "X-Pulsar-Message-ID": "1:2",
        "X-Pulsar-publish-time": "1970-01-01T00:00:01.000Z",
        "X-Pulsar-event-time": "1970-01-01T00:00:02.000Z",
        "X-Pulsar-deliver-at-time": "1970-01-01T00:00:03.000Z",
        "X-Pulsar-producer-name": "p",
        "X-Pulsar-sequence-id": "3",
        "X-Pulsar-Is-Encrypted": "true",
        "X-Pulsar-null-value": "true",
        "X-Pulsar-replicated-from": "west",
        "X-Pulsar-partition-key": "key",
        "X-Pulsar-compression": "LZ4",
        "X-Pulsar-uncompressed-size": "5",
        "X-Pulsar-encryption-algo": "RSA",
        "X-Pulsar-Base64-encryption-keys": "ZQ==",
        "X-Pulsar-Base64-encryption-param": "eg==",
        "X-Pulsar-Base64-schema-version-b64encoded": "AAE=",
        "X-Pulsar-partition-key-b64-encoded": "true",
        "X-Pulsar-Base64-ordering-key": "bw==",
        "X-Pulsar-highest-sequence-id": "4",
        "X-Pulsar-uuid": "u",
        "X-Pulsar-num-chunks-from-msg": "3",
        "X-Pulsar-total-chunk-msg-size": "99",
        "X-Pulsar-chunk-id": "1",
        "X-Pulsar-null-partition-key": "true",
        "X-Pulsar-PROPERTY-a%2Fb": "x%0Ay",
    }
