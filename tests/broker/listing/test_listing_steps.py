"""GET_TOPICS_OF_NAMESPACE: what is held when, and what becomes of it; patterns, hashes, one client among others."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore
from duelog.broker.configuration import BrokerConfig
from duelog.broker.listing import topic_listing
from duelog.broker.listing.memory_limits import FIRST_SIZE, DualMemoryLimiter, Limits, frame_bytes, list_bytes
from duelog.broker.listing.topic_listing import TopicListing, UnreadablePattern, compiled, selected, topics_hash
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import Command, Error, GetTopics, GetTopicsResponse, TopicsMode
from duelog.broker.protocol.failures import ServerError
from duelog.broker.protocol.frames import head
from duelog.broker.protocol.loop_calls import Workers
from duelog.broker.security.permissions import Action, Permissions
from tests.broker.listing.watching import held_broker
from tests.broker.peers import FakePeer, HeldWorkers, TestLoop, answered, idle
from tests.broker.server.raw_client import RawClient, until
from tests.conftest import OpenStore

NAMES = [f"persistent://public/default/t{number:03}" for number in range(200)]
SIZE = list_bytes(NAMES)
FRAME = frame_bytes(SIZE, len(NAMES))
ASKED = GetTopics(1, "public/default")
ROOM = Limits(100_000, 10, 1_000)


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """With a namespace of topics, and one of another."""
    store = open_store()
    store.create_topics([*NAMES, "persistent://public/other/c"])
    return store


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Namespaces, each time that one is read."""
    found: list[str] = []
    names_of = topic_listing.names_of

    def counted(store: DelayedStore, namespace: str) -> list[str]:
        found.append(namespace)
        return names_of(store, namespace)

    monkeypatch.setattr(topic_listing, "names_of", counted)
    return found


class Stand:
    """The service, its time and its workers moved by hand."""

    def __init__(
        self,
        store: DelayedStore,
        heap: Limits = ROOM,
        direct: Limits = ROOM,
        permissions: Permissions = Permissions(),  # noqa: B008
        **settings: Any,
    ) -> None:
        self.loop = TestLoop()
        self.limiter = DualMemoryLimiter(heap, direct, self.loop)
        self.workers = HeldWorkers()
        config = BrokerConfig(**settings)
        self.listing = TopicListing(store, permissions, self.limiter, config, Workers(self.workers))
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, peer: FakePeer, command: GetTopics = ASKED) -> None:
        """A request, as far as it comes by itself."""
        self.tasks.append(asyncio.create_task(answered(self.listing.topics, peer, command)))
        await idle()

    def held(self) -> tuple[int, int, int]:
        """Bytes in use, of both kinds, and listings under way."""
        return self.limiter.heap.acquired, self.limiter.direct.acquired, self.listing.gate.under_way


async def test_each_step_holds_what_it_is_to_hold(store: DelayedStore) -> None:
    """A guess before there is a list, then its size; frames until they have left."""
    stand, peer = Stand(store), FakePeer()
    stand.workers.held = peer.held = True
    await stand.ask(peer)
    assert stand.held() == (FIRST_SIZE, 0, 1)
    await stand.workers.work()  # the list
    assert stand.held() == (SIZE, 0, 1)
    await stand.workers.work()  # filter and hash
    assert stand.held() == (SIZE, FRAME, 1)
    assert peer.sent == []
    await stand.workers.work()  # the frame
    assert stand.held() == (0, FRAME, 1)
    assert peer.take() == [GetTopicsResponse(1, NAMES, False, topics_hash(NAMES), True)]
    peer.leave()
    await idle()
    assert stand.held() == (0, 0, 0)
    stand.workers.held = False
    await stand.ask(FakePeer())
    assert stand.listing.gate.under_way == 0


async def test_the_second_listing_asks_for_the_size_of_the_first(store: DelayedStore) -> None:
    """By namespace and mode; others of the time wait for what the first one reports."""
    stand = Stand(store)
    stand.workers.held = True
    first, second = FakePeer(), FakePeer()
    await stand.ask(first)
    await stand.ask(second)
    assert stand.held() == (FIRST_SIZE, 0, 2)
    await stand.workers.work()
    assert stand.held() == (2 * SIZE, 0, 2)
    await stand.ask(FakePeer(), GetTopics(1, "public/default", TopicsMode.ALL))
    assert stand.held() == (2 * SIZE + FIRST_SIZE, 0, 3)
    stand.workers.held = False
    for _ in range(4):
        await stand.workers.work()
    assert stand.held() == (0, 0, 0)
    assert len(first.got(GetTopicsResponse)) == len(second.got(GetTopicsResponse)) == 1


@pytest.mark.parametrize("kind", ["heap", "direct"])
@pytest.mark.parametrize("way", ["timeout", "queue"])
async def test_a_permit_that_fails_is_too_many_requests(store: DelayedStore, kind: str, way: str) -> None:
    """Nothing is held then, and the next one is served."""
    stand = Stand(store, ROOM._replace(max_queue=1), ROOM._replace(max_queue=1))
    semaphore = getattr(stand.limiter, kind)
    everything = semaphore.acquire(100_000).result()
    waiting = semaphore.acquire(1) if way == "queue" else None
    peer = FakePeer()
    await stand.ask(peer)
    if waiting is None:
        assert peer.sent == []
        stand.loop.advance(1)
        await idle()
    (error,) = peer.got(Error)
    assert (error.request_id, error.error) == (1, ServerError.TOO_MANY_REQUESTS)
    semaphore.release(everything)
    if waiting is not None:
        semaphore.release(waiting.result())
    assert stand.held() == (0, 0, 0)
    await stand.ask(peer)
    assert len(peer.got(GetTopicsResponse)) == 1


async def test_a_list_larger_than_both_limits_is_served_alone(store: DelayedStore) -> None:
    """One after the other, all of them."""
    stand = Stand(store, Limits(50, 100, 1_000), Limits(50, 100, 1_000))
    peers = [FakePeer() for _ in range(20)]
    for peer in peers:
        await stand.ask(peer)
    await asyncio.gather(*stand.tasks)
    assert all(len(peer.got(GetTopicsResponse)) == 1 for peer in peers)
    assert stand.held() == (0, 0, 0)


async def test_a_frame_that_has_not_left_keeps_its_permit_and_a_connection_that_is_gone_gives_it_back(
    store: DelayedStore,
) -> None:
    """Requests that wait for it go on then."""
    stand = Stand(store, direct=Limits(FRAME, 10, 1_000))
    stuck, other = FakePeer(), FakePeer()
    stuck.held = True
    await stand.ask(stuck)
    await stand.ask(other)
    assert (len(stuck.sent), len(other.sent)) == (1, 0)
    assert stand.held() == (0, FRAME, 2)
    stuck.close("gone")
    stuck.leave()
    await idle()
    assert len(other.got(GetTopicsResponse)) == 1
    assert stand.held() == (0, 0, 0)


async def test_a_listing_that_waits_for_a_slow_reader_holds_no_heap_and_is_of_the_topics_that_are_there_then(
    store: DelayedStore,
) -> None:
    """Its list is dropped, its heap permit goes back, and both are made again; others that fit go on meanwhile."""
    stand = Stand(store, Limits(SIZE, 10, 1_000), Limits(FRAME + 100, 10, 1_000))
    stuck, waiting, unchanged = FakePeer(), FakePeer(), FakePeer()
    stuck.held = True
    await stand.ask(stuck)
    hash_before = stuck.got(GetTopicsResponse)[0].topics_hash
    await stand.ask(unchanged, GetTopics(1, "public/default", topics_hash=hash_before))
    await stand.ask(waiting)
    assert (unchanged.got(GetTopicsResponse)[0].changed, waiting.sent) == (False, [])
    assert (stand.held(), stand.limiter.direct.queue_size) == ((0, FRAME, 2), 1)
    store.delete_topic(NAMES[0])
    stuck.leave()
    await idle()
    assert waiting.got(GetTopicsResponse)[0].topics == NAMES[1:]
    assert stand.held() == (0, 0, 0)


async def test_a_list_that_grew_while_it_waited_waits_for_what_it_takes_now(store: DelayedStore) -> None:
    """The permit that is too small goes back first."""
    stand = Stand(store, direct=Limits(FRAME + 500, 10, 1_000))
    everything = stand.limiter.direct.acquire(FRAME + 500).result()
    peer = FakePeer()
    await stand.ask(peer)
    more = [f"{NAMES[-1]}-{'x' * 90}-{number}" for number in range(10)]
    store.create_topics(more)
    stand.limiter.direct.release(everything)
    await idle()
    assert peer.got(GetTopicsResponse)[0].topics == sorted([*NAMES, *more])
    assert stand.held() == (0, 0, 0)


async def test_one_connection_has_one_list_on_its_way_and_its_other_requests_hold_nothing(store: DelayedStore) -> None:
    """They are answered in turn, however long that takes; when it goes, all of them go."""
    stand, peer = Stand(store), FakePeer()
    peer.held = True
    for number in range(5):
        await stand.ask(peer, GetTopics(number, "public/default", topics_hash=f"{number:08}"))
    assert (len(peer.sent), stand.held()) == (1, (0, FRAME, 5))
    stand.loop.advance(100)
    peer.leave()
    await idle()
    assert [answer.request_id for answer in peer.got(GetTopicsResponse)] == [0, 1]
    peer.closed = True
    stand.limiter.gone(peer)
    await idle()
    assert (stand.held(), all(task.done() for task in stand.tasks)) == ((0, 0, 0), True)
    await stand.ask(peer)
    assert stand.tasks[-1].done()


async def test_requests_that_ask_the_same_while_they_wait_for_their_turn_are_answered_by_one_list(
    store: DelayedStore, reads: list[str]
) -> None:
    """Made after the last of them was asked; bytes that they share are held once, until all have left."""
    stand, peer = Stand(store), FakePeer()
    peer.held = True
    for number in range(100):
        await stand.ask(peer, GetTopics(number, "public/default"))
    assert (len(peer.sent), len(reads)) == (1, 1)
    store.create_topics(["persistent://public/default/t-new"])
    peer.leave()
    await idle()
    answers = peer.got(GetTopicsResponse)
    assert [answer.request_id for answer in answers] == list(range(100))
    assert {len(answer.topics) for answer in answers[1:]} == {len(NAMES) + 1}
    assert len(reads) == 2
    heap, direct, _ = stand.held()
    assert (heap, direct < FRAME + 200) == (0, True)
    peer.leave()
    await idle()
    assert stand.held() == (0, 0, 0)


async def test_a_list_that_fits_into_no_frame_is_refused_to_each_request(store: DelayedStore) -> None:
    """A longer frame would end the client's connection."""
    store.create_topics(f"{name}-{'x' * 40}" for name in NAMES)
    stand, peer = Stand(store, max_message_size=1), FakePeer()
    for number in range(5):
        await stand.ask(peer, GetTopics(number, "public/default"))
    assert [(each.request_id, each.error) for each in peer.got(Error)] == [
        (number, ServerError.NOT_ALLOWED) for number in range(5)
    ]
    assert stand.held() == (0, 0, 0)


async def test_a_connection_that_is_gone_takes_back_what_waits_for_it(store: DelayedStore) -> None:
    """In the queue of permits, at the disk, and behind a first asker."""
    stand = Stand(store)
    everything = stand.limiter.heap.acquire(100_000).result()
    first, second = FakePeer(), FakePeer()
    await stand.ask(first)
    await stand.ask(second)
    assert stand.limiter.heap.queue_size == 1
    first.closed = True
    stand.limiter.gone(first)
    await idle()
    assert stand.limiter.heap.queue_size == 1  # the second one, with a guess
    stand.limiter.heap.release(everything)
    stand.workers.held = True
    await idle()
    second.closed = True
    stand.limiter.gone(second)
    await idle()
    assert stand.held() == (0, 0, 0)
    await stand.workers.work()
    assert first.sent == second.sent == []


async def test_so_many_listings_are_under_way_at_most(store: DelayedStore) -> None:
    """maxConcurrentLookupRequest; the next is refused at once."""
    stand = Stand(store, max_concurrent_lookup_request=2)
    stand.workers.held = True
    peers = [FakePeer() for _ in range(3)]
    for peer in peers:
        await stand.ask(peer)
    assert [len(peer.got(Error)) for peer in peers] == [0, 0, 1]
    assert peers[2].got(Error)[0].error == ServerError.TOO_MANY_REQUESTS
    stand.workers.held = False
    for _ in range(3):
        await stand.workers.work()
    await stand.ask(peers[2])
    assert len(peers[2].got(GetTopicsResponse)) == 1


async def test_a_failure_of_the_store_leaves_nothing_held_and_the_next_asker_is_first(store: DelayedStore) -> None:
    """Those that shared the list are told of it, too."""
    stand, peer = Stand(store), FakePeer()
    with patch.object(topic_listing, "names_of", lambda *_: store.topics("no namespace")):
        await stand.ask(peer)
    assert [each.error for each in peer.got(Error)] == [ServerError.NOT_ALLOWED]
    assert stand.held() == (0, 0, 0)
    assert len(stand.limiter.sizes) == 0
    await stand.ask(peer)
    assert len(peer.got(GetTopicsResponse)) == 1


async def test_requests_at_one_time_share_one_list(store: DelayedStore, reads: list[str]) -> None:
    """A namespace is read once for them."""
    stand = Stand(store)
    await stand.ask(FakePeer())  # a size that is known: else the first asker goes ahead of the others
    stand.workers.held = True
    peers = [FakePeer() for _ in range(4)]
    for peer in peers:
        await stand.ask(peer)
    stand.workers.held = False
    for _ in range(3):
        await stand.workers.work()
    assert reads == ["public/default"] * 2
    assert {len(answer.topics) for peer in peers for answer in peer.got(GetTopicsResponse)} == {len(NAMES)}


@pytest.mark.parametrize(
    ("pattern", "settings", "names"),
    [
        ("persistent://public/default/(t001|t002)", {}, NAMES[1:3]),
        ("(", {}, None),
        ("persistent://public/default/" + "(a|" * 8 + "b", {}, None),
        ("public/default/t001", {"enable_broker_side_subscription_pattern_evaluation": False}, None),
    ],
)
async def test_a_pattern_is_filtered_by_the_broker_or_left_to_the_client(
    store: DelayedStore, pattern: str, settings: dict[str, Any], names: list[str] | None
) -> None:
    """The client's: unreadable, over 50 characters, evaluation off. The hash is that of what is listed."""
    peer = FakePeer()
    await Stand(store, **settings).ask(peer, GetTopics(1, "public/default", pattern=pattern))
    listed = NAMES if names is None else names
    assert peer.take() == [GetTopicsResponse(1, listed, names is not None, topics_hash(listed), True)]


async def test_a_listing_needs_a_right_and_a_namespace(store: DelayedStore) -> None:
    """Either right; a name of two parts; no topic is not persistent."""
    granted = {"r": {Action.CONSUME}, "w": {Action.PRODUCE}}
    grants: Any = SimpleNamespace(granted=lambda _: granted, administrators=lambda _: ())
    stand, peer = Stand(store, permissions=Permissions(grants, {"root"})), FakePeer()
    for peer.role in ("r", "w", "root"):
        for mode, count in ((TopicsMode.ALL, len(NAMES)), (TopicsMode.NON_PERSISTENT, 0)):
            await stand.ask(peer, GetTopics(1, "public/default", mode))
            assert len(peer.got(GetTopicsResponse)[-1].topics) == count
    await stand.ask(peer, GetTopics(1, "public"))
    peer.role = "stranger"
    await stand.ask(peer, GetTopics(2, "public/default"))
    assert [(each.request_id, each.error) for each in peer.got(Error)] == [
        (1, ServerError.INVALID_TOPIC_NAME), (2, ServerError.AUTHORIZATION)
    ]  # fmt: skip


def test_a_frame_takes_no_more_than_was_asked_for() -> None:
    """Whatever the names, and not much less."""
    for names in ([], NAMES, ["ä" * 190] * 50, [f"persistent://t/n/{'x' * 380}"] * 10):
        real = len(head(GetTopicsResponse(1 << 40, names, True, "01234567", False)))
        assert real <= frame_bytes(list_bytes(names), len(names)) <= real + 64 + len(names)


SOME = [f"persistent://public/default/{name}" for name in ("a", "a.b", "axb", "p-partition-0", "p-partition-1", "q")]


def local(names: list[str]) -> list[str]:
    """Without what they share."""
    return [name.removeprefix("persistent://public/default/") for name in names]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("public/default/a", ["a"]),
        ("persistent://public/default/a.*", ["a", "a.b", "axb"]),
        (r"persistent://public/default/a\.b", ["a.b"]),
        (r"\Qpersistent://public/default/a.b\E", ["a.b"]),
        (r"^\Qpersistent://public/default/a.b\E$", ["a.b"]),
        ("public/default/p", ["p-partition-0", "p-partition-1"]),
        ("public/default/p-partition-0", []),
        ("a", []),
        ("public/default/(a|q)", ["a", "q"]),
        ("public/default/.", ["a", "p-partition-0", "p-partition-1", "q"]),
    ],
)
def test_a_pattern_is_matched_in_full_without_scheme_and_partition(pattern: str, found: list[str]) -> None:
    """Pulsar's broker does the same."""
    assert local(selected(SOME, compiled(pattern))) == found


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", "[z-a]", "a{2000}"])
def test_a_pattern_that_re2_cannot_read_is_told(pattern: str) -> None:
    """Look-ahead and references need time without a bound."""
    with pytest.raises(UnreadablePattern):
        compiled(pattern)


def test_the_hash_is_the_one_that_clients_compute() -> None:
    """CRC-32C of the sorted names, its bytes from the lowest."""
    assert topics_hash([]) == "00000000"
    assert topics_hash(["persistent://tenant/ns/topic1"]) == "fd59a01d"
    assert topics_hash(SOME) == topics_hash(reversed(SOME)) != topics_hash(SOME[1:])


LARGE, SMALL = "public/default", "public/small"
MANY = [f"persistent://{LARGE}/{'x' * 180}-{number:04}" for number in range(2_000)]
"""Some 400 kB in a frame."""

LISTS = 1_000

LIMITS = {
    f"max_topic_list_in_flight_{kind}_mem_size_{name}": value
    for kind in ("heap", "direct")
    for name, value in (("mb", 2), ("permits_acquire_timeout_millis", 500))
}


async def deaf_client(port: int) -> RawClient:
    """A client with a small receive buffer that reads nothing once it is connected."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    client = RawClient(*await asyncio.open_connection(sock=connection, limit=1_024))
    assert isinstance(await client.ask(commands.Connect("deaf", protocol_version=21)), commands.Connected)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    return client


def lists() -> list[Command]:
    """The same question, many times."""
    return [commands.GetTopics(number, LARGE) for number in range(LISTS)]


def watches() -> list[Command]:
    """Watchers of everything; each answer has all names."""
    return [commands.WatchTopicList(number, number, LARGE, f"{LARGE}/.*") for number in range(LISTS - 1)]


@pytest.mark.parametrize("said", [lists, watches])
async def test_a_client_that_asks_for_a_thousand_lists_and_reads_none_holds_up_nobody(
    open_store: OpenStore, said: Any
) -> None:
    """One list of it is on its way at a time; other clients' lists, large and small, are answered."""
    store = open_store()
    store.create_topics([*MANY, *(f"persistent://{SMALL}/t{number}" for number in range(5))])

    async with held_broker(store, **LIMITS) as broker:
        limiter, port = broker.services.limiter, broker.port
        deaf = await deaf_client(port)
        deaf.say(*said())
        await until(lambda: limiter.direct.acquired)
        other = await RawClient.connected(port)
        for request_id, (namespace, count) in enumerate([(LARGE, 2_000), (SMALL, 5)] * 3):
            answer = await other.ask_for(commands.GetTopicsResponse, commands.GetTopics(request_id, namespace))
            assert len(answer.topics) == count
        await until(lambda: limiter.direct.acquired and not limiter.heap.acquired)
        assert limiter.direct.acquired < 500_000
        assert limiter.heap.timeouts + limiter.direct.timeouts == 0
        deaf.writer.transport.abort()
        await until(lambda: not limiter.direct.acquired)
